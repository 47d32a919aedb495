"""What a page is made of, and how it becomes one HTML file that needs no network.

Charts are Vega-Lite specifications, drawn as SVG by Vega's own JavaScript, which is embedded and comes from
vl-convert. Why Vega: screen readers are told about its SVG, it works without a network, has a BSD licence, and takes
0.9 MB: Plotly's smallest bundle takes 1.2 MB and is silent to screen readers, Bokeh's 1.3 MB and draws on a canvas.
"""

import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2
import vl_convert

from surefoot.experiment.files import write_atomic

ASSETS = Path(__file__).parent / "assets"
LIVE_SECONDS = 2.0
"""Seconds between two requests of a live page to its server."""

_INK, _SOFT = "var(--ink)", "var(--soft)"
_TEXT = {"labelColor": _INK, "titleColor": _INK, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"}
CONFIG: dict[str, Any] = {
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {**_TEXT, "gridColor": "var(--line)", "gridOpacity": 0.7, "domainColor": _SOFT, "tickColor": _SOFT},
    "legend": {**_TEXT, "orient": "bottom"},
    "title": {"color": _INK, "subtitleColor": _SOFT, "fontSize": 13, "subtitleFontSize": 12},
    "range": {"category": [f"var(--s{i})" for i in range(8)]},
}
"""The look of all charts, for Vega; colours are variables of the page's style."""

POINTING = " Point at a point, or tap it, for its numbers."
"""The part of a description that a picture leaves out."""


@dataclass(frozen=True)
class Fact:
    """A headline fact of a page.

    Args:
        label: what it is.
        value: in large letters.
        note: what it rests on, in small letters.
    """

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table that the reader can sort by any column.

    Args:
        title: above it.
        head: the columns' titles.
        rows: a text per column.
        notes: below it.

    >>> print(Table("Losses", ["recipe", "loss"], [["muon", "2.1"]], ["in nats"]))
    | recipe | loss |
    |--------|------|
    | muon   | 2.1  |
    <BLANKLINE>
    in nats
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        """For a terminal: padded Markdown without the title, and the notes."""
        lines = [self.head, *self.rows]
        sizes = [max(map(len, column)) for column in zip(*lines, strict=True)]
        top, *rest = (f"| {' | '.join(map(str.ljust, line, sizes))} |" for line in lines)
        return "\n".join([top, f"|{'|'.join('-' * (size + 2) for size in sizes)}|", *rest, "", *self.notes])


@dataclass(frozen=True)
class Choice:
    """A part of a chart's rows that is shown alone.

    Args:
        label: in the chart's switch.
        where: the values that a row must have, by column.
        group: choices of one group stand together in a long list.
        domains: "x" or "y" -> what its axis spans; by default what its rows need.
        note: below the label in a picture.
    """

    label: str
    where: Mapping[str, Any]
    group: str = ""
    domains: Mapping[str, Sequence[float]] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """A picture with its numbers.

    Args:
        title: above it.
        description: what is drawn and how to read it; also what a screen reader says.
        spec: Vega-Lite, without data.
        columns: the data, by column, all of one length.
        choices: what can be shown alone; the first is, unless `side_by_side`.
        side_by_side: whether all choices can be shown, a panel each, and are at first.
        height: of a panel, in pixels.
        axes: "x" or "y" -> name of a scale -> `scale` and `axis` of the channel; the first is shown at first.
        file: name of the run's picture, if this chart is that.
    """

    title: str
    description: str
    spec: Mapping[str, Any]
    columns: Mapping[str, Sequence[Any]]
    choices: Sequence[Choice] = ()
    side_by_side: bool = False
    height: int = 340
    axes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    file: str = ""


@dataclass(frozen=True)
class Page:
    """One run directory.

    Args:
        name: of the directory.
        kind: what was run, in a few words.
        state: whether it has finished.
        facts: the headline facts.
        charts: the pictures.
        tables: the numbers.
        details: title -> text by key; the configuration, the machine.
    """

    name: str
    kind: str
    state: str
    facts: Sequence[Fact]
    charts: Sequence[Chart]
    tables: Sequence[Table]
    details: Mapping[str, Mapping[str, Any]]


def html(pages: Sequence[Page], *, live: bool = False) -> str:
    """Write pages, side by side where the window is wide, as one HTML document.

    Args:
        pages: one or more.
        live: whether it asks its server every two seconds for what is new.

    Returns:
        The document: no script, style, font or picture of it comes from elsewhere, and a policy in its head forbids
        the browser to ask for any.
    """
    main = body(pages)
    style, script = (_inline((ASSETS / f"page.{kind}").read_text("utf-8")) for kind in ("css", "js"))
    values = {"body": main, "version": version(main), "style": style, "scripts": [_inline(_vega()), script]}
    return _templates().get_template("page.html").render(values, pages=pages, live=LIVE_SECONDS if live else None)


def body(pages: Sequence[Page]) -> str:
    """Write the part of the document that changes while runs go on.

    Args:
        pages: one or more.

    Returns:
        HTML, with the charts' specifications and data in it as JSON.
    """
    charts = [[asdict(chart) for chart in page.charts] for page in pages]
    data = json.dumps({"config": CONFIG, "pages": charts}, separators=(",", ":"), allow_nan=False)
    return _templates().get_template("body.html").render(pages=pages, data=data.replace("<", "\\u003c"))


def version(text: str) -> str:
    """Name a text by its content.

    Args:
        text: of `body`.

    Returns:
        Sixteen hexadecimal digits.
    """
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16]


@functools.cache
def _templates() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(ASSETS)
    templates = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    templates.filters["order"] = order
    return templates


def _inline(text: str) -> str:
    """A script or a style; nothing in it may end the element that it stands in."""
    return text.replace("</s", "<\\/s")


@functools.cache
def _vega() -> str:
    """Vega, Vega-Lite and vega-embed as one script. Joining them takes seconds, so it is kept for the next time."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "surefoot"
    path = folder / f"vega-{metadata.version('vl-convert-python')}.js"
    with suppress(OSError):
        return path.read_text("utf-8")
    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, script)
    return script


def order(cell: str) -> float | None:
    """The number that a cell is sorted by: its first, or the exponent of a power of two.

    Args:
        cell: of a table.

    Returns:
        The number; None where there is none.

    >>> order("2^-7.30 ± 0.12"), order("+0.16 (x 1.11)"), order("1,204 runs"), order("diverged")
    (-7.3, 0.16, 1204.0, None)
    """
    found = re.search(r"(?:2\^)?([+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)", cell.replace("\N{MINUS SIGN}", "-"))
    return float(found[1].replace(",", "")) if found else None
