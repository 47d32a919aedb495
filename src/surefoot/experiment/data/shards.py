"""Folders of files of tokens as one array for training and one for validation.

A folder that `surefoot tokens` wrote has a manifest, which says what each file must be. Others are taken as they are.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import numpy.typing as npt

from surefoot.experiment.data.token_files import TOKEN, open_tokens, read_manifest, require_same
from surefoot.experiment.errors import DataError, Locate, with_remedy

PREFIX = "bin:"
ROUND = 64  # a vocabulary that nobody states is the largest token's, rounded up to a multiple of this
SAMPLES, SAMPLE = 256, 4096  # places of a file without a manifest whose bytes tell it from others, and bytes at each
VALIDATION = re.compile(r"(^|[^a-z])(val|valid|validation|test)([^a-z]|$)")

_CHUNK = 1 << 24  # tokens that are compared at once
GPT2_SEPARATOR = 50256


@final
class Shards:
    """The tokens of several files, one after another, as one array that is read where it is needed.

    Args:
        parts: tokens of each file, of one dtype.
        names: of the files, for messages.
        vocab: every token must be below it; None for no limit.
    """

    def __init__(self, parts: Sequence[npt.NDArray[np.uint16]], names: Sequence[str], vocab: int | None = None) -> None:
        self._parts, self._names, self._vocab = parts, names, vocab
        self._ends = np.cumsum([part.size for part in parts], dtype=np.int64)
        self.dtype = TOKEN

    @property
    def size(self) -> int:
        """Number of tokens."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def windows(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
        """Copy windows of consecutive tokens.

        Args:
            starts: positions of their first tokens, each at most `size - length`.
            length: tokens of each.

        Returns:
            `(len(starts), length)`.

        Raises:
            DataError: a token outside the vocabulary.

        >>> shards = Shards([np.arange(5, dtype="<u2"), np.arange(5, 8, dtype="<u2")], ["a.bin", "b.bin"])
        >>> shards.windows(np.array([3, 0]), 4).tolist()
        [[3, 4, 5, 6], [0, 1, 2, 3]]
        """
        windows = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(windows, starts.tolist(), strict=True):
            self._read(row, start)
        if self._vocab is not None and windows.size and (largest := int(windows.max())) >= self._vocab:
            first = starts[int(np.argmax(windows.max(1)))]
            name = self._names[int(np.searchsorted(self._ends, first, "right"))]
            raise DataError(f"{name} holds the token {largest}, outside the vocabulary of {self._vocab}: state --vocab")
        return windows

    def ends(self, separator: int) -> npt.NDArray[np.int64]:
        """The position after each token that ends a document, and after the last token.

        >>> Shards([np.array([5, 0, 6], dtype="<u2"), np.array([7, 0, 8], dtype="<u2")], ["a.bin", "b.bin"]).ends(0)
        array([2, 5, 6])
        """
        found = [
            start + place + np.flatnonzero(part[place : place + _CHUNK] == separator) + 1
            for part, start in zip(self._parts, [0, *self._ends[:-1]], strict=True)
            for place in range(0, part.size, _CHUNK)
        ]
        return np.unique(np.concatenate([*found, self._ends[-1:]]))

    def _read(self, out: npt.NDArray[np.int64], start: int) -> None:
        """Fill out with the tokens from a position on, across files."""
        index = int(np.searchsorted(self._ends, start, "right"))
        offset, done = start - int(self._ends[index]) + self._parts[index].size, 0
        while done < out.size:
            tokens = self._parts[index][offset : offset + out.size - done]
            out[done : done + tokens.size] = tokens
            done, index, offset = done + tokens.size, index + 1, 0

    def cut(self, at: int) -> tuple[Shards, Shards]:
        """The tokens before a position, and those from it on."""
        places = [max(at - end + part.size, 0) for part, end in zip(self._parts, self._ends.tolist(), strict=True)]
        before = [part[:place] for part, place in zip(self._parts, places, strict=True)]
        after = [part[place:] for part, place in zip(self._parts, places, strict=True)]
        return Shards(before, self._names, self._vocab), Shards(after, self._names, self._vocab)


@dataclass(frozen=True)
class TokenFolder:
    """What a folder or a file of tokens holds.

    Args:
        train: tokens for training.
        validation: tokens for validation.
        vocab: number of tokens that a model must tell apart.
        sha256: tells these data from others.
        files: number of files.
        separator: token that ends a document: the manifest's, else GPT-2's.
    """

    train: Shards
    validation: Shards
    vocab: int
    sha256: str
    files: int
    separator: int


def parse(name: str) -> tuple[int | None, Path]:
    """Read `bin:PATH` or `bin:N:PATH`.

    Args:
        name: the text.

    Returns:
        `(vocab, path)`, the vocabulary's size N being None where it is missing.

    Raises:
        ValueError: no path, or a vocabulary of no tokens or of more than uint16 has.

    >>> parse("bin:50304:data/owt")[0]
    50304
    """
    match = re.fullmatch(r"bin:(?:(\d+):)?(.+)", name)
    vocab = int(match[1]) if match and match[1] else None
    if match is None or (vocab is not None and not 1 <= vocab <= 1 << 16):
        raise ValueError(f"{name}: files of tokens are {PREFIX}PATH or {PREFIX}N:PATH with a vocabulary N up to 65536")
    return vocab, Path(match[2])


def load(path: Path, vocab: int | None = None, validation_one_in: int = 10) -> TokenFolder:
    """Open a file of tokens, or all of a folder, without reading it. A gigabyte opens in milliseconds.

    The files whose names say val, valid, validation or test are for validation; where there are none, the last part of
    the tokens is.

    Args:
        path: a file, or a folder of files `*.bin`, hidden ones left out.
        vocab: number of tokens; default: the manifest's, else the largest token's, rounded up to a multiple of 64,
            for which all files are read.
        validation_one_in: 1 / the part for validation where no file is.

    Returns:
        The tokens.

    Raises:
        DataError: nothing there, a file that is no such file, or not the one that the manifest describes.
    """
    manifest = read_manifest(path)
    if manifest:
        require_same(path, manifest["shards"])
    files = [path / shard["name"] for shard in manifest["shards"]] if manifest else _files(path)
    tokens = {file: open_tokens(file, manifest["layout"] if manifest else None) for file in files}
    if not sum(part.size for part in tokens.values()):
        raise DataError(f"{path} holds no tokens: write some with surefoot tokens IN {path}")
    stated = vocab or (manifest["vocab"] if manifest else None)
    vocab = stated or -(-(max(int(part.max()) for part in tokens.values()) + 1) // ROUND) * ROUND

    def joined(held: bool) -> Shards:
        group = [file for file in files if bool(VALIDATION.search(file.stem.lower())) == held]
        return Shards([tokens[file] for file in group], [*map(str, group)], stated)

    train, validation = joined(False), joined(True)
    if not validation.size or not train.size:
        whole = train if train.size else validation
        train, validation = whole.cut(whole.size - whole.size // validation_one_in)
    sha256 = manifest["sha256"] if manifest else _fingerprint(files)
    separator = manifest["separator"] if manifest else GPT2_SEPARATOR
    return TokenFolder(train, validation, vocab, sha256, len(files), separator)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise with_remedy(DataError(f"{path} does not exist, or is neither a file nor a folder"), Locate(path))
    if not (files := sorted(file for file in path.glob("*.bin") if not file.name.startswith("."))):
        raise DataError(f"{path} holds no .bin files: write some with surefoot tokens IN {path}")
    return files


def _fingerprint(files: Iterable[Path]) -> str:
    """A digest of the files' sizes and of samples of them."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as opened:
            for place in sorted({i * max(0, size - SAMPLE) // (SAMPLES - 1) for i in range(SAMPLES)}):
                opened.seek(place)
                digest.update(opened.read(SAMPLE))
    return digest.hexdigest()
