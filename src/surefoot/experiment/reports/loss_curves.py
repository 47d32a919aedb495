"""The charts of a sweep, loss against rate and best rate against width, and how losses are read off the curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np

from surefoot.experiment.files import Record
from surefoot.experiment.reports import charts
from surefoot.experiment.reports.page import POINTING, Chart, Choice
from surefoot.experiment.reports.style import lr, plus_minus
from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.summary import points

# The loss axis spans the losses within an octave of a best rate: above them a curve runs into divergence, and its
# height says nothing.
FRAME_OCTAVES = 1.0
ROUNDING = 1e-6  # octaves by which a fitted rate may lie beside a measured one
CROSS_ROW = 0.04  # share of a panel's height that each width's row of diverged rates takes


@dataclass(frozen=True)
class SharedAxes:
    """The axes of all panels: losses from `low` to `high` in nats, `octaves` of the learning rate."""

    low: float
    high: float
    octaves: float


def means_of(records: Iterable[Record], recipe: str, width: int) -> dict[float, float | None]:
    """Average a recipe's losses at a width over seeds: log2 rate -> mean loss, None where a seed diverged."""
    return fit.mean_curve(points(records, recipe, width))


def shared_axes(summary: Mapping[str, Any], records: Sequence[Record]) -> SharedAxes | None:
    """Find the axes that hold every curve of a sweep near its best rate.

    Args:
        summary: the content of `summary.json`.
        records: the finished runs.

    Returns:
        The axes; None while no rate has finished with all its seeds and without diverging: there is nothing to draw.
    """
    lows, highs, spans = [], [], []
    rows = len(summary["config"]["widths"]) if any(r["val_loss"] is None for r in records) else 1
    for entry in summary["recipes"]:
        curves = [means_of(records, entry["recipe"], width) for width in entry["widths"]]
        rates = [rate for means in curves for rate in means]
        spans.append(max(rates, default=0.0) - min(rates, default=0.0))
        for means, best in zip(curves, map(_best, curves), strict=True):
            near = [m for x, m in means.items() if m is not None and abs(x - best) <= FRAME_OCTAVES]
            lows += [min(near)] if near else []
            highs += [max(near)] if near else []
    if not lows:
        return None
    room = max(highs) - min(lows) or 0.1
    return SharedAxes(
        min(lows) - 0.06 * room, max(highs) + (0.05 + 1.5 * CROSS_ROW * rows) * room, max(max(spans), 2.0) + 0.8
    )


def _best(means: Mapping[float, float | None]) -> float:
    return min(means, key=lambda x: float("inf") if means[x] is None else float(means[x] or 0), default=0.0)


def missed(points: Iterable[fit.Point], rate: float) -> fit.Estimate:
    """Estimate the cost of any rate: its loss, on the line between the nearest two measured, minus the lowest measured.

    Args:
        points: finished runs of one recipe at one width.
        rate: a log2 rate.

    Returns:
        Nats, with an interval over paired seeds; inf next to a rate that diverged, None where no rates were measured on
        both sides.

    >>> losses = {-5.0: 2.5, -4.0: 2.0, -3.0: 2.25, -2.0: None}
    >>> curve = [fit.Point(rate, 0, loss) for rate, loss in losses.items()]
    >>> [missed(curve, rate).value for rate in (-3.5, -2.5, -5.5)]
    [0.125, inf, None]
    """
    points = list(points)
    rows = fit.curve(points)
    below = max((x for x in rows if x <= rate + ROUNDING), default=None)
    above = min((x for x in rows if x >= rate - ROUNDING), default=None)
    if below is None or above is None:
        return fit.Estimate(None, None, 0)
    left, right = rows[below], rows[above]
    if left is None or right is None:
        return fit.Estimate(math.inf, None, 0)
    share = (rate - below) / (above - below) if above > below else 0.0
    return fit.difference({seed: left[seed] + share * (right[seed] - left[seed]) for seed in left}, fit.lowest(points))


def measured_within(points: Iterable[fit.Point], rate: float, octaves: float) -> float:
    """Move a rate by so many octaves, or as far as rates were measured on that side, diverged or not.

    Args:
        points: finished runs of one recipe at one width.
        rate: a log2 rate inside those measured.
        octaves: how far; negative: to lower rates.

    Returns:
        A log2 rate.

    >>> measured_within([fit.Point(rate, 0, 2.0) for rate in (-4.0, -3.0, -2.5)], -3.25, 1.0)
    -2.5
    """
    rates = [point.log2_lr for point in points]
    end = max(rates) if octaves > 0 else min(rates)
    return rate + octaves if abs(end - rate) >= abs(octaves) - ROUNDING else end


def curves(summary: Mapping[str, Any], records: Sequence[Record], axes: SharedAxes, of: str = "width") -> Chart:
    """Draw loss against learning rate, a panel per recipe and a line per width.

    Args:
        summary: the content of `summary.json`.
        records: the finished runs.
        axes: of all panels.
        of: what the width is called.

    Returns:
        The chart; of widths it is the run's picture.
    """
    names = ("recipe", "width", "kind", "lr", "log2_lr", "loss", "seed", "steps", "low", "high")
    rows = [row for entry in summary["recipes"] for row in _rows(entry, records, axes)]
    columns = charts.columns(names, [[row.get(name) for name in names] for row in rows])
    color, shape = charts.series("width", of, map(str, summary["config"]["widths"]))
    shown = charts.tooltip(
        lr="learning rate|.3g", log2_lr="log2 of it|.2f", loss="loss|.4f", width=of, seed="seed", steps="steps"
    )
    mean, seed, optimum = (charts.rows(f"datum.kind == '{kind}'") for kind in ("mean", "seed", "optimum"))
    path = optimum.transform_calculate(place="toNumber(datum.width)")
    ink: dict[str, Any] = {"strokeWidth": 2, "color": "var(--ink)"}
    x = alt.X("lr:Q", title="learning rate")
    layers = [
        mean.mark_line(clip=True, strokeWidth=2).encode(x, color),
        seed.mark_point(filled=True, size=18, opacity=0.5, clip=True).encode(x, color, shape),
        mean.mark_point(filled=True, size=55, clip=True).encode(x, color, shape),
        charts.crosses("datum.kind == 'diverged'").encode(x, color),
        path.mark_line(color="var(--ink)", strokeWidth=1, strokeDash=[4, 3]).encode(x, order="place:Q"),
        optimum.mark_rule(**ink).encode(alt.X("low:Q", title="learning rate"), x2="high:Q"),
        optimum.mark_point(filled=False, size=130, **ink).encode(x),
    ]
    losses = charts.scales("linear", domain=[axes.low, axes.high])
    return Chart(
        "Loss against learning rate",
        f"A line per {of}, the mean over seeds; small points are seeds; a ring is the fitted best rate with its "
        "interval; a cross at the top is a rate that diverged. Curves end where they leave the losses near the best."
        + POINTING,
        charts.spec(*layers, y=alt.Y("loss:Q", title="validation loss (nats)"), tooltip=shown),
        columns,
        [
            Choice(name, {"recipe": name}, domains={"x": _rates(name, records, axes)}, note=_headline(entry, of))
            for name, entry in ((entry["recipe"], entry) for entry in summary["recipes"])
        ],
        side_by_side=True,
        axes={"x": charts.scales(rates=columns["lr"]), "y": losses},
        file="transfer.png" if of == "width" else "",
    )


def _headline(entry: Mapping[str, Any], of: str) -> str:
    """What a panel of a picture says below the recipe: how far the best rate moves."""
    if len(entry["widths"]) == 1:
        return ""
    times = entry["widths"][-1] / entry["widths"][0]
    if entry["drift_octaves"] is None:
        return "no drift: an optimum is not interior"
    drift = f"{entry['drift_octaves']:+.2f}".replace("-", "\N{MINUS SIGN}")
    interval = plus_minus(entry["drift_octaves_ci"], 2)
    return f"drift {drift}{interval} octaves over {times:g}\N{MULTIPLICATION SIGN} {of}"


def _rates(recipe: str, records: Sequence[Record], axes: SharedAxes) -> tuple[float, float]:
    """The rates that a recipe's panel spans: as many octaves as the others', around its own."""
    rates = [record["log2_lr"] for record in records if record["recipe"] == recipe]
    middle = (max(rates, default=0.0) + min(rates, default=0.0)) / 2
    return 2 ** (middle - axes.octaves / 2), 2 ** (middle + axes.octaves / 2)


def _rows(entry: Mapping[str, Any], records: Sequence[Record], axes: SharedAxes) -> list[dict[str, Any]]:
    """What is drawn of a recipe: means, seeds, rates that diverged, optima."""
    rows = []
    optima = zip(entry["widths"], entry["best_log2_lr"], entry["best_log2_lr_ci"], strict=True)
    own = [record for record in records if record["recipe"] == entry["recipe"]]
    for below, (width, vertex, interval) in enumerate(optima, 1 - len(entry["widths"])):
        means = means_of(own, entry["recipe"], width)
        runs = [record for record in own if record["width"] == width]
        here = {"recipe": entry["recipe"], "width": str(width), "steps": runs[0]["steps"] if runs else None}
        top = axes.high - (0.025 - CROSS_ROW * below) * (axes.high - axes.low)  # a row each: no cross hides another
        for rate, mean in means.items():
            kind = {"kind": "diverged", "loss": top} if mean is None else {"kind": "mean", "loss": mean}
            seeds = sum(record["log2_lr"] == rate for record in runs)
            rows.append({**here, **kind, "log2_lr": rate, "lr": 2**rate, "seed": f"mean of {seeds}"})
        if entry["seeds"] > 1:
            rows += [
                {**here, "kind": "seed", "log2_lr": r["log2_lr"], "lr": 2 ** r["log2_lr"], "loss": r["val_loss"],
                 "seed": str(r["seed"])}
                for r in runs if r["val_loss"] is not None
            ]  # fmt: skip
        finite = {rate: mean for rate, mean in means.items() if mean is not None}
        if vertex is not None:
            height = float(np.interp(vertex, list(finite), list(finite.values())))
            low, high = interval or (vertex, vertex)
            rows.append({**here, "kind": "optimum", "log2_lr": vertex, "lr": 2**vertex, "loss": height,
                         "seed": "fitted", "low": lr(low), "high": lr(high)})  # fmt: skip
    return rows


def optima(summary: Mapping[str, Any]) -> Chart:
    """Draw the best learning rate against width, a line per recipe."""
    rows = [
        (entry["recipe"], width, 2**rate, rate, *map(lr, interval or (rate, rate)))
        for entry in summary["recipes"]
        for width, rate, interval in zip(
            entry["widths"], entry["best_log2_lr"], entry["best_log2_lr_ci"], strict=True
        )
        if rate is not None
    ]  # fmt: skip
    columns = charts.columns(("recipe", "width", "lr", "log2_lr", "low", "high"), rows)
    shown = charts.tooltip(
        recipe="recipe", width="width", lr="best rate|.3g", log2_lr="log2 of it|.2f", low="from|.3g", high="to|.3g"
    )
    color, shape = charts.series("recipe", "recipe", [entry["recipe"] for entry in summary["recipes"]])
    title, x = "best learning rate", charts.sizes("width", "width", summary["config"]["widths"])
    layers = [
        charts.rows().mark_line(strokeWidth=2).encode(alt.Y("lr:Q", title=title)),
        charts.rows().mark_rule(strokeWidth=2).encode(alt.Y("low:Q", title=title), y2="high:Q"),
        charts.rows().mark_point(filled=True, size=55).encode(alt.Y("lr:Q", title=title), shape),
    ]
    return Chart(
        "Best learning rate against width",
        "On a level line the rate tuned on the narrow model serves the wide one. Bars are 95 % intervals over seeds.",
        charts.spec(*layers, x=x, color=color, tooltip=shown),
        columns,
        axes={"y": charts.scales(rates=columns["lr"], padding=15)},
    )
