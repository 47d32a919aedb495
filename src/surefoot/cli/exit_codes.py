"""How a command line ends: its exit code, and after an error the line to type next."""

import argparse
import os
import re
import shlex
import signal
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from surefoot.experiment import errors
from surefoot.experiment.errors import Install, Locate, OtherDirectory, Respell, with_remedy

FAILED, USAGE, DIVERGED, DATA, CHECKPOINT, BUSY = 1, 2, 3, 4, 5, 6
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM

TABLE = """
exit codes:
  0    done
  1    an error of the program or the machine (a full disk, memory), or a check that does not pass (coordcheck, audit)
  2    wrong usage: options, a configuration that cannot be run
  3    the run has diverged
  4    data: missing, damaged, too short, of another kind
  5    checkpoint: every one is damaged, or the one of --resume is damaged or missing
  6    another process writes to the directory
  130  interrupted (Ctrl-C); 143 terminated; the same command goes on from there
"""


def code_of(error: Exception) -> int:
    """The exit code of an error.

    >>> code_of(ValueError("no such option")), code_of(OSError("full disk"))
    (2, 1)
    """
    codes = {errors.DataError: DATA, errors.CheckpointError: CHECKPOINT, errors.DirectoryInUse: BUSY, ValueError: USAGE}
    usual = USAGE if isinstance(errors.remedy_of(error), Locate) else FAILED  # a path that was typed
    return next((code for kind, code in codes.items() if isinstance(error, kind)), usual)


class Misuse(ValueError):
    """Options that cannot be parsed.

    Args:
        message: what is wrong.
        prog: the command, as in `surefoot train`.
    """

    def __init__(self, message: str, prog: str) -> None:
        super().__init__(message)
        self.prog: str = prog


class Parser(argparse.ArgumentParser):
    """A parser that raises `Misuse`, so that whoever catches it can say what to type next."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of leaving.

        Args:
            message: what is wrong.

        Raises:
            Misuse: always.
        """
        raise Misuse(message, self.prog)

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Refuse words that are no option or argument of this parser's command.

        Args:
            unknown: the words.

        Raises:
            Misuse: always.
        """
        wrong = next((word.partition("=")[0] for word in unknown if word.startswith("-")), "")
        flags = re.findall(r"--[\w-]+", self.format_help())
        raise with_remedy(Misuse(f"unrecognized arguments: {' '.join(unknown)}", self.prog), Respell(wrong, flags))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            raise with_remedy(error, Respell(str(value), [str(choice) for choice in action.choices or ()])) from None


def next_line(argv: Sequence[str], error: Exception | None, arguments: argparse.Namespace | None = None) -> str:
    """The line to type after an error: the same command, put right by the error's remedy, or its help.

    Args:
        argv: the command line that was typed, without the program.
        error: what it raised; None for a training run that has diverged.
        arguments: as parsed; None if they could not be.

    Returns:
        A line for the shell; empty for errors of the program or the machine that nothing typed would help.

    >>> error = with_remedy(Misuse("unrecognized arguments", "surefoot train"), Respell("--wdith", ["--width"]))
    >>> next_line(["train", "--wdith=64"], error)
    'surefoot train --width 64'
    >>> next_line(["tokens"], ValueError("give IN and OUT"), argparse.Namespace(command="tokens"))
    'surefoot tokens --help'
    """
    remedy, words = errors.remedy_of(error), []
    for word in argv:
        words += word.split("=", 1) if re.match("--.*=", word) else [word]  # --width=64 as two words
    if isinstance(remedy, Install):
        return f"pip install 'surefoot[{remedy.extra}]'"
    code, right = USAGE if error is None else code_of(error), None
    if error is None or isinstance(remedy, OtherDirectory):
        right = _elsewhere(words, arguments, diverged=error is None)
    elif isinstance(remedy, Respell):
        right = _respelled(words, remedy)
    elif isinstance(remedy, Locate):
        right = _located(words, remedy.path)
    if right is None and code == CHECKPOINT and any(Path(getattr(arguments, "out", ""), "checkpoints").glob("*")):
        right = _with(words, "--resume", "auto")
    if right is not None:
        return f"{'torchrun ... -m surefoot' if 'RANK' in os.environ else 'surefoot'} {shlex.join(right)}"
    if isinstance(error, Misuse):
        return f"{error.prog} --help"
    return "" if arguments is None or error is None or code == FAILED else f"surefoot {arguments.command} --help"


def _with(words: Sequence[str], flag: str, value: str) -> list[str]:
    """The words with a value for an option, in place of the one that it has."""
    if flag not in words:
        return [*words, flag, value]
    at = words.index(flag) + 1
    return [*words[:at], value, *words[at + 1 :]]


def _elsewhere(words: Sequence[str], arguments: Any, diverged: bool) -> list[str]:
    """The command line with a directory that does not exist yet; with a quarter of the learning rate if it diverged."""
    from surefoot.cli.chosen import config

    out: Path = arguments.out
    if diverged:
        words = _with(words, "--lr", f"{config(arguments).lr / 4:.3g}")
        words = _with(words, "--resume", "never") if "--resume" in words else words  # a checkpoint is of its rate
    fresh = next(f"{out}-{n}" for n in count(2) if not Path(f"{out}-{n}").exists())
    if arguments.command == "tokens":
        return [fresh if Path(word) == out else word for word in words]
    return _with(words, "--out", fresh)


def _respelled(words: Sequence[str], remedy: Respell) -> list[str] | None:
    """The command line with the unknown word replaced by the nearest choice."""
    meant = get_close_matches(remedy.word, remedy.choices, 1)
    wrong = re.compile(rf"^{re.escape(remedy.word)}(?=$|[:@])")
    right = [wrong.sub(meant[0], word) for word in words] if meant and meant[0] not in words else None
    return None if right == list(words) else right


def _located(words: Sequence[str], missing: Path) -> list[str] | None:
    """The command line with a missing path replaced by the file or folder of the nearest name."""
    for at, word in enumerate(words[1:], 1):  # the first is the command
        path = Path(word.rpartition(":")[2])
        if path.resolve() == missing.resolve() and not path.exists() and path.parent.is_dir():
            for near in get_close_matches(path.name, os.listdir(path.parent), 1):
                return [*words[:at], word.removesuffix(path.name) + near, *words[at + 1 :]]
    return None
