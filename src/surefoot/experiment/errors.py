"""Kinds of errors of files, data and runs, and their remedies: an error carries its remedy in `error.remedy`.

The command line gives each kind its own exit code, and prints the command that the remedy makes of the one typed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

E = TypeVar("E", bound=Exception)


class DirectoryInUse(RuntimeError):
    """Another process is writing to the run directory."""


class SweepError(RuntimeError):
    """A run of a sweep raised; results of finished runs are written, and the same sweep goes on from there."""


class CheckpointError(ValueError):
    """A checkpoint on the disk is not what was written."""


class DataError(ValueError):
    """Data that are missing, damaged or of another kind than was asked for; the message names them and the remedy."""


@dataclass(frozen=True)
class Install:
    """Install the packages of one of Surefoot's extras, "ray" for example."""

    extra: str


@dataclass(frozen=True)
class Respell:
    """Replace this word by the nearest of the choices."""

    word: str
    choices: Sequence[str]


@dataclass(frozen=True)
class Locate:
    """Replace this path, where nothing lies, by the file or folder with the nearest name."""

    path: Path


@dataclass(frozen=True)
class OtherDirectory:
    """Write to another directory."""


Remedy = Install | Respell | Locate | OtherDirectory


def with_remedy(error: E, remedy: Remedy) -> E:
    """The error, to be raised, with its remedy.

    Args:
        error: new, or one that is passed on.
        remedy: what helps.

    Returns:
        The same error.

    >>> with_remedy(ValueError("it needs ray"), Install("ray")).remedy
    Install(extra='ray')
    """
    error.remedy = remedy  # type: ignore[attr-defined]
    return error


@contextmanager
def importing(extra: str, needs: str, kind: type[Exception] = ValueError) -> Iterator[None]:
    """Context for imports of an extra's packages: a missing one raises an error that says how to install it.

    Args:
        extra: name of one of Surefoot's extras.
        needs: the message up to "pip install"; `{error}` in it is Python's own.
        kind: of the error.

    Yields:
        None.

    Raises:
        kind: a package is missing.
    """
    try:
        yield
    except ImportError as error:
        message = f"{needs.replace('{error}', str(error))} pip install 'surefoot[{extra}]'"
        raise with_remedy(kind(message), Install(extra)) from error


@contextmanager
def reading(path: Path, remedy: str) -> Iterator[None]:
    """Context for reading data: an `OSError` becomes a `DataError` that names the file.

    Args:
        path: of the data.
        remedy: what helps, for the message.

    Yields:
        None.

    Raises:
        DataError: a file cannot be read.
    """
    try:
        yield
    except OSError as error:
        message = f"cannot read {error.filename or path}: {error.strerror or error}; {remedy}"
        raise with_remedy(DataError(message), Locate(path)) from error


def remedy_of(error: BaseException | None) -> Remedy | None:
    """The remedy of an error, or of the one in whose handling it was raised; None for none.

    >>> remedy_of(ValueError("no remedy"))
    """
    while error is not None:
        if remedy := getattr(error, "remedy", None):
            return remedy  # type: ignore[no-any-return]
        error = error.__cause__ or error.__context__
    return None
