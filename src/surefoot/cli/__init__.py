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
from importlib.util import find_spec
from types import FrameType

import surefoot
from surefoot.cli import audit, compare, convert, coordcheck, report, tokens, train, transfer
from surefoot.cli.exit_codes import (
    DIVERGED,
    FAILED,
    INTERRUPTED,
    TABLE,
    TERMINATED,
    USAGE,
    Misuse,
    Parser,
    code_of,
    next_line,
)
from surefoot.experiment.errors import Install, with_remedy

_COMMANDS = (transfer, compare, train, tokens, audit, convert, coordcheck, report)
_EXTRAS = {"cli": ("numpy", "scipy", "tqdm", "filelock", "jinja2"), "plots": ("altair", "vl_convert")}
"""What pyproject.toml has in the extras that commands need."""
_GUIDE = """\
surefoot: three things to do with it, each with the line to type

  find a learning rate that holds at every width
    surefoot transfer --widths 32 64 128 --out runs/transfer

  train with every weight bounded
    surefoot train --width 128 --steps 500 --stabiliser post_clip:2 --out runs/first

  compare optimizers fairly: each tuned with equally many runs, then paired over fresh seeds
    surefoot compare --recipes steady muon adamw --baseline adamw --out runs/compare

all commands: surefoot --help; a plan of your own model: surefoot audit my_package.model:build"""


class _Terminated(KeyboardInterrupt):
    """SIGTERM, raised in the main thread, so that files are closed and workers stopped as for Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: the arguments; those of the process by default.

    Returns:
        The exit code: 0; 1 failed; 2 wrong usage; 3 diverged; 4 data; 5 checkpoint; 6 directory busy; 128 + signal.

    Raises:
        SystemExit: from argparse, 0, after `--help` and `--version`.

    >>> main(["audit", "--model", "no_such_model"])
    2
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        arguments = _parse(argv)
    except Misuse as error:
        _say(f"error: {error}", error.prog.removeprefix("surefoot").strip())
        _try(argv, error)
        return USAGE
    if arguments.command is None:  # no command is no success: a script whose variable is empty must notice
        print("\n".join([_GUIDE, *_missing()]), file=sys.stderr)
        return USAGE
    return _run(argv, arguments)


def _run(argv: Sequence[str], arguments: argparse.Namespace) -> int:
    """Run a command; errors are said in a line, followed by the one to type next."""
    try:
        with _plain_warnings(), _terminable():
            code: int = arguments.run(arguments)
            sys.stdout.flush()  # a full disk raises here rather than at exit, where nothing can report it
            if code == DIVERGED:
                _try(argv, None, arguments)
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
        _try(argv, with_remedy(error, Install("cli,plots")), arguments)
        return FAILED
    except (ValueError, OSError, RuntimeError) as error:
        _say(f"error: {_explain(error)}", arguments.command)
        _try(argv, error, arguments)
        _discard_stdout()
        return code_of(error)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        arguments.parser.refuse(unknown)
    return arguments


def _parser() -> Parser:
    parser = Parser(
        prog="surefoot",
        description="Steepest descent under the right norm for each layer: one learning rate at every width.",
        epilog="\n".join(["example: surefoot transfer --out runs/transfer", TABLE, *_missing()]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"surefoot {surefoot.__version__}")
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(dest="command", metavar="command")
    for command in _COMMANDS:
        command.add_to(commands)
    return parser


def _missing() -> list[str]:
    """A line for each extra of which a package is not installed."""
    absent = {extra: [name for name in names if find_spec(name) is None] for extra, names in _EXTRAS.items()}
    return [
        f"not installed: {', '.join(names)}: pip install 'surefoot[{extra}]'"
        for extra, names in absent.items()
        if names
    ]


def _try(argv: Sequence[str], error: Exception | None, arguments: argparse.Namespace | None = None) -> None:
    if line := next_line(argv, error, arguments):
        print(f"try: {line}", file=sys.stderr)


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
