"""Documents of text, one after another: files and folders, JSON lines, Parquet, data sets of the Hugging Face hub."""

import hashlib
import json
import os
import re
import warnings
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from surefoot.experiment.errors import DataError, Locate, Respell, importing, reading, with_remedy

HUB = "hf:"
SEPARATOR = "<|endoftext|>"  # between the documents of a text file, if it has some
READABLE = "give a readable text file or folder"
_ROWS = 1024
_HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair, which JSON can escape and UTF-8 cannot encode


def documents(source: str, field: str = "text", skip: int = 0) -> Iterator[str]:
    """Read the documents of a source, in the same order each time.

    Args:
        source: a file, a folder (its files by name, but hidden ones and those that are no text) or `hf:NAME` or
            `hf:NAME:CONFIG` (the data set's split "train", streamed). A file `.jsonl` has one in each line, `.parquet`
            in each row; another file is one document, or several with `<|endoftext|>` between them.
        field: name of the text in lines, rows and data sets.
        skip: how many are left out at the start.

    Yields:
        A text that is not empty.

    Raises:
        DataError: nothing there, something damaged (the message names file and line), no such field, a data set or a
            hub that cannot be reached.
        ValueError: a library is missing.
    """
    if source.startswith(HUB):
        yield from islice(filter(None, _of_hub(source.removeprefix(HUB), field)), skip, None)
        return
    require(source)
    path = Path(source)
    with reading(path, READABLE):
        files = sorted(visible(path)) if path.is_dir() else [path]
    yield from islice((text for file in files for text in _of_file(file, field) if text), skip, None)


def require(source: str) -> None:
    """Raise DataError where nothing lies at a path, or it cannot be seen."""
    path = Path(source)
    with reading(path, READABLE):
        if not source.startswith(HUB) and not path.exists():
            missing = DataError(f"{path} does not exist; give a text file or folder, or {HUB}NAME")
            raise with_remedy(missing, Locate(path))


def state_of(source: str) -> str:
    """A digest of the names, sizes and times of a source's files; for a data set of the hub, the digest of nothing."""
    path, digest = Path(source), hashlib.sha256()
    for file in sorted(visible(path)) if path.is_dir() else [path] * path.exists():
        stat = file.stat()
        digest.update(f"{file.relative_to(path)} {stat.st_size} {stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def is_held(text: bytes, one_in: int) -> bool:
    """Whether a text or name is for validation, one in so many: by its SHA-256, whatever other documents there are."""
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") < 2**64 // one_in


def visible(root: Path, excluded: Collection[str] = ()) -> Iterator[Path]:
    """The files below a folder that are neither hidden nor in a hidden or an excluded folder."""

    def stop(error: OSError) -> None:
        raise error  # os.walk would skip an unreadable folder in silence

    for folder, below, names in os.walk(root, onerror=stop):
        below[:] = [name for name in below if not name.startswith(".") and name not in excluded]
        files = (Path(folder, name) for name in names if not name.startswith("."))
        yield from (file for file in files if file.is_file())


def _of_file(path: Path, field: str) -> Iterator[str]:
    with reading(path, READABLE):
        if path.suffix.lower() == ".jsonl":
            yield from _of_lines(path, field)
        elif path.suffix.lower() == ".parquet":
            yield from _of_rows(path, field)
        elif b"\0" not in (content := path.read_bytes()):  # else it is no text
            yield from decoded(content, str(path)).split(SEPARATOR)


def decoded(text: bytes, name: str) -> str:
    """A text's bytes as characters; what is not UTF-8 becomes replacement characters, with a warning by its name."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 (at byte {error.start:,}); invalid bytes become U+FFFD"
        warnings.warn(f"{name} {what}; if it is Latin-1, convert it: iconv -f latin1 -t utf-8", stacklevel=2)
        return text.decode(errors="replace")


def _of_lines(path: Path, field: str) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    raise DataError(f"{where} is not valid JSON: repair or remove this line") from None
                yield _text(row, field, where)


def _of_rows(path: Path, field: str) -> Iterator[str]:
    with importing("data", f"{path} needs pyarrow:"):
        import pyarrow
        from pyarrow import parquet
    try:
        file = parquet.ParquetFile(path)
        if field not in file.schema_arrow.names:
            _text(dict.fromkeys(file.schema_arrow.names), field, f"{path}")  # refuses it
        for batch in file.iter_batches(_ROWS, columns=[field]):
            for text in batch.column(0).to_pylist():
                yield _text({field: text}, field, str(path))
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is damaged: {error}") from error


def _of_hub(name: str, field: str) -> Iterator[str]:
    with importing("data", f"{HUB}{name} needs the datasets library:"):
        import datasets
    dataset, _, config = name.partition(":")
    try:
        for row in datasets.load_dataset(dataset, config or None, split="train", streaming=True):
            yield _text(row, field, f"{HUB}{name}")
    except (DataError, MemoryError):
        raise
    except Exception as error:  # of the many libraries between here and the hub, each has its own
        raise DataError(f"cannot read {HUB}{name}: {type(error).__name__}: {error}") from error


def _text(row: Any, field: str, where: str) -> str:
    if isinstance(row, dict) and field in row and not isinstance(row[field], str):
        raise DataError(f"{where}: {field!r} is {type(row[field]).__name__}, not text: {str(row[field])[:50]}")
    if not isinstance(row, dict) or not isinstance(text := row.get(field), str):
        there = [*map(str, row)] if isinstance(row, dict) else []
        known = f": choose --field from {', '.join(there)}" if there else ""
        raise with_remedy(DataError(f"{where} has no text {field!r}{known}"), Respell(field, there))
    return _HALF.sub("\N{REPLACEMENT CHARACTER}", text)
