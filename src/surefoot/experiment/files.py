"""Files that survive: append-only JSON lines, atomic replacement, one writer per directory."""

import contextlib
import fcntl
import json
import math
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class DirectoryInUse(RuntimeError):
    """Another live process writes to this run directory."""


def dumps(value: Any, indent: int | None = None) -> str:
    """Strict JSON: NaN and infinities are a ValueError, never a token other parsers refuse.

    >>> dumps({"loss": None})
    '{"loss": null}'
    """
    return json.dumps(value, allow_nan=False, indent=indent)


def write_atomic(path: Path, text: str) -> None:
    """Replace a file as a whole: after a crash it holds the old text or the new one, nothing between.

    Raises OSError naming the path (a full disk, a size limit); the old file is then untouched.
    """
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.fchmod(handle, 0o644)  # mkstemp's files are private; these are for everyone's reading
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_directory(path.parent)
    except OSError as error:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise OSError(error.errno, f"cannot write {path}: {error.strerror}") from error


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_lines(path: Path) -> list[Record]:
    """The records of a JSON-lines file; a last line that was torn by a crash is left out.

    Raises ValueError naming file and line if any other line is not a JSON object.
    """
    return _parse(path, _bytes(path))[0]


def _bytes(path: Path) -> bytes:
    """Content of a regular file; devices have none (/dev/full would never end)."""
    try:
        return path.read_bytes() if stat.S_ISREG(path.stat().st_mode) else b""
    except FileNotFoundError:
        return b""


def _parse(path: Path, content: bytes) -> tuple[list[Record], int]:
    """Records, and the length in bytes of the part of the file that holds them."""
    records: list[Record] = []
    sound = 0
    lines = content.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        record = _record(line)
        if record is None and number == len(lines):
            break
        if record is None:
            raise ValueError(f"{path}, line {number} is not a JSON object: repair or remove this line")
        records.append(record)
        sound += len(line)
    return records, sound


def _record(line: bytes) -> Record | None:
    try:
        value = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:  # UnicodeDecodeError and JSONDecodeError both are
        return None
    return value if isinstance(value, dict) else None


class Log:
    """An append-only JSON-lines file: a record that ``append`` returned from is on the disk.

    Opening it cuts off a torn last line. Use as a context manager; one writer at a time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records, sound = _parse(path, _bytes(path))
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise OSError(error.errno, f"cannot write {path}: {error.strerror}") from error
        self._cut(sound)
        self._size = sound

    def append(self, record: Record) -> None:
        """Write one line and fsync. Raises OSError naming the path; earlier lines stay intact."""
        line = dumps(record).encode() + b"\n"
        try:
            rest = line
            while rest:
                rest = rest[os.write(self._handle, rest) :]
            os.fsync(self._handle)
        except OSError as error:
            self._cut(self._size)
            message = f"cannot append to {self.path}: {error.strerror}; its earlier lines are intact"
            raise OSError(error.errno, message) from error
        self._size += len(line)
        self.records.append(record)

    def _cut(self, size: int) -> None:
        with contextlib.suppress(OSError):  # a device has no length
            os.ftruncate(self._handle, size)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)


def continued(path: Path, step: int) -> Log:
    """A log to append to, without its lines from a step on: a resumed run makes those again.

    Raises:
        ValueError: a line that is not a JSON object.
        OSError: the file cannot be written.
    """
    kept = [dumps(old) + "\n" for old in read_lines(path) if old["step"] < step]
    write_atomic(path, "".join(kept))
    return Log(path)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold a directory for one writer. The lock dies with its process, so none is ever stale.

    Raises DirectoryInUse naming the directory and the process that holds it.
    """
    path = directory / ".lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
            raise DirectoryInUse(
                f"{directory} is in use by another run (process {holder}): "
                "wait for it, stop it, or choose another directory"
            ) from None
        with contextlib.suppress(OSError):  # the number is a courtesy; the lock is what counts
            os.ftruncate(handle, 0)
            os.write(handle, str(os.getpid()).encode())
        yield
    finally:
        os.close(handle)


def claim(directory: Path, config: Mapping[str, Any], data: str) -> None:
    """Make a run directory belong to one configuration: write ``config.json``, or compare with it.

    Raises ValueError naming the keys that differ, or when ``data`` lies there without a configuration.
    """
    path = directory / "config.json"
    wanted = json.loads(dumps(dict(config)))
    if not path.exists():
        if _bytes(directory / data):
            raise ValueError(f"{directory} holds {data} but no config.json: choose another directory")
        write_atomic(path, dumps(wanted, indent=2) + "\n")
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): choose another directory") from None
    differing = differences(found, wanted)
    if differing:
        raise ValueError(
            f"{directory} belongs to another configuration; it differs in {'; '.join(differing)}. "
            "Choose another directory, or repeat the arguments it was started with to resume it"
        )


def differences(found: Any, wanted: Any, key: str = "") -> list[str]:
    """Where two JSON values differ, as "key: there X, now Y".

    >>> differences({"steps": 75, "settings": {"depth": 2}}, {"steps": 150, "settings": {"depth": 2}})
    ['steps: there 75, now 150']
    """
    if isinstance(found, dict) and isinstance(wanted, dict):
        keys = sorted(found.keys() | wanted.keys())
        nested = [differences(found.get(k), wanted.get(k), f"{key}.{k}".lstrip(".")) for k in keys]
        return [line for lines in nested for line in lines]
    return [] if found == wanted else [f"{key}: there {json.dumps(found)}, now {json.dumps(wanted)}"]


def finite_or_none(value: float) -> float | None:
    """The value, or None (JSON's null) where it is NaN or infinite.

    >>> finite_or_none(1.5), finite_or_none(float("inf"))
    (1.5, None)
    """
    return value if math.isfinite(value) else None
