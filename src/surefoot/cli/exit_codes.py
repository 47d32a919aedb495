"""How a command line ends: its exit code, and after an error the line to type next."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import count
from pathlib import Path
from typing import NoReturn

FAILED, USAGE, DIVERGED, DATA, CHECKPOINT, BUSY = 1, 2, 3, 4, 5, 6
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM

TABLE = """
exit codes:
  0    done
  1    an error of the program or the machine (a full disk, memory), or a check that does not pass (coordcheck)
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
    from surefoot.experiment.errors import Damaged, DataError, DirectoryInUse

    codes = {DataError: DATA, Damaged: CHECKPOINT, DirectoryInUse: BUSY, ValueError: USAGE}
    return next((code for kind, code in codes.items() if isinstance(error, kind)), FAILED)


class Misuse(ValueError):
    """Options that cannot be parsed.

    Args:
        message: what is wrong.
        prog: the command, as in `surefoot train`.
        flags: the options that it has.
    """

    def __init__(self, message: str, prog: str, flags: Sequence[str]) -> None:
        super().__init__(message)
        self.prog: str = prog
        self.flags: Sequence[str] = flags


class Parser(argparse.ArgumentParser):
    """A parser that raises `Misuse`, so that whoever catches it can say what to type next."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of leaving.

        Args:
            message: what is wrong.

        Raises:
            Misuse: always.
        """
        raise Misuse(message, self.prog, re.findall(r"--[\w-]+", self.format_help()))


def next_line(argv: Sequence[str], error: Exception | None, arguments: argparse.Namespace | None = None) -> str:
    """The line to type after an error: the same command, put right where the error says how, or its help.

    Args:
        argv: the command line that was typed, without the program.
        error: what came of it; None for a training run that has diverged.
        arguments: as parsed; None if they could not be.

    Returns:
        A line for the shell; empty for errors of the program or the machine that nothing typed would help.

    >>> next_line(["train", "--wdith=64"], Misuse("unrecognized arguments: --wdith=64", "surefoot train", ["--width"]))
    'surefoot train --width 64'
    >>> next_line(["tokens"], ValueError("give IN and OUT"), argparse.Namespace(command="tokens"))
    'surefoot tokens --help'
    """
    message, words = str(error or ""), [part for word in argv for part in _split(word)]
    if package := re.search(r"pip install '[^']+'", message):
        return package[0]
    right: list[str] | None = None
    if error is None or re.search("another (directory|folder)", message):
        right = _elsewhere(words, arguments, diverged=error is None)
    code = USAGE if error is None else code_of(error)
    right = right or _respelled(words, error) or (None if code == USAGE else _found(words, message))
    if right is None and code == CHECKPOINT:
        right = _with(words, "--resume", "auto")
    prog = "torchrun ... -m surefoot" if "RANK" in os.environ else "surefoot"
    if right is not None:
        return f"{prog} {shlex.join(right)}"
    if isinstance(error, Misuse):
        return f"{error.prog} --help"
    known = arguments is not None and error is not None and code != FAILED
    return f"surefoot {arguments.command} --help" if known and arguments else ""


def _split(word: str) -> list[str]:
    """`--width=64` as two words."""
    flag, equals, value = word.partition("=")
    return [flag, value] if equals and flag.startswith("--") else [word]


def _with(words: Sequence[str], flag: str, value: str) -> list[str]:
    """The words with a value for an option, in place of the one that it has."""
    if flag not in words:
        return [*words, flag, value]
    at = words.index(flag) + 1
    return [*words[:at], value, *words[at + 1 :]]


def _elsewhere(words: Sequence[str], arguments: argparse.Namespace | None, diverged: bool) -> list[str] | None:
    """The same into a directory that does not exist yet; at a quarter of the learning rate if it has diverged."""
    from surefoot.experiment.training.names import log2_lr

    out: Path | None = getattr(arguments, "out", None)
    if arguments is None or out is None:
        return None
    if diverged:
        words = _with(words, "--lr", f"{(arguments.lr or 2.0 ** log2_lr(arguments.method)) / 4:.3g}")
    fresh = next(f"{out}-{n}" for n in count(2) if not Path(f"{out}-{n}").exists())
    if arguments.command == "tokens":
        return [fresh if Path(word) == out else word for word in words]
    return _with(words, "--out", fresh)


def _respelled(words: Sequence[str], error: Exception | None) -> list[str] | None:
    """The same with the option or the name that was meant, if the message lists it."""
    message = str(error)
    if isinstance(error, Misuse) and message.startswith("unrecognized"):
        wrong, choices = next((word for word in message.split() if word.startswith("-")), ""), error.flags
        wrong = wrong.partition("=")[0]
    else:
        before, _, after = message.partition("choose")
        wrong, choices = (re.findall(r"'([^']+)'", before) or [""])[-1], re.findall(r"[\w.-]+", after)
    meant = get_close_matches(wrong, choices, 1)
    right = [re.sub(rf"^{re.escape(wrong)}(?=$|[:@])", meant[0], word) for word in words] if meant else None
    return None if right == list(words) else right


def _found(words: Sequence[str], message: str) -> list[str] | None:
    """The same with a file or folder that is there, for one with nearly its name that the message says is not."""
    for at, word in enumerate(words[1:], 1):  # the first is the command
        path = Path(word.rpartition(":")[2])
        named = re.search(rf"(?<!\w){re.escape(str(path))}(?!\w)", message) and re.search(r"[^\W\d]", path.name)
        if named and not path.exists() and path.parent.is_dir():
            near = get_close_matches(path.name, os.listdir(path.parent), 1)
            if near:
                return [*words[:at], word.removesuffix(path.name) + near[0], *words[at + 1 :]]
    return None
