"""The best learning rate of one width: its estimate, the loss from missing it, and their confidence intervals.

A curve is the validation loss against `x = log2(lr)`. Its optimum is the vertex of a parabola through the rates around
the lowest mean loss. Runs of one width share their rates over all seeds, so every comparison is paired: a difference is
taken within a seed first and averaged afterwards.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import stdtrit

# A parabola is local: a curve steepens on its right long before it diverges. On curves with a cubic
# right flank 1.25 octaves (five rates at sqrt(2) spacing) were biased by .06 to .16 octave where 1.5
# gave .08 to .21, and scattered half as much with the place of the rates; 0.75 doubles the noise.
WINDOW_OCTAVES = 1.25
# Within the window the loss may rise twice as fast as the steepest parabola that the neighbours allow;
# above that a rate is on the way to divergence, and would shift the vertex.
WALL = 2.0
# With two seeds Student's t interval spans 12.7 standard errors on either side: no information.
SEEDS_FOR_AN_INTERVAL = 3
CONFIDENCE = 0.95

Interval = tuple[float, float] | None


@dataclass(frozen=True)
class Point:
    """One finished run.

    Args:
        log2_lr: log2 of its learning rate.
        seed: its seed.
        loss: its loss in nats; None if it diverged.
    """

    log2_lr: float
    seed: int
    loss: float | None


@dataclass(frozen=True)
class Estimate:
    """A mean over paired seeds.

    Args:
        value: the mean; None if there is none.
        interval: Student's interval of the mean; None below three seeds.
        seeds: number of seeds.
    """

    value: float | None
    interval: Interval
    seeds: int

    def named(self, name: str) -> dict[str, Any]:
        """The mean and its interval as a summary has them, by this name and with "_ci" after it."""
        return {name: self.value, f"{name}_ci": self.interval}


UNKNOWN = Estimate(None, None, 0)


@dataclass(frozen=True)
class Optimum:
    """The fitted optimum of one curve.

    Args:
        status: "interior", or why there is no vertex: "low edge", "high edge", "next to divergence", "no minimum", "no
            result".
        log2_lr: the vertex in log2 of the learning rate; None unless interior.
        interval: its interval over seeds; None below three.
        by_seed: seed -> the seed's own vertex in log2 of the learning rate.
        best_loss: the lowest mean loss over seeds that was measured, in nats.
        best_rate: the log2 rate at which it was measured.
    """

    status: str
    log2_lr: float | None
    interval: Interval
    by_seed: Mapping[int, float]
    best_loss: float | None
    best_rate: float | None

    @property
    def interior(self) -> bool:
        """Whether rates on both sides of the best one were measured and are worse."""
        return self.status == "interior"


def student(freedom: int) -> float:
    """Standard errors between the middle of Student's interval and each of its ends."""
    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))


def interval(values: Sequence[float]) -> Interval:
    """Compute Student's interval of a mean, `mean +- t * s / sqrt(n)`.

    Args:
        values: independent values.

    Returns:
        `(low, high)`; None below three values.

    >>> low, high = interval([1.0, 2.0, 3.0])
    >>> round(low, 3), round(high, 3)
    (-0.484, 4.484)
    >>> interval([1.0, 2.0]) is None
    True
    """
    n = len(values)
    if n < SEEDS_FOR_AN_INTERVAL:
        return None
    half = student(n - 1) * float(np.std(values, ddof=1)) / math.sqrt(n)
    middle = float(np.mean(values))
    return middle - half, middle + half


def curve(points: Iterable[Point]) -> dict[float, dict[int, float] | None]:
    """Group losses by rate and seed.

    A rate at which any seed diverged (loss None, NaN or infinite) maps to None, because the mean over the other seeds
    would be too optimistic.

    Args:
        points: finished runs.

    Returns:
        log2 rate -> seed -> loss, rates ascending; only rates that every seed has run.
    """
    table: dict[float, dict[int, float]] = {}
    for point in points:
        table.setdefault(point.log2_lr, {})[point.seed] = math.nan if point.loss is None else point.loss
    seeds = {seed for losses in table.values() for seed in losses}
    return {
        rate: dict(sorted(losses.items())) if all(map(math.isfinite, losses.values())) else None
        for rate, losses in sorted(table.items())
        if losses.keys() == seeds
    }


def mean_curve(points: Iterable[Point]) -> dict[float, float | None]:
    """Average losses over seeds: log2 rate -> mean loss, rates ascending; None where a seed diverged."""
    return {rate: None if row is None else float(np.mean([*row.values()])) for rate, row in curve(points).items()}


def optimum(points: Iterable[Point]) -> Optimum:
    """Fit the vertex of the local parabola in log2 lr, with a paired interval over seeds.

    With `q` the parabola of the mean losses and `q_s` that of seed s, both by least squares over the same rates, the
    optimum is `v = argmin q` and the seed's own is one Newton step from it, `v_s = v - q_s'(v) / q''`. The mean of the
    `v_s` is `v` exactly, and a seed whose own parabola is nearly flat has no vertex far away.

    Args:
        points: finished runs of one recipe at one width.

    Returns:
        The optimum, or why there is none.

    >>> rates = (-6.0, -5.0, -4.0, -3.0)
    >>> best = optimum(Point(x, 0, 2.0 + 0.1 * (x + 4.7) ** 2) for x in rates)
    >>> round(best.log2_lr, 6), best.best_rate, best.status
    (-4.7, -5.0, 'interior')
    """
    points = list(points)
    losses, means = curve(points), mean_curve(points)
    finite = {rate: mean for rate, mean in means.items() if mean is not None}
    if not finite:
        return Optimum("no result", None, None, {}, None, None)
    best = min(finite, key=lambda rate: finite[rate])
    found = Optimum(_edge([*means], [*means.values()], best), None, None, {}, finite[best], best)
    if not found.interior:
        return found
    rates = basin(finite, best)
    x, rows = np.array(rates) - best, [losses[rate] or {} for rate in rates]
    per_seed = [[row[seed] for row in rows] for seed in rows[0]]
    a, b, _ = np.polyfit(x, np.mean(per_seed, axis=0), 2)
    vertex = float(-b / (2 * a)) if a > 0 else math.inf
    if not x[0] <= vertex <= x[-1]:
        return replace(found, status="no minimum")
    slopes = [2 * p[0] * vertex + p[1] for p in (np.polyfit(x, y, 2) for y in per_seed)]
    own = [best + vertex - float(slope / (2 * a)) for slope in slopes]
    return replace(found, log2_lr=best + vertex, interval=interval(own), by_seed=dict(zip(rows[0], own, strict=True)))


def _edge(rates: Sequence[float], means: Sequence[float | None], best: float) -> str:
    if best in (rates[0], rates[-1]):
        return "low edge" if best == rates[0] else "high edge"
    place = rates.index(best)
    return "next to divergence" if None in means[place - 1 : place + 2] else "interior"


def basin(means: Mapping[float, float], best: float) -> tuple[float, ...]:
    """Select the rates for the fit of a parabola around an interior best rate.

    These are the two neighbours, and the rates within the window whose loss is not far above any such parabola: with
    neighbours at most `h` away and at most `e` worse, a parabola with its vertex within h/2 of the best rate rises by
    at most `e * ((d + h/2) / h)**2` at distance d.

    Args:
        means: log2 rate -> mean loss.
        best: the log2 rate of the lowest.

    Returns:
        The log2 rates, ascending.
    """
    rates = sorted(means)
    place = rates.index(best)
    beside = (rates[place - 1], rates[place + 1])
    h = max(abs(rate - best) for rate in beside)
    e = max(means[rate] for rate in beside) - means[best]

    def usable(rate: float) -> bool:
        d = abs(rate - best)
        return d <= WINDOW_OCTAVES and means[rate] - means[best] <= WALL * e * ((d + h / 2) / h) ** 2

    return tuple(rate for rate in rates if rate in beside or usable(rate))


def drift(narrow: Optimum, wide: Optimum) -> Estimate:
    """Compute how far the optimum moves, `lr*(wide) - lr*(narrow)` in octaves, paired over seeds.

    Args:
        narrow: the optimum at the narrowest width.
        wide: the optimum at the widest.

    Returns:
        The move and its interval; a value of None if either optimum is not interior.
    """
    if narrow.log2_lr is None or wide.log2_lr is None:
        return UNKNOWN
    paired, same = difference(wide.by_seed, narrow.by_seed), wide.by_seed.keys() == narrow.by_seed.keys()
    return replace(paired, value=wide.log2_lr - narrow.log2_lr) if same or paired.value is None else paired


def regret(points: Iterable[Point], rate: float) -> Estimate:
    """Compute the cost of a transferred rate: its loss minus the lowest one measured at that width, in nats.

    Both are means over the same seeds, so the value is never negative.

    Args:
        points: finished runs of one recipe at one width.
        rate: the transferred log2 rate.

    Returns:
        The difference and its interval; a value of None where a run at this rate diverged or is missing.

    >>> regret([Point(-4.0, 0, 2.0), Point(-3.0, 0, 2.25)], rate=-3.0).value
    0.25
    """
    points = list(points)
    here = curve(points).get(rate)
    return UNKNOWN if here is None else difference(here, lowest(points))


def lowest(points: Iterable[Point]) -> dict[int, float]:
    """Return seed -> loss at the rate whose mean over seeds is the lowest; empty if every rate diverged."""
    rows = [row for row in curve(points).values() if row is not None]
    return min(rows, key=lambda row: float(np.mean(list(row.values()))), default={})


def difference(losses: Mapping[int, float], others: Mapping[int, float]) -> Estimate:
    """Average `losses - others` over the seeds that both have.

    Args:
        losses: seed -> loss.
        others: seed -> loss to compare with.

    Returns:
        The mean and its interval; a value of None without a common seed.

    >>> difference({0: 2.0, 1: 2.5}, {0: 1.5, 1: 1.5}).value
    0.75
    """
    values = [loss - others[seed] for seed, loss in losses.items() if seed in others]
    return Estimate(float(np.mean(values)), interval(values), len(values)) if values else UNKNOWN


def mean(losses: Mapping[int, float]) -> Estimate:
    """Average losses by seed; a value of None without a seed."""
    return difference(losses, dict.fromkeys(losses, 0.0))
