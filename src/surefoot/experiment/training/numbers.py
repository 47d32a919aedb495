"""The kinds of numbers that settings are, and the base class that checks settings by them. Without torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, final

LAST = "last:"
"""Before the part of the steps whose weights are averaged."""


@final
@dataclass(frozen=True)
class Number:
    """A kind of number: how it is read from text, and which values are allowed.

    Args:
        name: for messages about text that is not a number.
        read: `int` or `float`, or what reads a value that may be another thing.
        condition: what is allowed, for messages, as in "must be at least 1".
        allows: whether a value is allowed.
    """

    name: str
    read: Callable[[str], Any]
    condition: str
    allows: Callable[[Any], bool]


COUNT = Number("count", int, "must be at least 1", lambda value: value >= 1)
NATURAL = Number("natural", int, "must not be negative", lambda value: value >= 0)
POSITIVE = Number("positive", float, "must be a finite number above 0", lambda value: 0 < value < math.inf)
NOT_NEGATIVE = Number("finite", float, "must be finite and not negative", lambda value: 0 <= value < math.inf)
FRACTION = Number("fraction", float, "must lie between 0 and 1", lambda value: 0 <= value <= 1)
LOG2 = Number("exponent", float, "must be the log2 of a rate, between -60 and 60", lambda value: abs(value) <= 60)


def last_part(average: float | str) -> float | None:
    """The part of the steps whose weights an average is of.

    Args:
        average: a setting: a decay, or "last:" and a part of the steps.

    Returns:
        The part; None for a decay.

    Raises:
        ValueError: another text.

    >>> last_part("last:0.2"), last_part(0.99)
    (0.2, None)
    """
    if not isinstance(average, str):
        return None
    if not average.startswith(LAST):
        raise ValueError(f"average={average!r} is neither a decay nor {LAST} and a part of the steps")
    return float(average.removeprefix(LAST))


def _averages(value: float | str) -> bool:
    """Whether a setting is an average."""
    try:
        part = last_part(value)
    except ValueError:
        return False
    return 0 <= float(value) < 1 if part is None else 0 < part <= 1


AVERAGE = Number(
    "average",
    lambda text: text if text.startswith(LAST) else float(text),
    "must be at least 0 and below 1, or last:PART with a part of the steps above 0, at most 1",
    _averages,
)


@dataclass(frozen=True)
class Settings:
    """Base class of settings: their values are checked against the metadata of their fields.

    Raises:
        ValueError: a value that `number` does not allow, or that is not one of `choices`.
    """

    def __post_init__(self) -> None:
        for setting in fields(self):
            value, number = getattr(self, setting.name), setting.metadata.get("number")
            choices = setting.metadata.get("choices", (value,))
            if number is not None and not number.allows(value):
                raise ValueError(f"{setting.name} {number.condition}, got {value}")
            if value not in choices:
                raise ValueError(f"{setting.name}={value!r} is unknown; choose {', '.join(choices)}")

    def _resolve(self, **defaults: Any) -> None:
        """Give the settings that are None these values, which depend on other settings."""
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
