"""Alarms for norms that leave their band, or are about to; computed from plain numbers, without weights."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import linear_regression
from typing import Literal

LIMIT = 10.0
"""Upper end of the band of a layer without a bound, in the role's unit: a decade above Theta(1)."""
WINDOW = 5
"""Number of measurements that a trend is fitted to.

In 12 runs of seven methods (width 32, 100 to 1000 steps, a measurement every 10) 59 of 228 layers left the band. The
trend predicted 30 of these, half of them 30 steps or more ahead, and one layer that then stayed at 98 % of the limit.
The same fit extrapolated to the end of the run was wrong about 31 layers, an exponential in steps about 115.
"""
MARGIN = 1.01  # factor above a bound, for the rounding of float32 and bfloat16
HYSTERESIS = 0.9  # share of the limit below which a layer is in its band again; at the edge it would alarm repeatedly

Reason = Literal["trend", "limit"]
_RANK: dict[Reason | None, int] = {None: 0, "trend": 1, "limit": 2}


@dataclass(frozen=True)
class Layer:
    """The band of a layer's norm, in natural units.

    Args:
        role: name of the layer's role.
        unit: factor on a radius for this role, log V for a head.
        bound: upper bound that the stabiliser enforces; None if there is none.
        limit: upper end of the band: `MARGIN` times the bound, else a fixed multiple of the unit. The norm that a
            layer with a bound starts at raises it.
    """

    role: str
    unit: float
    bound: float | None
    limit: float


@dataclass(frozen=True)
class Alarm:
    """A layer whose norm is above its limit ("limit"), or is predicted to exceed it ("trend").

    Args:
        layer: the parameter's name.
        norm: in natural units; None where it is not finite.
        limit: the upper end of the layer's band.
        reason: "limit" or "trend".
    """

    layer: str
    norm: float | None
    limit: float
    reason: Reason

    def __str__(self) -> str:
        """Return the alarm as a sentence.

        >>> print(Alarm("head.weight", 12.345, 10.0, "limit"))
        head.weight: its norm, 12.3, is above its limit, 10
        """
        if self.norm is None:
            return f"{self.layer}: its norm is not finite"
        relation = "is above" if self.reason == "limit" else "is growing past"
        return f"{self.layer}: its norm, {self.norm:.3g}, {relation} its limit, {self.limit:.3g}"


class Alarms:
    """Raises one alarm per layer that leaves its band, and another if it returns and leaves it again.

    The trend is a power law in natural time, the sum of learning rates, because norms without a bound grow with it.
    It is extrapolated over as long a time as it was fitted to. For a layer with a bound there is no trend: its norm is
    expected to approach the bound.

    Args:
        layers: bands by layer name.
        end: natural time at the end of the run.
    """

    def __init__(self, layers: Mapping[str, Layer], end: float) -> None:
        self._layers, self._end = layers, end
        self._start: dict[str, float] = {}
        self._past: dict[str, deque[tuple[float, float]]] = {name: deque(maxlen=WINDOW) for name in layers}
        self._raised: dict[str, Reason | None] = dict.fromkeys(layers)

    def update(self, time: float, norms: Mapping[str, float | None]) -> list[Alarm]:
        """Add one measurement of all norms and return the new alarms.

        Args:
            time: natural time of the measurement, ascending from call to call; a resumed run repeats the measurements
                from before. The norm at time 0 is a layer's start, from which one with a bound may still come down.
            norms: layer name -> norm in natural units, None where it is not finite.

        Returns:
            The alarms that this measurement raises.
        """
        alarms = []
        for name, norm in norms.items():
            before = self._raised[name]
            value = math.inf if norm is None else norm
            limit = self._limit(name, value)
            if time > 0:  # the fit takes logarithms of times
                self._past[name].append((time, value))
            past, free = self._past[name], self._layers[name].bound is None
            predicted = extrapolate(past, self._end) if free and len(past) == WINDOW else 0.0
            now: Reason | None = "limit" if not value <= limit else "trend" if predicted > limit else None
            if _RANK[now] > _RANK[before]:
                alarms.append(Alarm(name, norm, limit, now or "limit"))
            inside = max(value, predicted) <= HYSTERESIS * limit
            self._raised[name] = None if inside else max(now, before, key=_RANK.__getitem__)
        return alarms

    def _limit(self, name: str, norm: float) -> float:
        layer = self._layers[name]
        if layer.bound is None:
            return layer.limit
        start = self._start.setdefault(name, norm if norm < math.inf else 0.0)
        return max(layer.limit, start * MARGIN)


def extrapolate(past: Sequence[tuple[float, float]], end: float) -> float:
    """Fit `norm ~ time**power` and extrapolate it over as long a time as was measured, but not beyond `end`.

    Args:
        past: pairs of time and norm.
        end: the last time to extrapolate to.

    Returns:
        The predicted norm; 0 if a norm is 0 or not finite, the last one where all times are equal.

    >>> round(extrapolate([(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)], end=10.0), 6)
    5.0
    """
    if not all(0 < norm < math.inf for _, norm in past):
        return 0.0
    (first, _), (last, norm) = past[0], past[-1]
    if math.log2(first) == math.log2(last):  # the rate is so small that time stands still
        return norm
    power = linear_regression(*zip(*((math.log2(t), math.log2(y)) for t, y in past), strict=True)).slope
    octaves = power * math.log2(min(2 * last - first, end) / last)
    return math.exp2(min(math.log2(norm) + octaves, 1000.0))  # the range of a float
