"""Text as bytes or BPE tokens: the standard library's own source, any file or folder by path; seeded batches."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from surefoot.experiment.configs import DataOrder
from surefoot.experiment.data import bpe, documents, markov, shards
from surefoot.experiment.data.epochs import Epochs, Positions, at_random
from surefoot.experiment.errors import DataError, Locate, with_remedy

Split = Literal["train", "validation"]
Tokens = npt.NDArray[np.unsignedinteger[Any]]
SPLITS: tuple[Split, ...] = ("train", "validation")  # a split's index is part of its random key
TEXT = "text:"
VALIDATION_ONE_IN = 10  # a tenth of a file's bytes, or of a folder's files, is validation
# Tests are most of the standard library's bytes (20 of 31 MB) and the least like the rest.
_EXCLUDED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@final
@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens of a text, by default its bytes, in a fixed training and validation split.

    Args:
        train: tokens of the training split, in the smallest unsigned dtype that can represent the vocabulary.
        validation: tokens of the validation split, likewise.
        name: a description of the text for messages.
        sha256: of the training array's bytes followed by the validation array's (for one file: the file's own hash); of
            files of tokens, that of the manifest.
        files: number of files read.
        vocab: 256, the byte values; fewer for a synthetic language, more for a BPE vocabulary.
        ends: position after each document of the training split; default: it is one document.
        separator: token that ends a document of the training split, in place of `ends`: the first batch of documents
            looks for it in all tokens (a second for two gigabytes).
    """

    train: Tokens | shards.Shards
    validation: Tokens | shards.Shards
    name: str
    sha256: str
    files: int = 1
    vocab: int = 256
    ends: Positions | None = None
    separator: int | None = None

    @property
    def size(self) -> int:
        """Number of tokens of both splits."""
        return self.train.size + self.validation.size

    @property
    def unit(self) -> str:
        """Name of a token in messages: "byte" or "token"."""
        return "byte" if self.train.dtype == np.uint8 else "token"

    def require(self, context: int) -> None:
        """Raise DataError unless both splits have at least `context + 1` tokens; ValueError for a context below 1."""
        if context < 1:
            raise ValueError(f"context must be at least 1, got {context}")
        for split in SPLITS:
            size = self._tokens(split).size
            if size < context + 1:
                raise DataError(
                    f"{self.name}: {self.size} {self.unit}s are too few; {size} of them are in the {split} split and a "
                    f"context of {context} needs {context + 1}. Give a text of at least "
                    f"{VALIDATION_ONE_IN * (context + 1)} {self.unit}s, or a shorter context"
                )

    def batch(
        self,
        split: Split,
        seed: int,
        step: int,
        batch_size: int,
        context: int,
        rows: slice = slice(None),
        order: DataOrder = "random",
    ) -> tuple[Tensor, Tensor]:
        """Read windows of a split as inputs, and the windows one token later as targets. A pure function.

        At random they are those of `at_random`; by documents row `i` of a step is window `step * batch_size + i` of
        `Epochs`: every document of the training split is read once before one is read again.

        Args:
            split: "train" or "validation".
            seed: 0 or more; use a fixed one for validation, to compare runs of several seeds.
            step: 0 or more.
            batch_size: number of windows.
            context: tokens per window.
            rows: which of the windows are read; default: all.
            order: "random", or "documents" for the training split.

        Returns:
            `(inputs, targets)`, both `(batch_size, context)` int64, or as many as there are rows.

        Raises:
            ValueError: an unknown split, or a negative number.
            DataError: a text too short for the context, or a token outside the vocabulary.

        >>> text = np.arange(100, dtype=np.uint8)
        >>> corpus = Corpus(text[:90], text[90:], "numbers", "")
        >>> x, y = corpus.batch("train", seed=0, step=3, batch_size=2, context=4)
        >>> torch.equal(y, x + 1)
        True
        """
        if not (0 <= seed < 2**64 and 0 <= step < 2**64 and batch_size >= 1):
            raise ValueError(
                f"seed and step must be in [0, 2**64) and batch_size at least 1, got {seed}, {step}, {batch_size}"
            )
        text = self._tokens(split)
        self.require(context)
        if order == "documents":
            assert split == "train", "evaluations compare runs on the same windows of many documents"
            spans = self.epochs(context).batch(seed, step, batch_size, rows)
            parts = ((_windows(text, np.array([start]), length)[0] for start, length in each) for each in spans)
            windows = np.stack([np.concatenate([*each]) for each in parts])
        else:
            starts = at_random(seed, SPLITS.index(split), step, batch_size, rows, text.size - context)
            windows = _windows(text, starts, context + 1)
        return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())

    def epochs(self, context: int) -> Epochs:
        """The order in which documents are read; one process keeps it."""
        return self._epochs.setdefault(context, Epochs(self._ends, context))

    @functools.cached_property
    def _epochs(self) -> dict[int, Epochs]:
        return {}

    @functools.cached_property
    def _ends(self) -> Positions:
        if self.separator is not None and isinstance(self.train, shards.Shards):
            return self.train.ends(self.separator)
        return np.array([self.train.size]) if self.ends is None else self.ends

    def _tokens(self, split: Split) -> Tokens | shards.Shards:
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r}; choose from {', '.join(SPLITS)}")
        return self.train if split == "train" else self.validation


def _windows(text: Tokens | shards.Shards, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    if isinstance(text, shards.Shards):
        return text.windows(starts, length)
    windows: npt.NDArray[np.int64] = text[starts[:, None] + np.arange(length)].astype(np.int64)
    return windows


def load(path: str | os.PathLike[str] | None = None, *, context: int = 1) -> Corpus:
    """Read a text: None for the standard library's source, else a file or a folder.

    A file's last tenth is its validation split. In a folder and in the standard library the SHA-256 of a file's
    relative name decides its split, so that adding a file leaves the splits of the others unchanged; about a tenth of
    the *files* is validation. A folder of so few files that one split is empty is split like one file. Hidden files
    and files with a zero byte (not text) are left out of a folder.

    Args:
        path: file or folder of any text, with or without "text:" before it; or "bpe:N" or "bpe:N:PATH", the same in
            tokens of a byte-level BPE vocabulary of N, trained on the training split (11 s for the standard library);
            or "bin:PATH" or "bin:N:PATH", files of tokens, see `shards.load`; or "markov:N", the synthetic language of
            N symbols.
        context: number of tokens that both splits must exceed.

    Returns:
        The corpus.

    Raises:
        DataError: the path does not exist, cannot be read, or has no text; or the text is too short for the context
            or the vocabulary. The message names the remedy.
        ValueError: a name that is none, as `bpe:` without a number, or an empty one.

    >>> load().name.startswith("standard library")
    True
    """
    name = path if isinstance(path, str) else ""
    readers = {markov.PREFIX: _synthetic, bpe.PREFIX: _tokenised, shards.PREFIX: _opened}
    read = next((read for prefix, read in readers.items() if name.startswith(prefix)), None)
    corpus = read(name) if read else _read(name.removeprefix(TEXT) if isinstance(path, str) else path)
    corpus.require(context)
    return corpus


def absolute(path: str | None) -> str | None:
    """A value of `--data` that means the same in another working directory, for worker processes and later runs.

    Args:
        path: a path, one after `text:`, `bpe:N:`, `bin:` or `bin:N:`, or a value without a path.

    Returns:
        The value with its path made absolute.

    >>> absolute("markov:64"), absolute("bpe:512:/texts"), absolute("bin:/tokens")
    ('markov:64', 'bpe:512:/texts', 'bin:/tokens')
    """
    if path is None or re.fullmatch(r"markov:.*|bpe:\d+", path):
        return path
    kind = re.match(r"(text:|bpe:\d+:|bin:(\d+:)?)?", path)
    assert kind is not None, "all of it is optional"
    return f"{kind[0]}{Path(path[kind.end() :]).resolve()}"


def _read(path: str | os.PathLike[str] | None) -> Corpus:
    if path == "":
        raise ValueError("the path of the data is empty: give a text file or folder")
    source = Path(sysconfig.get_path("stdlib") if path is None else path)
    try:
        return _load_stdlib(source) if path is None else _load_path(source)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DataError(
            f"cannot read {error.filename or source}: {reason}; give a readable text file or folder"
        ) from error


def _tokenised(name: str) -> Corpus:
    vocab, path = bpe.parse(name)
    text = _read(path)
    parts = [np.asarray(part).tobytes() for part in (text.train, text.validation)]
    tokenizer = bpe.train(parts[0], vocab)
    train, validation = (bpe.encode(tokenizer, part) for part in parts)
    title = f"{text.name}, {vocab} BPE tokens"
    ends = None if text.ends is None else np.unique(bpe.byte_ends(tokenizer, train).searchsorted(text.ends[:-1]) + 1)
    ends = None if ends is None else np.append(ends[ends < train.size], train.size)
    return Corpus(train, validation, title, _sha256(train, validation), text.files, vocab, ends)


def _opened(name: str) -> Corpus:
    vocab, path = shards.parse(name)
    folder = shards.load(path, vocab, VALIDATION_ONE_IN)
    title = f"{path}, {folder.vocab} tokens"
    separator = folder.separator
    return Corpus(folder.train, folder.validation, title, folder.sha256, folder.files, folder.vocab, None, separator)


def _synthetic(name: str) -> Corpus:
    symbols = markov.symbols_of(name)
    title = f"Markov language of {symbols} symbols, entropy {markov.entropy():.4f} nats"
    return replace(_from_block(markov.text(symbols), title, files=0), vocab=symbols)


def _in_validation(name: str) -> bool:
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < 2**64 // VALIDATION_ONE_IN


def _load_stdlib(root: Path) -> Corpus:
    texts = _texts(root, _EXCLUDED, ".py") if root.is_dir() else {}
    if not texts:
        raise DataError(
            f"the standard library's source is not in {root} (a frozen or stripped Python); "
            "give a text file or folder with --data PATH"
        )
    return _from_files(texts, f"standard library of {platform.python_implementation()} {platform.python_version()}")


def _load_path(path: Path) -> Corpus:
    if path.is_file():
        return _from_block(path.read_bytes(), str(path), files=1)
    if not path.is_dir():
        state = "is neither a file nor a folder" if path.exists() else "does not exist"
        raise with_remedy(DataError(f"{path} {state}; give a text file or folder"), Locate(path))
    texts = _texts(path)
    if not texts:
        raise DataError(f"{path} holds no text (0 bytes in files that are text); give a text file or folder")
    return _from_files(texts, str(path))


def _texts(root: Path, excluded: frozenset[str] = frozenset(), end: str = "") -> dict[str, bytes]:
    """A folder's texts whose names end so, by their names, relative to it and sorted."""
    files = {f.relative_to(root).as_posix(): f for f in documents.visible(root, excluded) if f.name.endswith(end)}
    texts = {name: files[name].read_bytes() for name in sorted(files)}
    return {name: text for name, text in texts.items() if text and b"\0" not in text}


def _from_files(texts: dict[str, bytes], name: str) -> Corpus:
    held = {file: text for file, text in texts.items() if _in_validation(file)}
    read = [text for file, text in texts.items() if file not in held]
    if not read or not held:
        return _from_block(b"".join(texts.values()), name, len(texts))
    return _from_splits(read, b"".join(held.values()), name, len(texts))


def _from_block(text: bytes, name: str, files: int) -> Corpus:
    cut = len(text) - len(text) // VALIDATION_ONE_IN
    return _from_splits([text[:cut]], text[cut:], name, files)


def _from_splits(read: Sequence[bytes], held: bytes, name: str, files: int) -> Corpus:
    """A corpus of texts that are read, in which a separator ends a document, and one that is held for validation."""
    separator = documents.SEPARATOR.encode()
    parts = [part for text in read for part in re.split(b"(?<=%b)" % re.escape(separator), text) if part]
    arrays = [np.frombuffer(part, dtype=np.uint8) for part in (b"".join(parts), held)]  # read-only views
    ends = np.cumsum([len(part) for part in parts])
    return Corpus(arrays[0], arrays[1], name, _sha256(*arrays), files, ends=ends)


def _sha256(train: Tokens, validation: Tokens) -> str:
    digest = hashlib.sha256(train.data)
    digest.update(validation.data)
    return digest.hexdigest()
