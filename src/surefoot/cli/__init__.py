"""The command `surefoot`: reads argv, prints, sets exit codes; the work is done elsewhere.

Nothing here imports torch before a command runs: `--help` answers at once.
"""

import argparse
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

import surefoot
from surefoot.cli import audit, compare, convert, coordcheck, exit_codes, ladder, report, tokens, train, transfer
from surefoot.cli.exit_codes import Misuse, Parser
from surefoot.experiment.errors import Install, with_remedy

_COMMANDS = (transfer, ladder, compare, train, tokens, audit, convert, coordcheck, report)
_EXTRAS = {"cli": ("numpy", "scipy", "tqdm", "filelock", "jinja2"), "plots": ("altair", "vl_convert")}
"""The packages in those extras of pyproject.toml that commands need."""
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
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller; what is for stderr would be printed on stdout
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115, for the rest of the process
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        utf = sys.stdout.encoding.lower().startswith("utf")  # a path is said in the bytes that it has
        sys.stdout.reconfigure(errors="surrogateescape" if utf else "backslashreplace")
    try:
        arguments, unknown = _parser().parse_known_args(argv)
        if unknown:
            arguments.parser.refuse(unknown)
    except Misuse as error:
        _say(f"error: {error}", error.prog.removeprefix("surefoot").strip())
        _try(argv, error)
        return exit_codes.USAGE
    if arguments.command is None:  # no command is no success: a script whose variable is empty must notice
        print("\n".join([_GUIDE, *_missing()]), file=sys.stderr)
        return exit_codes.USAGE
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.showwarning = lambda message, *_, **__: _say(f"warning: {message}")
        if threading.current_thread() is threading.main_thread():  # only that may set handlers
            stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _terminate))
        return _run(argv, arguments)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _Terminated


def _run(argv: Sequence[str], arguments: argparse.Namespace) -> int:
    """Run a command; an error is printed as one line, followed by the command to type next."""
    arguments.stdout = sys.stdout
    try:
        # With --json whatever a model prints goes to stderr.
        with redirect_stdout(sys.stderr if getattr(arguments, "json", False) else sys.stdout):
            code: int = arguments.run(arguments)
        sys.stdout.flush()  # a full disk raises here rather than at exit, where nothing can report it
        if code == exit_codes.DIVERGED:
            _try(argv, None, arguments)
        return code
    except KeyboardInterrupt as interrupt:
        _say(f"interrupted; {getattr(arguments, 'resume', 'nothing was left half written')}")
        return exit_codes.TERMINATED if isinstance(interrupt, _Terminated) else exit_codes.INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()  # the reader (head, less) has closed the pipe
        return exit_codes.FAILED
    except ModuleNotFoundError as error:
        _say(f"error: {error}; the command line needs: pip install 'surefoot[cli,plots]'")
        _try(argv, with_remedy(error, Install("cli,plots")), arguments)
        return exit_codes.FAILED
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        message = f"{error}" or "out of memory"
        if isinstance(error, OSError) and error.strerror is not None:
            message = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
        _say(f"error: {message}", arguments.command)
        _try(argv, error, arguments)
        _discard_stdout()
        return exit_codes.code_of(error)


def _parser() -> Parser:
    does = "Steepest descent under the right norm for each layer: one learning rate at every width."
    epilog = "\n".join(["example: surefoot transfer --out runs/transfer", exit_codes.TABLE, *_missing()])
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="surefoot", description=does, epilog=epilog, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"surefoot {surefoot.__version__}")
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(dest="command", metavar="command")
    for command in _COMMANDS:
        command.add_to(commands)
    return parser


def _missing() -> list[str]:
    """A line for each extra of which a package is not installed."""
    absent = {extra: [name for name in names if find_spec(name) is None] for extra, names in _EXTRAS.items()}
    said = "not installed: {}: pip install 'surefoot[{}]'"
    return [said.format(", ".join(names), extra) for extra, names in absent.items() if names]


def _try(argv: Sequence[str], error: Exception | None, arguments: argparse.Namespace | None = None) -> None:
    if line := exit_codes.next_line(argv, error, arguments):
        print(f"try: {line}", file=sys.stderr)


def _say(text: str, command: str = "") -> None:
    print(f"surefoot {command}".strip() + f": {text}", file=sys.stderr)


def _discard_stdout() -> None:
    """Point stdout at the null device if it cannot be flushed: Python would try again, and warn, when it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
