"""Where training text is from: the standard library's source, texts by path, BPE, files of tokens; and validation."""

import hashlib
import os
import platform
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.experiment.data import bpe, documents, markov, shards
from surefoot.experiment.data.corpus import VALIDATION_ONE_IN, Corpus, Tokens
from surefoot.experiment.data.token_files import read_manifest
from surefoot.experiment.errors import DataError, Locate, reading, with_remedy

TEXT = "text:"
# Tests are most of the standard library's bytes (20 of 31 MB) and the least like the rest.
_EXCLUDED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


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
        ValueError: an invalid name, as `bpe:` without a number, or an empty one.

    >>> load().name.startswith("standard library")
    True
    """
    corpus = _READERS.get(_kind(path), _read)(path.removeprefix(TEXT)) if isinstance(path, str) else _read(path)
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
    with reading(source, documents.READABLE):
        return _load_stdlib(source) if path is None else _load_path(source)


def _tokenised(name: str) -> Corpus:
    vocab, path = bpe.parse(name)
    text = _read(path)
    _warn_of_bytes(text)
    parts = [_decoded(part) for part in np.split(np.asarray(text.train), text.document_ends[:-1])]
    whole = "".join(parts)
    tokenizer = bpe.train([whole], vocab, text.name)
    train, validation = bpe.encode(tokenizer, [whole, _decoded(text.validation)])
    title = f"{text.name}, {vocab} BPE tokens"
    ends = np.cumsum([len(part.encode()) for part in parts])
    inner = np.unique(bpe.byte_ends(tokenizer, train).searchsorted(ends[:-1]) + 1)
    ends = np.append(inner[inner < train.size], train.size)
    return Corpus(train, validation, title, _sha256(train, validation), text.files, vocab, ends, tokenizer)


def _opened(name: str) -> Corpus:
    vocab, path = shards.parse(name)
    return shards.load(path, vocab)


def _synthetic(name: str) -> Corpus:
    symbols = markov.symbols_of(name)
    title = f"Markov language of {symbols} symbols, entropy {markov.entropy():.4f} nats"
    return replace(_from_block(markov.text(symbols), title, files=0), vocab=symbols)


_READERS = {markov.PREFIX: _synthetic, bpe.PREFIX: _tokenised, shards.PREFIX: _opened}


def _load_stdlib(root: Path) -> Corpus:
    texts = _texts(root, _EXCLUDED, ".py") if root.is_dir() else {}
    if not texts:
        missing = f"the standard library's source is not in {root} (a frozen or stripped Python)"
        raise DataError(f"{missing}; give a text file or folder with --data PATH")
    return _from_files(texts, f"standard library of {platform.python_implementation()} {platform.python_version()}")


def _load_path(path: Path) -> Corpus:
    if path.is_file():
        return _from_block(path.read_bytes(), str(path), files=1)
    if not path.is_dir():
        state = "is neither a file nor a folder" if path.exists() else "does not exist"
        raise with_remedy(DataError(f"{path} {state}; give a text file or folder"), Locate(path))
    if any(path.glob("train_*.bin")) and read_manifest(path) is not None:
        raise DataError(f"{path} holds tokens, not text: --data {shards.PREFIX}{path}")
    texts = _texts(path)
    if not texts:
        raise DataError(f"{path} holds no text (0 bytes in files that are text); give a text file or folder")
    return _from_files(texts, str(path))


def _texts(root: Path, excluded: frozenset[str] = frozenset(), end: str = "") -> dict[str, bytes]:
    """A folder's texts whose names have this end, by relative name, sorted."""
    files = {f.relative_to(root).as_posix(): f for f in documents.visible(root, excluded) if f.name.endswith(end)}
    texts = {name: files[name].read_bytes() for name in sorted(files)}
    return {name: text for name, text in texts.items() if text and b"\0" not in text}


def _from_files(texts: dict[str, bytes], name: str) -> Corpus:
    names = {file: file.encode("utf-8", "surrogateescape") for file in texts}
    held = {file: text for file, text in texts.items() if documents.is_held(names[file], VALIDATION_ONE_IN)}
    read = [text for file, text in texts.items() if file not in held]
    if not read or not held:
        return _from_block(b"".join(texts.values()), name, len(texts))
    return _from_splits(read, b"".join(held.values()), name, len(texts))


def _from_block(text: bytes, name: str, files: int) -> Corpus:
    cut = len(text) - len(text) // VALIDATION_ONE_IN
    return _from_splits([text[:cut]], text[cut:], name, files)


def _from_splits(read: Sequence[bytes], held: bytes, name: str, files: int) -> Corpus:
    """A corpus of training texts, in which a separator ends a document, and of one text held for validation."""
    separator = documents.SEPARATOR.encode()
    parts = [part for text in read for part in re.split(b"(?<=%b)" % re.escape(separator), text) if part]
    arrays = [np.frombuffer(part, dtype=np.uint8) for part in (b"".join(parts), held)]  # read-only views
    ends = np.cumsum([len(part) for part in parts])
    return Corpus(arrays[0], arrays[1], name, _sha256(*arrays), files, ends=ends)


def _sha256(train: Tokens, validation: Tokens) -> str:
    digest = hashlib.sha256(train.data)
    digest.update(validation.data)
    return digest.hexdigest()


def evaluation(source: str, data: str | None, corpus: Corpus) -> Corpus:
    """Load a source whose validation split is in the vocabulary that a model is trained with.

    Args:
        source: as `load` takes it. A text beside BPE data, or files of tokens with a `tokenizer.json`, is encoded by
            their vocabulary. Files of tokens without a manifest have the training's vocabulary, and one whose name
            says validation is so as a whole.
        data: the training's source, as `load` took it.
        corpus: what `load` made of it.

    Returns:
        The source's corpus.

    Raises:
        DataError: another vocabulary, or a source that cannot be read.
        ValueError: an invalid name.
    """
    kind, data_kind = _kind(source), _kind(data or "")
    encodes = corpus.tokenizer is not None
    if encodes and not kind:
        return _encoded(load(source), corpus)
    other = _opened_in(source, corpus.vocab) if kind == data_kind == shards.PREFIX else load(source)
    files = [one.tokenizer for one in (other, corpus) if isinstance(one.tokenizer, Path)]
    differ = len({file.read_bytes() for file in files}) > 1
    if kind != data_kind or other.vocab != corpus.vocab or (kind == bpe.PREFIX and source != data) or differ:
        remedy = "the text alone, which the training vocabulary encodes" if encodes else "data of the same kind"
        raise DataError(f"{other.name} has another vocabulary than the training data, {corpus.name}: give {remedy}")
    return other


def _opened_in(source: str, vocab: int) -> Corpus:
    """Open files of tokens, in this vocabulary where none is stated; a file named as validation is so as a whole."""
    stated, path = shards.parse(source)
    if stated is None and read_manifest(path) is None:
        stated = vocab
    whole = path.is_file() and shards.VALIDATION.search(path.stem.lower())
    return shards.load(path, stated, 1 if whole else VALIDATION_ONE_IN)


def _encoded(text: Corpus, corpus: Corpus) -> Corpus:
    """A text's validation split in the tokens of the training's source."""
    tokenizer = bpe.read(corpus.tokenizer) if isinstance(corpus.tokenizer, Path) else corpus.tokenizer
    assert tokenizer is not None
    _warn_of_bytes(text)
    (validation,) = bpe.encode(tokenizer, [_decoded(text.validation)])
    if (most := int(validation.max(initial=0))) >= corpus.vocab:
        raise DataError(f"{text.name} encodes to token {most}, but {corpus.name} has {corpus.vocab}: give --vocab N")
    return replace(text, validation=validation, vocab=corpus.vocab)


def _warn_of_bytes(text: Corpus) -> None:
    """Warn of a text that is not UTF-8 and has to be decoded."""
    documents.decoded(np.concatenate([text.train, text.validation]).tobytes(), text.name)


def _decoded(text: Any) -> str:
    """A text's bytes as characters; what is not UTF-8 becomes replacement characters."""
    return np.asarray(text).tobytes().decode("utf-8", "replace")


def _kind(source: str) -> str:
    """The prefix of a source; empty for a text by its path."""
    return next((prefix for prefix in _READERS if source.startswith(prefix)), "")
