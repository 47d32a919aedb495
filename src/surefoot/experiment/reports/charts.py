"""Parts of Vega-Lite specifications that the charts share, written with Altair.

Colours are variables of the page's style, which has light, dark and paper variants; beside its colour a line has points
of its own shape, for readers who cannot tell the colours apart.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import altair as alt

Spec = dict[str, Any]

SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")
COLOURS = tuple(f"var(--s{i})" for i in range(len(SHAPES)))
POWER_OF_TWO = "'2^' + format(log(datum.value) / log(2), '.2~f')"
_PLACE = 13  # letters of a legend's entry; four such entries stand side by side


def rows(where: str = "") -> alt.Chart:
    """Begin a layer.

    Args:
        where: a condition on `datum`, a row; all rows by default.

    Returns:
        The layer, without a mark.
    """
    return alt.Chart(transform=[alt.FilterTransform(where)] if where else alt.Undefined)


def spec(*layers: alt.Chart, **shared: Any) -> Spec:
    """Put layers on top of each other.

    Args:
        *layers: the lowest first.
        **shared: encodings of all layers.

    Returns:
        The specification, without data.
    """
    written: Spec = alt.layer(*layers).encode(**shared).to_dict(validate=False, context={"top_level": False})
    for layer in written["layer"]:
        del layer["data"]  # Altair's own, empty: all layers have the chart's
    return written


def crosses(where: str) -> alt.Chart:
    """Draw crosses at the rows for which a condition holds."""
    drawn: alt.Chart = rows(where).mark_text(text="\N{MULTIPLICATION SIGN}", fontSize=17, fontWeight="bold")
    return drawn


def steps(of: str = "") -> alt.X:
    """Encode the step of a run; of continues the axis title, as " (of 1024 tokens)"."""
    return alt.X("step:Q", title=f"step{of}", axis=alt.Axis(tickMinStep=1, format="d"))


def sizes(field: str, title: str, values: Sequence[int]) -> alt.X:
    """Encode the model's width, or another size, with a tick for each value that was measured."""
    scale, axis = alt.Scale(type="log", base=2, nice=False), alt.Axis(values=[*values], format="d")
    return alt.X(field, type="quantitative", title=title, scale=scale, axis=axis)


def series(
    field: str, title: str, names: Iterable[str], labels: Mapping[str, str] | None = None
) -> tuple[alt.Color, alt.Shape]:
    """Encode a column by colour and by shape.

    Args:
        field: the column.
        title: of the legend.
        names: its values, in their order.
        labels: the legend's text for each value.

    Returns:
        Both channels.
    """
    domain = list(names)
    longest = max(map(len, labels.values() if labels else domain), default=0)
    beside = max(1, 4 // max(1, math.ceil(longest / _PLACE)))
    legend = alt.Legend(title=title, columns=beside, symbolOpacity=1, labelLimit=400)
    if labels:
        legend.labelExpr = f"{json.dumps(labels)}[datum.label]"
    colours, shapes = ([values[i % len(values)] for i in range(len(domain))] for values in (COLOURS, SHAPES))
    return (
        alt.Color(field, type="nominal", scale=alt.Scale(domain=domain, range=colours), legend=legend),
        alt.Shape(field, type="nominal", scale=alt.Scale(domain=domain, range=shapes), legend=legend),
    )


def tooltip(*columns: str) -> list[alt.Tooltip]:
    """Name the columns that are shown beside the pointer.

    Args:
        *columns: a name; behind an equals sign a title, if it is another; behind a bar a format, if the column is of
            numbers.

    Returns:
        The channel.

    >>> [(one.shorthand, one["title"]) for one in tooltip("seed", "lr=learning rate|.3g")]
    [('seed', 'seed'), ('lr', 'learning rate')]
    """
    shown = []
    for column in columns:
        name, _, form = column.partition("|")
        field, _, title = name.partition("=")
        kind: Any = "quantitative" if form else "nominal"
        shown.append(alt.Tooltip(field, type=kind, title=title or field, format=form or alt.Undefined))
    return shown


def scales(
    first: str = "log", rates: Iterable[float] = (), domain: Sequence[float] = (), **more: Any
) -> dict[str, Spec]:
    """Offer a logarithmic and a linear axis.

    Args:
        first: "log" or "linear", the one that is shown at first.
        rates: the values drawn, if they are learning rates: the logarithmic axis then has powers of two.
        domain: the range of both, if not that of the data; a logarithmic axis ignores one from 0 or below.
        **more: joins both scales.

    Returns:
        The axes, for `Chart.axes`.
    """
    more["nice"] = False
    log: Spec = {"scale": {"type": "log", **more}, "axis": {}}
    linear: Spec = {"scale": {"type": "linear", "zero": False, **more}, "axis": {}}
    if exponents := [math.log2(rate) for rate in rates]:
        octaves = max(exponents) - min(exponents)
        step = next((step for step in (0.25, 0.5) if octaves < 4 * step), 1 + octaves // 9)
        ticks = range(math.floor(min(exponents) / step), math.ceil(max(exponents) / step) + 1)
        log["scale"]["base"] = 2
        log["axis"] = {"values": [2.0 ** (step * x) for x in ticks], "labelExpr": POWER_OF_TWO, "labelOverlap": True}
    if domain:
        linear["scale"]["domain"] = [*domain]
        if domain[0] > 0:
            log["scale"]["domain"] = [*domain]
    return {"log": log, "linear": linear} if first == "log" else {"linear": linear, "log": log}


def columns(names: Sequence[str], rows: Iterable[Sequence[Any]], digits: int = 5) -> dict[str, list[Any]]:
    """Turn rows into columns; floats keep so many significant digits.

    Args:
        names: of the columns.
        rows: a value for each; None in place of those that are missing at the end.
        digits: significant digits.

    Returns:
        Column by name.

    >>> columns(("step", "loss"), [(10, 2.3456789), (20,)])
    {'step': [10, 20], 'loss': [2.3457, None]}
    """
    return {
        name: [float(f"{value:.{digits}g}") if isinstance(value, float) else value for value in values]
        for name, *values in zip_longest(names, *rows)
    }


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Write nested settings as `key.inner: value`."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found
