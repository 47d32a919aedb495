"""Run directories of every kind as one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from surefoot.experiment import configs
from surefoot.experiment.files import write_atomic
from surefoot.experiment.reports.web import checks, comparisons, sweeps, training
from surefoot.experiment.reports.web.page import Page, html

CONFIG, FILE = "config.json", "report.html"


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
    path = directory / CONFIG
    if not path.exists():
        raise FileNotFoundError(f"{directory} is no run directory: it has no {CONFIG}")
    try:
        config = configs.parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None
    if "recipes" in config:
        return comparisons.page(directory) if "rates_per_recipe" in config else sweeps.page(directory)
    return training.page(directory, config) if "width" in config else checks.page(directory, config)


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
