"""The command line as the tests of this folder run it: small texts and models, in this process or in one of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.cli import main

# Spawned workers import torch anew, so sweeps take seconds: few of them, tiny.
CORPUS = b"the quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 400
SMALL = ["--depth", "1", "--batch-size", "4", "--context", "16"]


def sweep(out: Path, text: Path, *more: str, steps: int = 3) -> list[str]:
    size = ["--widths", "16", "--steps", f"{steps}", *SMALL]
    return ["transfer", "--out", f"{out}", "--data", f"{text}", *size, "--rates", "-7", "-6", *more]


def training(out: Path, text: Path, *more: str) -> list[str]:
    common = ["--data", f"{text}", "--width", "16", "--steps", "6", "--threads", "1", *SMALL]
    return ["train", "--out", f"{out}", *common, *more]


def undeep(arguments: list[str]) -> list[str]:
    """A command without its `--depth`, which a model of one's own does not read."""
    at = arguments.index("--depth")
    return arguments[:at] + arguments[at + 2 :]


def command(arguments: list[str]) -> list[str]:
    return [sys.executable, "-c", "import sys; from surefoot.cli import main; sys.exit(main())", *arguments]


def start(arguments: list[str], **options: object) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    return subprocess.Popen(command(arguments), **{**pipes, **environment, **options})


def finish(arguments: list[str], **options: object) -> tuple[int, str, str]:
    with start(arguments, **options) as process:
        out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """Run in this process; the message of a run that ends with this code: one line, and after it what to type next."""
    try:
        ended = main(arguments)
    except SystemExit as leaving:
        ended = leaving.code
    out, err = capsys.readouterr()
    assert ended == code, err
    assert out == ""
    assert "Traceback" not in err
    *_, message, last = ["", *err.splitlines()]
    if code == 1 and not last.startswith("try: "):  # nothing that is typed differently would help
        return last
    assert last.startswith("try: "), err
    return message


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
