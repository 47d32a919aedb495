"""Runs a script of benchmarks/ or studies/ within the test's process, as `python SCRIPT OPTIONS` would."""

import contextlib
import io
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Done:
    """Exit code and output of a script."""

    code: int
    out: str
    err: str


@contextlib.contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Make a folder's modules importable; what is imported from benchmarks/ or studies/ is forgotten on leaving."""
    known = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        try:
            yield
        finally:
            for name in set(sys.modules) - known:
                file = getattr(sys.modules[name], "__file__", None) or ""
                paths = [file, *getattr(sys.modules[name], "__path__", ())]
                if any(Path(path).is_relative_to(ROOT / room) for path in paths for room in ("benchmarks", "studies")):
                    del sys.modules[name]


def run(script: str, *options: str) -> Done:
    """Run a script, named from the repository's root; a failure other than an exit code is raised."""
    path, threads = ROOT / script, torch.get_num_threads()
    out, err, code = io.StringIO(), io.StringIO(), 0
    with importable(path.parent), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(path), *options])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                runpy.run_path(str(path), run_name="__main__")
            except SystemExit as exit_:
                code = int(exit_.code or 0)
            finally:
                torch.set_num_threads(threads)
    return Done(code, out.getvalue(), err.getvalue())


def run_in_shell(script: str, *options: str) -> Done:
    """Run a script in a process of its own."""
    command = [sys.executable, str(ROOT / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return Done(done.returncode, done.stdout, done.stderr)
