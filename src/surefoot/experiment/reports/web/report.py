"""Run directories of every kind as one page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from surefoot.experiment.configs import kind_of
from surefoot.experiment.files import write_atomic
from surefoot.experiment.reports.web import checks, comparisons, extrapolate, sweeps, training
from surefoot.experiment.reports.web.page import Page, html

FILE = "report.html"


def page(directory: Path) -> Page:
    """Describe a run directory of any kind.

    Args:
        directory: of transfer, compare, train or coordcheck, finished or not.

    Returns:
        The page.

    Raises:
        FileNotFoundError: no run was started there.
        ValueError: its files are damaged.
    """
    return replace(_page(directory), name=name_of(directory))


def name_of(directory: Path) -> str:
    """What a page is called: the directory's own name, also where its path is `.`

    >>> name_of(Path("runs/transfer/..")), name_of(Path()) == Path.cwd().name
    ('runs', True)
    """
    return os.path.basename(os.path.abspath(directory))


def _page(directory: Path) -> Page:
    kind, config = kind_of(directory)
    match kind:
        case "transfer":
            return sweeps.page(directory)
        case "extrapolate":
            return extrapolate.page(directory)
        case "compare":
            return comparisons.page(directory)
        case "train":
            return training.page(directory, config)
        case _:
            return checks.page(directory, config)


def write(directories: Sequence[Path], path: Path) -> Path:
    """Write run directories, side by side, as one file.

    Args:
        directories: one or more.
        path: of the file; it is replaced as a whole, or not at all.

    Returns:
        The path.

    Raises:
        FileNotFoundError: no run was started in one of the directories.
        ValueError: their files are damaged.
        OSError: the file cannot be written.
    """
    write_atomic(path, html([page(directory) for directory in directories]))
    return path
