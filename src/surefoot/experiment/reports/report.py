"""Runs of every kind: how a directory is read, printed and shown; several as one page, and the picture of one."""

import json
import math
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import vl_convert

from surefoot.experiment.configs import CONFIG as CONFIG_FILE
from surefoot.experiment.configs import kind_of
from surefoot.experiment.files import replace_files, write_atomic
from surefoot.experiment.reports import compare, coordcheck, extrapolate, ladder, train, transfer
from surefoot.experiment.reports.page import ASSETS, CONFIG, POINTING, Chart, Choice, Page, html
from surefoot.experiment.sweep import compare as comparison
from surefoot.experiment.sweep import extrapolate as axis
from surefoot.experiment.sweep import ladder as rungs
from surefoot.experiment.sweep import sweep

FILE = "report.html"


class RunKind(NamedTuple):
    """A kind of run.

    Args:
        load: reads the summary of a directory, of a run that has not finished, too, if it has one.
        statement: formats a summary for a terminal: the table, and what follows from it.
        page: describes a directory for the browser.
    """

    load: Callable[[Path], dict[str, Any]]
    statement: Callable[[Mapping[str, Any]], str]
    page: Callable[[Path], Page]


KINDS = {
    "transfer": RunKind(lambda directory: sweep.load(directory)[0], transfer.statement, transfer.page),
    "extrapolate": RunKind(lambda directory: axis.load(directory)[0], extrapolate.statement, extrapolate.page),
    "ladder": RunKind(rungs.load, ladder.statement, ladder.page),
    "compare": RunKind(comparison.load, lambda summary: str(compare.table(summary)), compare.page),
    "train": RunKind(train.summarise, train.statement, train.page),
    "coordcheck": RunKind(coordcheck.load, coordcheck.statement, coordcheck.page),
}
"""Kinds of runs by the names of `configs.KINDS`."""


def kind(directory: Path) -> RunKind:
    """The kind of a directory's run.

    Args:
        directory: of transfer, compare, train or coordcheck, finished or not.

    Returns:
        One of `KINDS`.

    Raises:
        FileNotFoundError: no run was started there.
        ValueError: its configuration is damaged.
    """
    return KINDS[kind_of(directory)[0]]


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
    with legible(directory):
        return replace(kind(directory).page(directory), name=name_of(directory))


@contextmanager
def legible(directory: Path) -> Iterator[None]:
    """Context in which a run's files that lack something, or hold a value that cannot be, are an error of the user's.

    Args:
        directory: of a run.

    Yields:
        Nothing.

    Raises:
        ValueError: in place of an error that such a file leads to.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, StopIteration) as error:
        found = f"lack {error}" if isinstance(error, KeyError) else f"hold a value that cannot be ({error!r})"
        remedy = f"the command of this run writes all but {CONFIG_FILE} again; if that is damaged, start elsewhere"
        raise ValueError(f"{directory}: its files {found}: {remedy}") from error


def name_of(directory: Path) -> str:
    """The name of a page: the directory's own name, also where its path is `.`

    >>> name_of(Path("runs/transfer/..")), name_of(Path()) == Path.cwd().name
    ('runs', True)
    """
    return os.path.basename(os.path.abspath(directory))


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


def draw(directory: Path) -> Path | None:
    """Draw the picture of a run, as PNG on white: the page's chart that has a file, and the first fact.

    Args:
        directory: of a run, finished or not.

    Returns:
        The picture's path; None if there is nothing to draw.

    Raises:
        FileNotFoundError: no run was started there.
        ValueError: its files are damaged.
    """
    made = page(directory)
    if (chart := next((chart for chart in made.charts if chart.file), None)) is None:
        return None
    choices = [choice for choice in chart.choices if choice.group == chart.choices[0].group] or [Choice("", {})]
    beside = len(choices) if len(choices) <= 3 else math.ceil(math.sqrt(len(choices)))
    fact, letters = made.facts[0], 60 * max(2, beside)
    first = textwrap.wrap(f"{fact.label}: {fact.value}{'; ' * bool(fact.note)}{fact.note}", letters)
    below = textwrap.wrap(chart.description.removesuffix(POINTING), letters)
    quiet = {"orient": "bottom", "anchor": "start", "fontSize": 12, "fontWeight": "normal", "color": "var(--soft)"}
    panels = [_panel(chart, choice, 320 if beside > 1 else 600) for choice in choices]
    drawn = {
        "title": {"text": made.kind, "subtitle": first, "anchor": "start", "fontSize": 15, "offset": 12},
        "vconcat": [{"concat": panels, "columns": beside, "title": {"text": below, **quiet}}],
        "config": {**CONFIG, "background": "white", "font": "sans-serif"},
    }
    light = dict(reversed(re.findall(r"(--\w+): (#\w+)", (ASSETS / "page.css").read_text("utf-8"))))
    text = re.sub(r"var\((--\w+)\)", lambda found: light[found[1]], json.dumps(drawn, allow_nan=False))
    replace_files({directory / chart.file: vl_convert.vegalite_to_png(text, ppi=144)})
    return directory / chart.file


def _panel(chart: Chart, choice: Choice, width: int) -> dict[str, Any]:
    """A chart's specification with the rows of a choice and the axes that the page shows first."""
    spec: Any = chart.spec
    for channel, scales in chart.axes.items():
        spec = _with_axis(spec, channel, next(iter(scales.values())))
    for channel, domain in choice.domains.items():
        spec = _with_axis(spec, channel, {"scale": {"domain": domain}})
    rows = [dict(zip(chart.columns, row, strict=True)) for row in zip(*chart.columns.values(), strict=True)]
    shown = [row for row in rows if all(row[name] == value for name, value in choice.where.items())]
    drawn = {"title": {"text": choice.label, "subtitle": choice.note}, "data": {"values": shown}}
    return {**spec, **drawn, "width": width, "height": 280}


def _with_axis(spec: Mapping[str, Any], channel: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Give every encoding of a channel a scale and an axis, as the page's script does."""

    def changed(part: Mapping[str, Any]) -> dict[str, Any]:
        own = part["encoding"].get(channel, {})
        if "field" not in own:
            return dict(part)
        merged = {key: {**own.get(key, {}), **values} for key, values in chosen.items()}
        return {**part, "encoding": {**part["encoding"], channel: {**own, **merged}}}

    return {**changed(spec), "layer": [*map(changed, spec["layer"])]}
