"""Parts of Vega-Lite specifications that the charts share.

Colours are variables of the page's style, which knows light, dark and paper; beside its colour a line has points of its
own shape, for readers who cannot tell the colours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Spec = dict[str, Any]

SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")
COLOURS = tuple(f"var(--s{i})" for i in range(len(SHAPES)))
POWER_OF_TWO = "'2^' + format(log(datum.value) / log(2), 'd')"


def number(field: str, title: str, **more: Any) -> Spec:
    """Encode a column of numbers."""
    return {"field": field, "type": "quantitative", "title": title, **more}


def widths(values: Sequence[int]) -> Spec:
    """Encode the model's width, a tick for each that was measured."""
    scale, axis = {"type": "log", "base": 2, "nice": False}, {"values": list(values), "format": "d"}
    return number("width", "width", scale=scale, axis=axis)


def steps() -> Spec:
    """Encode the step of a run."""
    return number("step", "step", axis={"tickMinStep": 1, "format": "d"})


def layer(mark: str, encoding: Mapping[str, Any] | None = None, where: str = "", **look: Any) -> Spec:
    """Draw rows.

    Args:
        mark: "line", "area", "point", "rule" or "text".
        encoding: beside what all layers share.
        where: a condition on `datum`, a row; all rows by default.
        **look: properties of the mark.

    Returns:
        The layer.
    """
    rows = {"transform": [{"filter": where}]} if where else {}
    return {"mark": {"type": mark, **look}, **rows, "encoding": dict(encoding or {})}


def points(encoding: Mapping[str, Any], where: str = "", size: int = 55, **look: Any) -> Spec:
    """Draw filled points of so many square pixels."""
    return layer("point", encoding, where, filled=True, size=size, **look)


def crosses(encoding: Mapping[str, Any], where: str) -> Spec:
    """Draw crosses."""
    return layer("text", encoding, where, text="\N{MULTIPLICATION SIGN}", fontSize=17, fontWeight="bold")


def columns(names: Sequence[str], rows: Sequence[Sequence[Any]], digits: int = 5) -> dict[str, list[Any]]:
    """Turn rows into columns; of numbers that are not whole so many significant digits are kept.

    Args:
        names: of the columns.
        rows: a value for each.
        digits: significant ones.

    Returns:
        Column by name.

    >>> columns(("step", "loss"), [(10, 2.3456789), (20, None)])
    {'step': [10, 20], 'loss': [2.3457, None]}
    """
    return {
        name: [float(f"{row[i]:.{digits}g}") if isinstance(row[i], float) else row[i] for row in rows]
        for i, name in enumerate(names)
    }


def series(field: str, title: str, names: Sequence[str]) -> Spec:
    """Encode a column by colour and by shape, in the order of its values."""
    domain = list(names)
    scales = {
        "color": {"domain": domain, "range": [COLOURS[i % len(COLOURS)] for i in range(len(domain))]},
        "shape": {"domain": domain, "range": [SHAPES[i % len(SHAPES)] for i in range(len(domain))]},
    }
    legend = {"title": title, "columns": 4, "symbolOpacity": 1}
    return {
        channel: {"field": field, "type": "nominal", "scale": scale, "legend": legend}
        for channel, scale in scales.items()
    }


def tooltip(**titles: str) -> list[Spec]:
    """Name the columns that are shown beside the pointer; one with a format behind a bar is of numbers."""
    fields = []
    for field, title in titles.items():
        name, _, form = title.partition("|")
        fields.append({"field": field, "title": name, **({"type": "quantitative", "format": form} if form else {})})
    return fields


def scales(rates: Iterable[float] = (), **more: Any) -> dict[str, Spec]:
    """Offer a logarithmic and a linear axis.

    Args:
        rates: what is drawn, if these are learning rates: the logarithmic axis has powers of two.
        **more: joins both scales.

    Returns:
        The axes, for `Chart.axes`; the logarithmic one first.
    """
    exponents = [math.log2(rate) for rate in rates]
    log: Spec = {"scale": {"type": "log", "nice": False, **more}, "axis": {}}
    if exponents:
        low, high = math.floor(min(exponents)), math.ceil(max(exponents))
        step = 1 + (high - low) // 9
        log["scale"]["base"] = 2
        log["axis"] = {
            "values": [2.0**x for x in range(low, high + 1, step)],
            "labelExpr": POWER_OF_TWO,
            "labelOverlap": True,
        }
    return {"log": log, "linear": {"scale": {"type": "linear", "zero": False, "nice": False, **more}, "axis": {}}}


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Write nested settings as `key.inner: value`."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
