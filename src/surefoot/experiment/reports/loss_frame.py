"""How a sweep's losses are read off and drawn, in the browser as on paper."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.experiment.files import Record
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
