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


def shared_axes(summary: Mapping[str, Any], records: Sequence[Record]) -> SharedAxes:
    """Find the axes that hold every curve of a sweep near its best rate.

    Args:
        summary: the content of `summary.json`.
        records: the finished runs.

    Returns:
        The axes.

    Raises:
        ValueError: no run has finished without diverging.
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
        raise ValueError("no run of this sweep has finished without diverging: nothing to draw")
    room = max(highs) - min(lows) or 0.1
    return SharedAxes(
        min(lows) - 0.06 * room, max(highs) + (0.05 + 1.5 * CROSS_ROW * rows) * room, max(max(spans), 2.0) + 0.8
    )


def _best(means: Mapping[float, float | None]) -> float:
    return min(means, key=lambda x: float("inf") if means[x] is None else float(means[x] or 0), default=0.0)


def missed(points: Iterable[fit.Point], rate: float) -> float | None:
    """Estimate the cost of any rate: its loss, on the line between the nearest two measured, minus the lowest measured.

    Args:
        points: finished runs of one recipe at one width.
        rate: a log2 rate.

    Returns:
        Nats; inf next to a rate that diverged, None where rates were not measured on both sides.

    >>> losses = {-5.0: 2.5, -4.0: 2.0, -3.0: 2.25, -2.0: None}
    >>> curve = [fit.Point(rate, 0, loss) for rate, loss in losses.items()]
    >>> missed(curve, -3.5), missed(curve, -2.5), missed(curve, -5.5)
    (0.125, inf, None)
    """
    means = fit.mean_curve(points)
    below = max((x for x in means if x <= rate + ROUNDING), default=None)
    above = min((x for x in means if x >= rate - ROUNDING), default=None)
    if below is None or above is None:
        return None
    heights = [math.inf if means[x] is None else float(means[x] or 0) for x in (below, above)]
    if math.inf in heights:
        return math.inf
    share = (rate - below) / (above - below) if above > below else 0.0
    return heights[0] + share * (heights[1] - heights[0]) - min(mean for mean in means.values() if mean is not None)
