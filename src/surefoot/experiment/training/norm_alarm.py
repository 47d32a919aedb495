"""When a layer's norm leaves its band, or is about to. Plain numbers: nothing here knows of weights."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import linear_regression
from typing import Literal, final

LIMIT = 10.0
"""Where a band without a bound ends, in the role's unit: a decade above Theta(1)."""
WINDOW = 5
"""Looks that a trend is drawn through. In 12 runs of seven methods (width 32, 100 to 1000 steps, a look every 10) 59 of
228 layers left the band; 30 were told of before, half of them 30 steps or more, and one that then stayed at 98 % of
the limit. The same line drawn on to the end of the run was wrong about 31 layers, an exponential in steps about 115."""
ROOM = 1.01  # above a bound, for what float and bfloat16 add to it
BACK = 0.9  # of the limit: a layer is in its band again below this, so that one at the edge does not repeat itself

Reason = Literal["trend", "limit"]
_RANK: dict[Reason | None, int] = {None: 0, "trend": 1, "limit": 2}


@final
@dataclass(frozen=True)
class Layer:
    """Where a layer's norm belongs. Norms are in natural units.

    Args:
        role: its kind.
        unit: what a radius is multiplied by for this role, log V for a head.
        bound: what its stabiliser keeps the norm to; None if nothing does.
        limit: where its band ends: just above the bound (or its start, if that is higher), else where we say.
    """

    role: str
    unit: float
    bound: float | None
    limit: float


@final
@dataclass(frozen=True)
class Alarm:
    """A layer that left its band ("limit"), or that leaves it if it goes on as it does ("trend").

    `norm` is None where it is not finite.
    """

    layer: str
    norm: float | None
    limit: float
    reason: Reason

    def __str__(self) -> str:
        """One line for people.

        >>> print(Alarm("head.weight", 12.345, 10.0, "limit"))
        head.weight: its norm, 12.3, is above its limit, 10
        """
        if self.norm is None:
            return f"{self.layer}: its norm is not finite"
        relation = "is above" if self.reason == "limit" else "is growing past"
        return f"{self.layer}: its norm, {self.norm:.3g}, {relation} its limit, {self.limit:.3g}"


@final
class Alarms:
    """Tells of each layer once when it leaves its band, and again after it was back.

    The trend is a power law in natural time, the sum of learning rates: while norms grow freely they grow with it.
    It is read as far ahead as it reaches back. A layer with a bound has no trend: it is meant to come close.

    Args:
        layers: by name.
        end: natural time at the end of the run.
    """

    def __init__(self, layers: Mapping[str, Layer], end: float) -> None:
        self._layers, self._end = layers, end
        self._start: dict[str, float] = {}
        self._past: dict[str, deque[tuple[float, float]]] = {name: deque(maxlen=WINDOW) for name in layers}
        self._out: dict[str, Reason | None] = dict.fromkeys(layers)

    def look(self, time: float, norms: Mapping[str, float | None]) -> list[Alarm]:
        """The alarms of one look; looks come in the order of time, also those of a run before it was resumed.

        The first one, at time 0, tells where a norm starts: with a bound it may come down from there.
        """
        found = []
        for name, norm in norms.items():
            before = self._out[name]
            value = math.inf if norm is None else norm
            limit = self._limit(name, value)
            if time > 0:  # a power law says nothing of its start
                self._past[name].append((time, value))
            now = self._judge(value, self._ahead(name), limit)
            if _RANK[now] > _RANK[before]:
                found.append(Alarm(name, norm, limit, now or "limit"))
            inside = max(value, self._ahead(name)) <= BACK * limit
            self._out[name] = None if inside else max(now, before, key=_RANK.__getitem__)
        return found

    def _limit(self, name: str, norm: float) -> float:
        layer = self._layers[name]
        if layer.bound is None:
            return layer.limit
        start = self._start.setdefault(name, norm if norm < math.inf else 0.0)
        return max(layer.limit, start * ROOM)

    def _judge(self, norm: float, ahead: float, limit: float) -> Reason | None:
        if not norm <= limit:
            return "limit"
        return "trend" if ahead > limit else None

    def _ahead(self, name: str) -> float:
        past = self._past[name]
        return 0.0 if self._layers[name].bound is not None or len(past) < WINDOW else ahead(past, self._end)


def ahead(past: Sequence[tuple[float, float]], end: float) -> float:
    """The norm as far ahead as `past` reaches back, but not beyond `end`, if it goes on as `time**power`.

    Args:
        past: pairs of time and norm; a norm of 0 or one that is not finite has no trend, and 0 is returned.
        end: the last time that matters.

    >>> round(ahead([(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)], end=10.0), 6)
    5.0
    """
    if not all(0 < norm < math.inf for _, norm in past):
        return 0.0
    (first, _), (last, norm) = past[0], past[-1]
    power = linear_regression(*zip(*((math.log2(t), math.log2(y)) for t, y in past), strict=True)).slope
    octaves = power * math.log2(min(2 * last - first, end) / last)
    return math.exp2(min(math.log2(norm) + octaves, 1000.0))  # in range of a float
