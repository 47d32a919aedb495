"""Which learning rates to measure: a fixed grid, each recipe's own, or a search that brackets each optimum."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

COARSE_OCTAVES = 1.0  # between the first rates and at each extension
FINE_OCTAVES = 0.5  # sqrt(2): around the optimum
FINEST_OCTAVES = 0.25  # smallest distance between the best rate and a divergence next to it


@dataclass(frozen=True)
class Grid:
    """All of these log2 rates, at every width.

    Args:
        rates: log2 learning rates.

    Raises:
        ValueError: no rate, or one given twice.
    """

    rates: tuple[float, ...]
    expected: ClassVar[int] = 0  # all are known at the start

    def __post_init__(self) -> None:
        check_list("rates", self.rates)

    def next(self, recipe: str, means: Mapping[float, float | None]) -> tuple[float, ...]:
        """The log2 rates to run next for a recipe, given log2 rate -> mean loss (None: diverged) so far; () if done."""
        return () if means else tuple(sorted(self.rates))


@dataclass(frozen=True)
class Own:
    """Each recipe's own log2 rates, at every width.

    Args:
        rates: recipe -> its log2 rates.
    """

    rates: Mapping[str, tuple[float, ...]]
    expected: ClassVar[int] = 0  # all are known at the start

    def next(self, recipe: str, means: Mapping[float, float | None]) -> tuple[float, ...]:
        """The log2 rates to run next for a recipe, given log2 rate -> mean loss (None: diverged) so far; () if done."""
        return () if means else tuple(sorted(self.rates[recipe]))


@dataclass(frozen=True)
class Bracket:
    """A search for the optimum of each width with `next_rates`.

    Args:
        centres: recipe -> log2 rate at the centre of the first rates.
        budget: largest number of rates per width, at least 3.

    Raises:
        ValueError: a budget below 3.
    """

    centres: Mapping[str, float]
    budget: int = 7

    def __post_init__(self) -> None:
        if self.budget < 3:
            raise ValueError(f"a search needs at least 3 rates per width, got {self.budget}")

    def next(self, recipe: str, means: Mapping[float, float | None]) -> tuple[float, ...]:
        """The log2 rates to run next for a recipe, given log2 rate -> mean loss (None: diverged) so far; () if done."""
        return next_rates(means, self.centres[recipe], self.budget)

    @property
    def expected(self) -> int:
        """Expected number of rates per width, for the estimate of the remaining time."""
        return min(self.budget, 6)


@dataclass(frozen=True)
class Exact(Bracket):
    """The search of `Bracket`, which goes on until exactly `budget` rates have been run, whatever it finds.

    Once the optimum is bracketed, the remaining rates lie between those around it, ever closer. Until it is, the search
    goes on beyond the edge.
    """

    def next(self, recipe: str, means: Mapping[float, float | None]) -> tuple[float, ...]:
        """The log2 rates to run next for a recipe, given log2 rate -> mean loss (None: diverged) so far; () if done."""
        if len(means) == self.budget:
            return ()
        wanted = next_rates(means, self.centres[recipe], self.budget) or closer_rates(means)
        return tuple(sorted(wanted[: self.budget - len(means)]))

    @property
    def expected(self) -> int:
        """The number of rates per width."""
        return self.budget


def check_list(name: str, values: tuple[Any, ...], least: int = 1) -> None:
    """Raise ValueError naming the list if it is empty, has fewer values than `least` or contains one twice."""
    if len(values) < least:
        raise ValueError(f"{name} needs {least} values, got {list(values)}" if values else f"{name} is empty")
    if len(set(values)) != len(values):
        raise ValueError(f"{name} names a value twice: {list(values)}")


def next_rates(means: Mapping[float, float | None], centre: float, budget: int) -> tuple[float, ...]:
    """Choose the log2 rates to measure next.

    The first three are an octave apart around `centre`. Then one more octave beyond the best rate follows until the
    best is interior (next to a divergence the distance is halved instead); then rates a factor of sqrt(2) on either
    side of the best, and those an octave away that are missing.

    Args:
        means: log2 rate -> mean loss over seeds so far; None where a run diverged.
        centre: log2 rate at the centre of the first three.
        budget: largest number of rates in all.

    Returns:
        The log2 rates, ascending; empty when the search is done.

    >>> next_rates({}, centre=-4.0, budget=7)
    (-5.0, -4.0, -3.0)
    >>> next_rates({-5.0: 2.0, -4.0: 2.1, -3.0: None}, centre=-4.0, budget=7)
    (-6.0,)
    >>> next_rates({-6.0: 2.2, -5.0: 2.0, -4.0: 2.1, -3.0: None}, centre=-4.0, budget=7)
    (-5.5, -4.5)
    """
    return tuple(sorted(_wanted(means, centre)[: max(0, budget - len(means))]))


def closer_rates(means: Mapping[float, float | None]) -> tuple[float, ...]:
    """Choose the middles of the widest gaps between rates around the best one, at most two: the nearest to it.

    Args:
        means: log2 rate -> mean loss over seeds; None where a run diverged. The best rate is interior.

    Returns:
        The log2 rates, the nearest to the best one first.

    >>> closer_rates({-5.0: 2.2, -4.5: 2.1, -4.0: 2.0, -3.5: 2.1, -3.0: 2.3})
    (-4.25, -3.75)
    """
    best = _best(means)
    assert best is not None, "an interior rate has not diverged"
    gaps = {
        (low + high) / 2: high - low
        for low, high in pairwise(sorted(means))
        if abs((low + high) / 2 - best) <= COARSE_OCTAVES and not (means[low] is None and means[high] is None)
    }
    widest = [middle for middle, gap in gaps.items() if gap == max(gaps.values())]
    return tuple(sorted(widest, key=lambda middle: abs(middle - best))[:2])


def _wanted(means: Mapping[float, float | None], centre: float) -> list[float]:
    if not means:
        return [centre, centre - COARSE_OCTAVES, centre + COARSE_OCTAVES]
    if (best := _best(means)) is None:
        return [min(means) - COARSE_OCTAVES]
    if extension := [rate for side in (-1, 1) if (rate := _beyond(best, means, side)) is not None]:
        return extension
    around = ((best - step, best + step) for step in (FINE_OCTAVES, COARSE_OCTAVES))
    missing = ([rate for rate in pair if all(abs(rate - other) > FINEST_OCTAVES for other in means)] for pair in around)
    return next(filter(None, missing), [])


def _best(means: Mapping[float, float | None]) -> float | None:
    """The rate of the lowest mean; None where all diverged."""
    return min(((mean, rate) for rate, mean in means.items() if mean is not None), default=(None, None))[1]


def _beyond(best: float, means: Mapping[float, float | None], side: int) -> float | None:
    """Return the rate that the best one lacks on one side to be interior there; None if it lacks none."""
    further = {abs(rate - best): mean for rate, mean in means.items() if (rate - best) * side > 0}
    if not further:
        return best + side * COARSE_OCTAVES
    gap = min(further)
    return best + side * gap / 2 if further[gap] is None and gap > FINEST_OCTAVES else None
