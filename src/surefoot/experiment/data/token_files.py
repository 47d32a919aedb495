"""Memory-mapped files of tokens, several as one array, and the manifest and journal of a folder of them.

A file is nanoGPT's raw uint16, or has the header of llm.c and modded-nanogpt. A folder has a manifest; until it
is complete, a journal.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from surefoot.experiment.data.bpe import LARGEST
from surefoot.experiment.errors import DataError, reading
from surefoot.experiment.files import Record, sha256_of

Layout = Literal["header", "raw"]
TOKEN = np.dtype("<u2")
MAGIC, VERSION, HEADER = 20240520, 1, 256  # of int32 words: magic, version, number of tokens, 253 zeros

MANIFEST, JOURNAL, TOKENIZER = "manifest.json", "progress.json", "tokenizer.json"

_CHUNK = 1 << 24  # tokens that are compared at once
_REMEDY = "write the tokens again with surefoot tokens, into a new folder"
_NAME = re.compile(r"(train|val)_[0-9]{6,}\.bin")
_SHARD = {"name": str, "tokens": int, "bytes": int, "mtime_ns": int, "sha256": str}
_BEGUN = {"conversion": dict, "documents": int, "shards": list}
_FINISHED = _BEGUN | {
    "tokens": int, "vocab": int, "layout": str, "separator": int, "tokenizer_sha256": str, "sha256": str
}  # fmt: skip


def read(folder: Path, name: str) -> Record | None:
    """The manifest or the journal of a folder.

    Args:
        folder: a folder; a file has neither.
        name: `MANIFEST` or `JOURNAL`.

    Returns:
        Its content; None where there is none.

    Raises:
        DataError: it cannot be read, or is not what was written.
    """
    path = folder / name
    with reading(path, _REMEDY):
        if not path.exists():
            return None
        try:
            record: Record = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            record = {}
    if not _is_sound(record, finished=name == MANIFEST):
        raise DataError(f"{path} is damaged, or another program's: {_REMEDY}")
    return record


def read_manifest(path: Path) -> Record | None:
    """The manifest of a folder of tokens.

    Args:
        path: a file or a folder.

    Returns:
        Its content; None where there is none.

    Raises:
        DataError: it is damaged, or the folder is not finished.
    """
    record = read(path, MANIFEST)
    if record is None and (path / JOURNAL).exists():
        raise DataError(f"{path} is not finished: run the same surefoot tokens command again")
    return record


def require_same(folder: Path, shards: Iterable[Mapping[str, Any]]) -> None:
    """Refuse a file whose size or time is not the one that it was written with.

    Args:
        folder: of the files.
        shards: what was written.

    Raises:
        DataError: a file is missing or another one; the message says what to do.
    """
    for shard in shards:
        file = folder / shard["name"]
        with reading(file, _REMEDY):
            there = file.stat()
        if there.st_size != shard["bytes"]:
            raise DataError(f"{file} has {there.st_size} bytes, the manifest says {shard['bytes']}: {_REMEDY}")
        if there.st_mtime_ns != shard["mtime_ns"]:
            raise DataError(f"{file} was changed or copied: check it with surefoot tokens --verify {folder}")


def require_digest(file: Path, sha256: str) -> None:
    """Refuse a file that is not the one that was written.

    Args:
        file: in a folder of tokens.
        sha256: of what was written.

    Raises:
        DataError: it is missing or another one; the message says what to do.
    """
    with reading(file, _REMEDY):
        digest = sha256_of(file)
    if digest != sha256:
        raise DataError(f"{file} is damaged: its SHA-256 has changed since it was written; {_REMEDY}")


def digest_of(shards: Iterable[Mapping[str, Any]]) -> str:
    """One digest of all files."""
    return hashlib.sha256("".join(shard["sha256"] for shard in shards).encode()).hexdigest()


def _is_sound(record: Any, finished: bool) -> bool:
    """Whether a record has all entries, of their types, and they agree with one another."""
    if not _has(record, _FINISHED if finished else _BEGUN):
        return False
    shards, layout = record["shards"], record["conversion"].get("layout")
    ahead = 4 * HEADER if layout == "header" else 0
    fits = layout in ("header", "raw") and record["documents"] >= 0
    for shard in shards:
        fits = fits and _has(shard, _SHARD) and _NAME.fullmatch(shard["name"]) is not None
        fits = fits and shard["bytes"] == ahead + TOKEN.itemsize * shard["tokens"] > ahead
    if not fits or not finished:
        return fits
    own = {"layout": layout, "tokens": sum(shard["tokens"] for shard in shards), "sha256": digest_of(shards)}
    return bool(shards) and 1 <= record["vocab"] <= LARGEST and record.items() >= own.items()


def _has(record: Any, entries: Mapping[str, type]) -> bool:
    return isinstance(record, dict) and all(type(record.get(name)) is kind for name, kind in entries.items())


def open_tokens(path: Path, layout: Layout | None = None) -> npt.NDArray[np.uint16]:
    """Map a file of tokens into memory.

    Args:
        path: the file.
        layout: "header" or "raw"; default: a header where the file starts with its magic number.

    Returns:
        Its tokens, read-only.

    Raises:
        DataError: it is missing, empty, of odd length, or its header is not one of uint16 tokens or does not fit.
    """
    with reading(path, "give a file or a folder of tokens"), path.open("rb") as file:
        size = path.stat().st_size
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    head = np.frombuffer(mapped, dtype="<i4", count=min(size // 4, HEADER))
    headed = layout != "raw" and bool(head.size) and head[0] == MAGIC
    if fault := _fault(head, size, layout, headed):
        raise DataError(f"{path} {fault}: it is damaged, or not uint16 tokens; write it again")
    if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)  # windows are read at random places: else each brings its neighbours along
    return np.frombuffer(mapped, dtype=TOKEN, offset=4 * HEADER if headed else 0)


def _fault(head: npt.NDArray[np.int32], size: int, layout: Layout | None, headed: bool) -> str | None:
    """What is wrong with a file, by its size and its first words; None if nothing."""
    if not size or size % TOKEN.itemsize:
        return f"has an odd number of bytes ({size}), and a token has two" if size else "is empty"
    if not headed:  # any other header has a first word, then zeros from the fourth on
        other = layout is None and head.size == HEADER and head[0] and not head[3:].any()
        first = head[0] if head.size else None
        return f"starts with the magic number {first}, not {MAGIC}" if other or layout == "header" else None
    if head.size < HEADER:
        return f"has a header that is cut off after {size} bytes"
    if head[1] != VERSION:
        return f"has a header of version {head[1]}, not {VERSION}"
    count = (size - 4 * HEADER) // TOKEN.itemsize
    return None if head[2] == count > 0 else f"holds {count or 'no'} tokens, and its header says {head[2]}"


def header(count: int) -> bytes:
    """The header of a file of so many tokens.

    >>> len(header(5))
    1024
    """
    words = np.zeros(HEADER, dtype="<i4")
    words[:3] = MAGIC, VERSION, count
    return words.tobytes()


class Shards:
    """The tokens of several files, one after another, as one array that is read where it is needed.

    Args:
        parts: tokens of each file, of one dtype.
        names: of the files, for messages.
        vocab: every token must be below it; None for no limit.
    """

    def __init__(self, parts: Sequence[npt.NDArray[np.uint16]], names: Sequence[str], vocab: int | None = None) -> None:
        self._parts, self._names, self._vocab = parts, names, vocab
        self._ends = [*accumulate(part.size for part in parts)]
        self._begins = [0, *self._ends[:-1]]
        self.dtype = TOKEN

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self._ends[-1] if self._ends else 0

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
            np.concatenate(self._between(start, start + length), out=row)
        if self._vocab is not None and windows.size and (largest := int(windows.max())) >= self._vocab:
            first = starts[int(np.argmax(windows.max(1)))]
            name = self._names[bisect_right(self._ends, first)]
            raise DataError(f"{name} holds the token {largest}, outside the vocabulary of {self._vocab}: state --vocab")
        return windows

    def ends(self, separator: int) -> npt.NDArray[np.int64]:
        """The position after each token that ends a document, and after the last token.

        >>> Shards([np.array([5, 0, 6], dtype="<u2"), np.array([7, 0, 8], dtype="<u2")], ["a.bin", "b.bin"]).ends(0)
        array([2, 5, 6])
        """
        found = [
            start + place + np.flatnonzero(part[place : place + _CHUNK] == separator) + 1
            for part, start in zip(self._parts, self._begins, strict=True)
            for place in range(0, part.size, _CHUNK)
        ]
        return np.unique(np.concatenate([*found, self._ends[-1:]]))

    def _between(self, start: int, stop: int) -> list[npt.NDArray[np.uint16]]:
        """The tokens from a position up to another, a part from each file."""
        spanned = slice(bisect_right(self._ends, start), bisect_right(self._ends, stop - 1) + 1)
        files = zip(self._parts[spanned], self._begins[spanned], strict=True)
        return [part[max(start - begin, 0) : stop - begin] for part, begin in files]

    def cut(self, at: int) -> tuple[Shards, Shards]:
        """The tokens before a position, and those from it on."""
        files = zip(self._parts, self._begins, strict=True)
        before, after = zip(*(np.split(part, [max(at - begin, 0)]) for part, begin in files), strict=True)
        return Shards(before, self._names, self._vocab), Shards(after, self._names, self._vocab)
