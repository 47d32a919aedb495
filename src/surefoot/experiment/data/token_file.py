"""One file of tokens in a memory map: nanoGPT's raw uint16, or the header form of llm.c and modded-nanogpt."""

import mmap
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from surefoot.experiment.errors import DataError, reading

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
    with reading(path, "give a file or a folder of tokens"), path.open("rb") as file:
        size = path.stat().st_size
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    head = np.frombuffer(mapped, dtype="<i4", count=min(size // 4, HEADER))
    headed = layout != "raw" and bool(head.size) and head[0] == MAGIC
    if fault := _fault(head, size, layout, headed):
        raise DataError(f"{path} {fault}: it is damaged, or no file of uint16 tokens; write it anew")
    if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)  # windows are read at random places: else each brings its neighbours along
    return np.frombuffer(mapped, dtype=TOKEN, offset=4 * HEADER if headed else 0)


def _fault(head: npt.NDArray[np.int32], size: int, layout: Layout | None, headed: bool) -> str | None:
    """What is wrong with a file, of its size and its first words."""
    if not size or size % TOKEN.itemsize:
        return f"has an odd number of bytes ({size}), and a token has two" if size else "is empty"
    if not headed:  # a header of any kind is something, then zeros from the fourth word on, whatever they count
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
