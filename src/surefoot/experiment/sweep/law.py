"""Power laws in a size: of the best learning rate, a line in log2; and of the loss, which falls to a floor."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar, nnls

from surefoot.experiment.sweep import fit


class Line(NamedTuple):
    """A power law, `log2 lr = start + power * log2(size)`.

    Args:
        power: the slope.
        start: log2 of the rate at size 1.
    """

    power: float
    start: float

    def at(self, size: float) -> float:
        """Read log2 of the rate off at a size.

        >>> Line(-0.5, 0.0).at(256)
        -4.0
        """
        return self.start + self.power * math.log2(size)


@dataclass(frozen=True)
class Law:
    """The law of the mean optima, and that of each seed alone.

    Its intervals are Student's over the seeds' own lines. They say how far another set of seeds would move the line;
    they do not contain that the law bends between the sizes that were measured and the one that is asked for.

    Args:
        mean: through the optima of the mean losses, of the seeds that every size has.
        by_seed: seed -> through its own optima; of the seeds that every size has.
        rms_octaves: root mean square of the distances of the optima from `mean`, in octaves; None for two sizes, which
            a line always goes through.
    """

    mean: Line
    by_seed: Mapping[int, Line]
    rms_octaves: float | None

    @property
    def power(self) -> fit.Estimate:
        """The slope, with its interval; None below three seeds."""
        powers = [line.power for line in self.by_seed.values()]
        return fit.Estimate(self.mean.power, fit.interval(powers), len(powers))

    def at(self, size: float) -> fit.Estimate:
        """Read log2 of the rate off at a size, measured or not.

        Args:
            size: above 0.

        Returns:
            The mean line's rate, and Student's interval of the seeds' own; None below three seeds.
        """
        own = [line.at(size) for line in self.by_seed.values()]
        return fit.Estimate(self.mean.at(size), fit.interval(own), len(own))


def power_law(optima: Mapping[int, fit.Optimum]) -> Law | None:
    """Fit `log2 lr* = a + b log2(size / smallest size)` by least squares.

    A line is linear in its points, and the mean of the seeds' optima is the optimum (`fit.optimum`): so the mean of the
    seeds' lines is the mean line, and intervals over them are paired over seeds, as those of `fit.drift` are.

    Args:
        optima: size -> the optimum there.

    Returns:
        The law; None for fewer than two sizes, or where an optimum is not interior.

    >>> def at(vertex):
    ...     return fit.Optimum("interior", vertex, None, {0: vertex}, None, None)
    >>> law = power_law({100: at(-3.0), 200: at(-3.25), 400: at(-3.5)})
    >>> round(law.power.value, 6), round(law.at(1600).value, 6), law.rms_octaves < 1e-9
    (-0.25, -4.0, True)
    """
    means = {size: optimum.log2_lr for size, optimum in optima.items() if optimum.log2_lr is not None}
    if len(optima) < 2 or len(means) < len(optima):
        return None
    each = [set(optimum.by_seed) for optimum in optima.values()]
    if (seeds := set.intersection(*each)) and seeds != set.union(*each):  # or line and interval are of other seeds
        means = {size: sum(optima[size].by_seed[seed] for seed in seeds) / len(seeds) for size in optima}
    mean = _line(means)
    by_seed = {seed: _line({size: optimum.by_seed[seed] for size, optimum in optima.items()}) for seed in sorted(seeds)}
    squares = [(rate - mean.at(size)) ** 2 for size, rate in means.items()]
    return Law(mean, by_seed, math.sqrt(sum(squares) / len(squares)) if len(squares) > 2 else None)


def _line(rates: Mapping[int, float]) -> Line:
    """The least-squares line through log2 rates, by size."""
    return Line(*np.polyfit([math.log2(size) for size in rates], [*rates.values()], 1).tolist())


POWERS = (0.01, 2.0)
"""The range in which the power of a loss is searched for."""


@dataclass(frozen=True)
class Floored:
    """A power law with a floor, `loss = floor + excess * (size / largest)^-power`, by least squares through all runs.

    Args:
        floor: that no size goes below, 0 or more.
        excess: loss above the floor at the largest size that was measured.
        power: exponent of the fall.
        largest: the largest size that was measured.
        freedom: runs beyond the numbers that were fitted, the degrees of freedom of the scatter.
        variance: of a run around the curve; None without freedom.
        covariance: of floor, excess and power for runs of variance 1.
    """

    floor: float
    excess: float
    power: float
    largest: float
    freedom: int
    variance: float | None
    covariance: np.ndarray

    def at(self, size: float) -> tuple[float, float | None]:
        """Read the loss off at a size, measured or not.

        Args:
            size: above 0.

        Returns:
            The loss, and half of the interval that contains a run there, from the covariance of the fit and the scatter
            of the runs (Student's t). None where there are but three runs, through which the curve always goes.
        """
        x = math.log(size / self.largest)
        fall = math.exp(-self.power * x)
        value = self.floor + self.excess * fall
        if self.variance is None:
            return value, None
        slopes = np.array([1.0, fall, -self.excess * x * fall])
        error = math.sqrt(self.variance * (float(slopes @ self.covariance @ slopes) + 1))
        return value, fit.student(self.freedom) * error


@dataclass(frozen=True)
class Between:
    """The middle of two power laws, with a fitted floor and without: few sizes do not tell which of them holds.

    On held-out ladders (docs/log.md) the loss lay between the two where they differed, about as far from either.

    Args:
        floored: the upper curve beyond what was measured.
        free: the lower one.
    """

    floored: Floored
    free: Floored

    def at(self, size: float) -> fit.Estimate:
        """Read the loss off at a size, measured or not.

        Args:
            size: above 0.

        Returns:
            The middle of both, and the interval from the lower end of one's to the upper end of the other's. None where
            there are but three runs.
        """
        (upper, above), (lower, below) = self.floored.at(size), self.free.at(size)
        middle = (upper + lower) / 2
        if above is None or below is None:
            return fit.Estimate(middle, None, 1)
        return fit.Estimate(middle, (min(lower - below, upper - above), max(lower + below, upper + above)), 1)


def between(sizes: Sequence[float], losses: Sequence[float]) -> Between | None:
    """Fit a power law with a floor, and one without.

    Args:
        sizes: of each run, three different ones at least.
        losses: of each run.

    Returns:
        Both; None where the loss does not fall with the size.

    >>> law = between([1, 10, 100, 1000], [2 + size**-0.5 for size in (1, 10, 100, 1000)])
    >>> round(law.floored.floor, 3), round(law.floored.power, 3), law.free.floor
    (2.0, 0.5, 0.0)
    """
    floored, free = (_fitted(sizes, losses, floor) for floor in (1.0, 0.0))
    return Between(floored, free) if floored and free else None


def _fitted(sizes: Sequence[float], losses: Sequence[float], floor: float) -> Floored | None:
    assert len({*sizes}) >= 3, "three numbers need three sizes"
    x, y = np.log(np.array(sizes) / max(sizes)), np.array(losses)

    def columns(power: float) -> np.ndarray:
        return np.stack([np.full_like(x, floor), np.exp(-power * x)], axis=1)

    # At a given power floor and excess are linear: one number is searched for, and the search has no start.
    found = minimize_scalar(lambda power: nnls(columns(power), y)[1], bounds=POWERS, method="bounded")
    (level, excess), rest = nnls(columns(found.x), y)
    if excess <= 0:
        return None
    slopes = np.column_stack([columns(found.x), -excess * x * np.exp(-found.x * x)])
    freedom = len(y) - 2 - int(floor)
    variance = float(rest**2 / freedom) if freedom else None
    inverse = np.linalg.pinv(slopes.T @ slopes)
    return Floored(float(floor * level), float(excess), float(found.x), max(sizes), freedom, variance, inverse)
