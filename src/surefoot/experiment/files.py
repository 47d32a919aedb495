"""Files that survive a crash: append-only JSON lines, atomic replacement, one writer per directory."""

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from surefoot.experiment.errors import DirectoryInUse, OtherDirectory, with_remedy

Record = dict[str, Any]

Kinds = Mapping[str, type | UnionType]
"""Keys that a record must have -> types of their values."""

NUMBER = int | float | None
"""None stands for what is not finite."""

ANY: Kinds = MappingProxyType({})


def dumps(value: Any, indent: int | None = None) -> str:
    """A value as strict JSON; a `ValueError` for NaN and infinities, which other parsers refuse."""
    return json.dumps(value, allow_nan=False, indent=indent)


def write_atomic(path: Path, text: str) -> None:
    """Replace a file as a whole: after a crash it has the old text or the new one.

    Args:
        path: the file, in a directory that exists.
        text: its new content, written in UTF-8; undecodable bytes of a path are escaped.

    Raises:
        OSError: it cannot be written (a full disk, a size limit); the message names it, and the old file is intact.
    """
    try:
        replace_files({path: text.encode(errors="backslashreplace")})
    except OSError as error:
        raise OSError(error.errno, f"cannot write {path}: {error.strerror}") from error


def write_json(path: Path, value: dict[str, Any]) -> dict[str, Any]:
    """Replace a file as `write_atomic` does, by a value as strict JSON.

    Args:
        path: the file, in a directory that exists.
        value: JSON values.

    Returns:
        The value.

    Raises:
        ValueError: NaN or an infinity in the value.
        OSError: it cannot be written.
    """
    write_atomic(path, dumps(value, indent=2) + "\n")
    return value


def replace_files(contents: Mapping[Path, bytes]) -> None:
    """Replace files, each as a whole and in this order, after all contents have been written to temporary files.

    Args:
        contents: by path.

    Raises:
        OSError: a content cannot be written, and no file is replaced; or a file cannot be replaced.
    """
    temporaries = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in contents}
    try:
        for path, temporary in temporaries.items():
            try:
                with temporary.open("wb") as file:
                    file.write(contents[path])
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from error
        for path, temporary in temporaries.items():
            os.replace(temporary, path)
        for directory in {path.parent for path in contents}:
            sync_directory(directory)
    finally:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Make renames durable, where the platform can open a directory."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sha256_of(path: Path) -> str:
    """The digest of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_lines(path: Path, kinds: Kinds = ANY) -> list[Record]:
    """The records of a JSON-lines file, without a last line that is incomplete.

    Args:
        path: the file; one that does not exist has no records.
        kinds: of the values that every record has, by key.

    Returns:
        A dictionary for each line.

    Raises:
        ValueError: another line is not a JSON object, or a record lacks a value of its kind; the message names file
            and line.
    """
    return _parse(path, kinds)[0]


def _parse(path: Path, kinds: Kinds) -> tuple[list[Record], int]:
    """Records, and the number of bytes of their lines."""
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []  # reading /dev/full never ends
    if lines and _record(lines[-1]) is None:
        del lines[-1]
    records = []
    for number, line in enumerate(lines, start=1):
        record = _record(line)
        values = record or {}
        wrong = ", ".join(key for key, kind in kinds.items() if not isinstance(values.get(key, ...), kind))
        if record is None or wrong:
            fault = "is not a JSON object" if record is None else f"has no valid {wrong}"
            raise ValueError(f"{path}, line {number} {fault}: repair or remove this line")
        records.append(record)
    return records, sum(map(len, lines))


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _record(line: bytes) -> Record | None:
    try:
        value = json.loads(line, parse_constant=_refused) if line.endswith(b"\n") else None
    except ValueError:  # UnicodeDecodeError and JSONDecodeError both are
        return None
    return value if isinstance(value, dict) else None


class Log(contextlib.AbstractContextManager["Log"]):
    """An append-only JSON-lines file, for one writer at a time. Use as a context manager.

    Opening it removes an incomplete last line. When `append` returns, the record is on the disk.

    Args:
        path: created if missing.
        kinds: of the values that every record has, by key.

    Raises:
        ValueError: a line other than the last is not a JSON object, or a record lacks a value of its kind.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, kinds: Kinds = ANY) -> None:
        self.path = path
        self.records: list[Record]
        self.records, self._size = _parse(path, kinds)
        self._file = path.open("ab", buffering=0)
        self._cut()

    def append(self, record: Record) -> None:
        """Write one line to the disk.

        Args:
            record: JSON values.

        Raises:
            ValueError: NaN or an infinity in the record.
            OSError: it cannot be written; the message names the file, whose earlier lines are intact.
        """
        line = rest = dumps(record).encode() + b"\n"
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file)
        except OSError as error:
            self._cut()
            message = f"cannot append to {self.path}: {error.strerror}; its earlier lines are intact"
            raise OSError(error.errno, message) from error
        self._size += len(line)
        self.records.append(record)

    def _cut(self) -> None:
        with contextlib.suppress(OSError):  # a device has no length
            self._file.truncate(self._size)

    def __exit__(self, *_: object) -> None:
        self._file.close()


def continued(path: Path, step: int) -> Log:
    """Open a log without its lines from a step on, which a resumed run writes again.

    Args:
        path: of the log; its records have "step".
        step: the first step that is dropped.

    Returns:
        The log, open.

    Raises:
        ValueError: a line that is not a JSON object, or has no "step".
        OSError: the file cannot be written.
    """
    earlier = [dumps(record) + "\n" for record in read_lines(path, {"step": int}) if record["step"] < step]
    write_atomic(path, "".join(earlier))
    return Log(path)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock a directory for one writer. The operating system drops the lock when the process ends.

    Args:
        directory: exists.

    Raises:
        DirectoryInUse: another process has the lock; the message names the directory and the process.
        OSError: the lock file cannot be written.
    """
    path, holder = directory / ".lock", ["unknown"]
    lock: BaseFileLock = FileLock(path)
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        with contextlib.suppress(OSError):
            holder = path.read_text(errors="replace").split() or holder
        message = f"{directory} is in use by another run (process {holder[0]}): wait for it, stop it, or choose another"
        raise with_remedy(DirectoryInUse(f"{message} directory"), OtherDirectory()) from None
    with held:
        if not isinstance(lock, SoftFileLock):  # which does so itself
            with contextlib.suppress(OSError):  # Windows refuses
                path.write_text(str(os.getpid()))  # for the message
        yield


def finite_or_none(value: float) -> float | None:
    """The value, or None (JSON's null) where it is NaN or infinite.

    >>> finite_or_none(1.5), finite_or_none(float("inf"))
    (1.5, None)
    """
    return value if math.isfinite(value) else None
