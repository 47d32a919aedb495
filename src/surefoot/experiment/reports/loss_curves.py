"""The charts of a sweep, loss against rate and best rate against width, and how losses are read off the curves."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np

from surefoot.experiment.files import Record
from surefoot.experiment.reports import charts
from surefoot.experiment.reports.page import POINTING, Chart, Choice
from surefoot.experiment.reports.style import estimate, lr
from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.summary import points

# The loss axis spans the losses within an octave of a best rate: above them a curve runs into divergence, and its
# height says nothing.
FRAME_OCTAVES = 1.0
ROUNDING = 1e-6  # octaves by which a fitted rate may lie beside a measured one
CROSS_ROW = 0.04  # share of a panel's height that each width's row of diverged rates takes


def means_of(records: Iterable[Record], recipe: str, width: int) -> dict[float, float | None]:
    """Average a recipe's losses at a width over seeds: log2 rate -> mean loss, None where a seed diverged."""
    return fit.mean_curve(points(records, recipe, width))


def missed(points: Sequence[fit.Point], rate: float) -> fit.Estimate:
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
    rows = fit.curve(points)
    below = max((x for x in rows if x <= rate + ROUNDING), default=None)
    above = min((x for x in rows if x >= rate - ROUNDING), default=None)
    if below is None or above is None:
        return fit.UNKNOWN
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


def found_at(entry: Mapping[str, Any]) -> Iterable[tuple[int, float | None, Sequence[float] | None]]:
    """Each width of a recipe, with the log2 of its best rate and the interval of that."""
    return zip(entry["widths"], entry["best_log2_lr"], entry["best_log2_lr_ci"], strict=True)


def curves(summary: Mapping[str, Any], records: Sequence[Record], of: str = "width") -> list[Chart]:
    """Draw loss against learning rate, a panel per recipe and a line per width.

    Args:
        summary: the content of `summary.json`.
        records: the finished runs.
        of: what the width is called.

    Returns:
        The chart; of widths it is the run's picture. Nothing while no rate has finished with all its seeds and without
        diverging.
    """
    recipes = {entry["recipe"]: entry for entry in summary["recipes"]}
    if (losses := _losses(summary["recipes"], records)) is None:
        return []
    spans = _spans(records, [*recipes])
    names = ("recipe", "width", "kind", "lr", "log2_lr", "loss", "seed", "steps", "low", "high")
    columns = charts.columns(names, [row for entry in recipes.values() for row in _rows(entry, records, *losses)])
    what = (
        f"A line per {of}, the mean over seeds; small points are seeds; a ring is the fitted best rate with its "
        "interval; a cross at the top is a rate that diverged. Curves end where they leave the losses near the best."
    )
    choices = [
        Choice(name, {"recipe": name}, domains={"x": spans[name]}, note=_headline(entry, of))
        for name, entry in recipes.items()
    ]
    spec = _spec(of, summary["config"]["widths"])
    axes = {"x": charts.scales(rates=columns["lr"]), "y": charts.scales("linear", domain=losses)}
    own: Any = {"side_by_side": True, "axes": axes, "file": "transfer.png" if of == "width" else ""}
    return [Chart("Loss against learning rate", what + POINTING, spec, columns, choices, **own)]


def _spec(of: str, widths: Sequence[int]) -> charts.Spec:
    color, shape = charts.series("width", of, map(str, widths))
    shown = charts.tooltip("lr=learning rate|.3g", "log2_lr=log2 of it|.2f", "loss|.4f", f"width={of}", "seed", "steps")
    mean, seed, optimum = (charts.rows(f"datum.kind == '{kind}'") for kind in ("mean", "seed", "optimum"))
    path = optimum.transform_calculate(place="toNumber(datum.width)")
    ink: dict[str, Any] = {"strokeWidth": 2, "color": "var(--ink)"}
    x, low = (alt.X(field, type="quantitative", title="learning rate") for field in ("lr", "low"))
    layers = [
        mean.mark_line(clip=True, strokeWidth=2).encode(x, color),
        seed.mark_point(filled=True, size=18, opacity=0.5, clip=True).encode(x, color, shape),
        mean.mark_point(filled=True, size=55, clip=True).encode(x, color, shape),
        charts.crosses("datum.kind == 'diverged'").encode(x, color),
        path.mark_line(color="var(--ink)", strokeWidth=1, strokeDash=[4, 3]).encode(x, order="place:Q"),
        optimum.mark_rule(**ink).encode(low, x2="high:Q"),
        optimum.mark_point(filled=False, size=130, **ink).encode(x),
    ]
    return charts.spec(*layers, y=alt.Y("loss:Q", title="validation loss (nats)"), tooltip=shown)


def _losses(entries: Sequence[Mapping[str, Any]], records: Sequence[Record]) -> tuple[float, float] | None:
    """The losses that all panels span: of every curve those near its best rate, and the crosses above them."""
    near = []
    for entry in entries:
        for width in entry["widths"]:
            means = {x: m for x, m in means_of(records, entry["recipe"], width).items() if m is not None}
            best = min(means, key=lambda x: means[x], default=0.0)
            near += [m for x, m in means.items() if abs(x - best) <= FRAME_OCTAVES]
    if not near:
        return None
    crosses = len(entries[0]["widths"]) if any(r["val_loss"] is None for r in records) else 1
    low, high = min(near), max(near)
    room = high - low or 0.1
    return low - 0.06 * room, high + (0.05 + 1.5 * CROSS_ROW * crosses) * room


def _spans(records: Sequence[Record], recipes: Sequence[str]) -> dict[str, tuple[float, float]]:
    """The rates that each recipe's panel spans: as many octaves as the others', around its own."""
    rates = {name: [record["log2_lr"] for record in records if record["recipe"] == name] or [0.0] for name in recipes}
    octaves = max(2.0, *(max(each) - min(each) for each in rates.values())) + 0.8
    middles = {name: (max(each) + min(each)) / 2 for name, each in rates.items()}
    return {name: (2 ** (middle - octaves / 2), 2 ** (middle + octaves / 2)) for name, middle in middles.items()}


def _headline(entry: Mapping[str, Any], of: str) -> str:
    """The line below the recipe in a panel of a picture: how far the best rate moves."""
    if len(entry["widths"]) == 1:
        return ""
    times = entry["widths"][-1] / entry["widths"][0]
    if entry["drift_octaves"] is None:
        return "no drift: an optimum is not interior"
    drift = estimate(entry["drift_octaves"], entry["drift_octaves_ci"], "+.2f").replace("-", "\N{MINUS SIGN}")
    return f"drift {drift} octaves over {times:g}\N{MULTIPLICATION SIGN} {of}"


def _rows(entry: Mapping[str, Any], records: Sequence[Record], low: float, high: float) -> Iterator[tuple[Any, ...]]:
    """The rows drawn for a recipe between two losses: means, seeds, rates that diverged, optima."""
    for below, (width, vertex, interval) in enumerate(found_at(entry), 1 - len(entry["widths"])):
        runs = [record for record in records if (record["recipe"], record["width"]) == (entry["recipe"], width)]
        means, tried = means_of(runs, entry["recipe"], width), Counter(record["log2_lr"] for record in runs)
        top = high - (0.025 - CROSS_ROW * below) * (high - low)  # a row each: no cross hides another
        drawn: list[tuple[Any, ...]] = [
            ("diverged" if mean is None else "mean", rate, top if mean is None else mean, f"mean of {tried[rate]}")
            for rate, mean in means.items()
        ]
        if entry["seeds"] > 1:
            measured = [record for record in runs if record["val_loss"] is not None]
            drawn += [("seed", record["log2_lr"], record["val_loss"], str(record["seed"])) for record in measured]
        if vertex is not None:
            finite = {rate: mean for rate, mean in means.items() if mean is not None}
            height = float(np.interp(vertex, [*finite], [*finite.values()]))
            drawn.append(("optimum", vertex, height, "fitted", *map(lr, interval or (vertex, vertex))))
        for kind, rate, loss, seed, *ends in drawn:
            yield entry["recipe"], str(width), kind, 2**rate, rate, loss, seed, runs[0]["steps"], *ends


def optima(summary: Mapping[str, Any]) -> Chart:
    """Draw the best learning rate against width, a line per recipe."""
    rows = [
        (entry["recipe"], width, 2**rate, rate, *map(lr, interval or (rate, rate)))
        for entry in summary["recipes"]
        for width, rate, interval in found_at(entry)
        if rate is not None
    ]
    columns = charts.columns(("recipe", "width", "lr", "log2_lr", "low", "high"), rows)
    rates = ("lr=best rate|.3g", "log2_lr=log2 of it|.2f", "low=from|.3g", "high=to|.3g")
    shown = charts.tooltip("recipe", "width", *rates)
    color, shape = charts.series("recipe", "recipe", [entry["recipe"] for entry in summary["recipes"]])
    y, low = (alt.Y(field, type="quantitative", title="best learning rate") for field in ("lr", "low"))
    layers = [
        charts.rows().mark_line(strokeWidth=2).encode(y),
        charts.rows().mark_rule(strokeWidth=2).encode(low, y2="high:Q"),
        charts.rows().mark_point(filled=True, size=55).encode(y, shape),
    ]
    x = charts.sizes("width", "width", summary["config"]["widths"])
    what = "On a level line the rate tuned on the narrow model serves the wide one. Bars are 95 % intervals over seeds."
    spec = charts.spec(*layers, x=x, color=color, tooltip=shown)
    axes = {"y": charts.scales(rates=columns["lr"], padding=15)}
    return Chart("Best learning rate against width", what, spec, columns, axes=axes)
