"""One file of tokens in a memory map: nanoGPT's raw uint16, or the header form of llm.c and modded-nanogpt."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from surefoot.experiment.errors import DataError

Layout = Literal["header", "raw"]
TOKEN = np.dtype("<u2")
MAGIC, VERSION, HEADER = 20240520, 1, 256  # of int32 words: magic, version, number of tokens, 253 zeros


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
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(4 * HEADER)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; give a file or a folder of tokens") from error
    if not size:
        raise DataError(f"{path} is empty: write it anew")
    if size % TOKEN.itemsize:
        raise DataError(
            f"{path} has an odd number of bytes ({size}), and a token has two: it is damaged, or no .bin file"
        )
    head = np.frombuffer(start, dtype="<i4", count=len(start) // 4)
    if layout == "raw" or not head.size or head[0] != MAGIC:
        if layout != "raw" and _is_header(head):
            raise DataError(
                f"{path} has a header with the magic number {head[0]}, not {MAGIC}: it is damaged, or no uint16"
            )
        if layout == "header":
            raise DataError(
                f"{path} does not start with the magic number {MAGIC}: it is damaged, or a file without a header"
            )
        return _mapped(path, 0)
    _require_fitting(path, head, size)
    return _mapped(path, 4 * HEADER)


def _require_fitting(path: Path, head: npt.NDArray[np.int32], size: int) -> None:
    """Refuse a header of another version, or one that does not fit the file."""
    if head.size < HEADER:
        raise DataError(f"{path} has a header that is cut off after {size} bytes: write it anew")
    if head[1] != VERSION:
        raise DataError(f"{path} has a header of version {head[1]}: only version {VERSION}, of uint16 tokens, is read")
    count = (size - 4 * HEADER) // TOKEN.itemsize
    if head[2] != count:
        raise DataError(f"{path} holds {count} tokens, and its header says {head[2]}: it is damaged")
    if not count:
        raise DataError(f"{path} holds no tokens: write it anew")


def _is_header(head: npt.NDArray[np.int32]) -> bool:
    """Whether words are a header of any kind: something, then zeros from the fourth word on, whatever they count."""
    return bool(head.size == HEADER and head[0] and not head[3:].any())


def _mapped(path: Path, offset: int) -> npt.NDArray[np.uint16]:
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):  # windows are read at random places: without it, each brings its neighbours along
        mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, dtype=TOKEN, offset=offset)


def header(count: int) -> bytes:
    """The header of a file of so many tokens.

    >>> len(header(5))
    1024
    """
    words = np.zeros(HEADER, dtype="<i4")
    words[:3] = MAGIC, VERSION, count
    return words.tobytes()
