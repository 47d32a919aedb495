"""The command `surefoot`. Reads argv, prints, sets exit codes; the work is done elsewhere.

Nothing here imports torch before a command runs: `--help` answers at once.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import surefoot
from surefoot.cli import audit, compare, convert, coordcheck, report, tokens, train, transfer
from surefoot.cli.exit_codes import FAILED, INTERRUPTED, TABLE, TERMINATED, code_of

_COMMANDS = (transfer, compare, train, tokens, audit, convert, coordcheck, report)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, raised in the main thread, so that files are closed and workers stopped as for Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: the arguments; those of the process by default.

    Returns:
        The exit code: 0; 1 failed; 2 wrong usage; 3 diverged; 4 data; 5 checkpoint; 6 directory busy; 128 + signal.

    Raises:
        SystemExit: from argparse: 0 after `--help`, 2 for options that cannot be parsed.

    >>> main(["audit", "--model", "no_such_model"])
    2
    """
    arguments = _parser().parse_args(argv)
    try:
        with _plain_warnings(), _terminable():
            code: int = arguments.run(arguments)
            sys.stdout.flush()  # a full disk raises here rather than at exit, where nothing can report it
            return code
    except KeyboardInterrupt as interrupt:
        again = getattr(arguments, "resume", "") or "nothing was left half written"
        _say(f"interrupted; {again}")
        return TERMINATED if isinstance(interrupt, _Terminated) else INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()  # the reader (head, less) has closed the pipe
        return FAILED
    except ModuleNotFoundError as error:
        _say(f"error: {error}; the command line needs: pip install 'surefoot[cli,plots]'")
        return FAILED
    except (ValueError, OSError, RuntimeError) as error:
        _say(f"error: {_explain(error)}", arguments.command)
        _discard_stdout()
        return code_of(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="surefoot",
        description="Steepest descent under the right norm for each layer: one learning rate at every width.",
        epilog=f"example: surefoot transfer --out runs/transfer\n{TABLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"surefoot {surefoot.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for command in _COMMANDS:
        command.add_to(commands)
    return parser


def _say(text: str, command: str = "") -> None:
    print(f"surefoot {command}".strip() + f": {text}", file=sys.stderr)


def _explain(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror is not None:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error)


def _discard_stdout() -> None:
    """Point stdout at the null device if it cannot be flushed: Python would try again, and warn, when it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _terminable() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print warnings on stderr without the line of code that they come from."""

    def show(message: Warning | str, *_: object) -> None:
        _say(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        yield
