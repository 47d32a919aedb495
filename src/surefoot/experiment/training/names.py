"""What settings may be: names of methods, kinds of numbers, and the base class that checks them; without torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from surefoot.experiment.errors import Respell, with_remedy
from surefoot.scaling import LAWS, Run

LOG2_LR = {
    "steady": -3.25,
    "steady_bounded": -3.25,
    "steady_soap": -3.5,
    "beyond_mup": -4.0,
    "moga_row": -4.0,
    "moga_column": -4.0,
    "muon": -2.0,
    "moonlight": -6.0,
    "moonlight_tuned": -4.0,
    "scion": -11.0,
    "lion": -7.0,
    "sign_sgd": -7.0,
    "sign_natural": -4.0,
    "hyperball": -3.0,
    "wion": -4.0,
    "normalised_sgd": -8.0,
    "signum": -8.0,
    "scale": -9.0,
    "mano": -6.0,
    "rmnp": -5.0,
    "normuon": -6.0,
    "muon_squared": -6.0,
    "shampoo_muon": -6.0,
    "frobenius_sphere": -3.0,
    "adamw": -6.0,
    "mup_adamw": -6.0,
}
"""Every method, and a sensible log2 of its learning rate, for those that have no law of `surefoot.scaling`."""

METHODS = tuple(LOG2_LR)
BASELINES = ("adamw", "mup_adamw")
"""Methods that run torch's own optimizer; the others are recipes."""
RECIPES = tuple(name for name in METHODS if name not in BASELINES)

VALUES = ("moga_row", "moga_column", "wion")
"""Recipes whose first argument, a number, may follow the name, as in `moga_row:1.5`."""


def parse(text: str, names: tuple[str, ...] = METHODS) -> tuple[str, float | None]:
    """A method's name and its value, from the text of the command line and of run directories.

    Args:
        text: a name, or `name:value` for one of `VALUES`.
        names: the names to choose from.

    Returns:
        `(name, value)`; the value is None where there is none.

    Raises:
        ValueError: an unknown name, a value for a method that takes none, or a value that is no number.

    >>> parse("moga_row:1.5"), parse("lion")
    (('moga_row', 1.5), ('lion', None))
    """
    name, colon, value = text.partition(":")
    if name not in names:
        error = ValueError(f"unknown method {name!r}; choose one of {', '.join(names)}")
        raise with_remedy(error, Respell(name, names))
    if not colon:
        return name, None
    if name not in VALUES:
        raise ValueError(f"{text!r}: {name} takes no value; {', '.join(VALUES)} do, like moga_row:1.5")
    try:
        return name, float(value)
    except ValueError:
        raise ValueError(f"{text!r}: {value!r} is not a number; write it like moga_row:1.5") from None


def parse_at(text: str) -> tuple[str, float]:
    """A method and the learning rate that it was published with, from the text of the command line.

    Args:
        text: `method@rate`; the method as `parse` reads it.

    Returns:
        `(method, log2 of the rate)`.

    Raises:
        ValueError: no rate, one that is not above 0 or above 2**120, or not a method.

    >>> parse_at("moga_row:1.5@0.25")
    ('moga_row:1.5', -2.0)
    """
    method, _, rate = text.partition("@")
    parse(method)
    try:
        value = float(rate)
    except ValueError:
        value = 0.0
    if not 0 < value <= 2.0**120:
        raise ValueError(f"{text!r} lacks a learning rate above 0, at most 2**120; write it like muon@0.02")
    return method, math.log2(value)


AUTO = "auto"
"""The learning rate that the length of a run gives."""


def log2_lr(text: str, run: Run) -> float:
    """The log2 of a method's learning rate in a run: by its law, else that of `LOG2_LR`.

    >>> log2_lr("moga_row:1.5", Run(150, 1024)), round(log2_lr("steady", Run(150, 1024)), 2)
    (-4.0, -3.2)
    """
    name = parse(text)[0]
    return math.log2(LAWS[name](run)) if name in LAWS else LOG2_LR[name]


def centre(text: str, run: Run) -> float:
    """`log2_lr` to a quarter of an octave: where a search starts."""
    return round(4 * log2_lr(text, run)) / 4


LAST = "last:"
"""Prefix of the part of the steps whose weights are averaged."""


@dataclass(frozen=True)
class Number:
    """A kind of number: how it is read from text, and which values are allowed.

    Args:
        name: for messages about text that is not a number.
        read: `int` or `float`, or a function for values that may be something else.
        condition: what is allowed, for messages, as in "must be at least 1".
        allows: whether a value is allowed.
    """

    name: str
    read: Callable[[str], Any]
    condition: str
    allows: Callable[[Any], bool]


COUNT = Number("count", int, "must be at least 1 and below 2**40", lambda value: 0 < value < 2**40)
NATURAL = Number("natural", int, "must not be negative", lambda value: value >= 0)
SEED = Number("seed", int, "must lie between 0 and 2**64 - 1", lambda value: 0 <= value < 2**64)
POSITIVE = Number("positive", float, "must be a finite number above 0", lambda value: 0 < value < math.inf)
FRACTION = Number("fraction", float, "must lie between 0 and 1", lambda value: 0 <= value <= 1)
LOG2 = Number("exponent", float, "must be the log2 of a rate, between -60 and 60", lambda value: abs(value) <= 60)


def last_part(average: float | str) -> float | None:
    """The part of the steps whose weights an average is of.

    Args:
        average: a setting: a decay, or "last:" and a part of the steps.

    Returns:
        The part; None for a decay.

    Raises:
        ValueError: a text without a number.

    >>> last_part("last:0.2"), last_part(0.99)
    (0.2, None)
    """
    return float(average.removeprefix(LAST)) if isinstance(average, str) else None


def _averages(value: float | str) -> bool:
    """Whether a setting is a valid average."""
    try:
        part = last_part(value)
    except ValueError:
        return False
    return 0 <= float(value) < 1 if part is None else str(value).startswith(LAST) and 0 < part <= 1


RATE = Number(  # a command reads it by `cli.options.rate`, which wants more than 0
    "rate", float, "must lie between 0 and 2**120, or be auto", lambda value: value == AUTO or 0 <= value <= 2.0**120
)

AVERAGE = Number(
    "average",
    lambda text: text if text.startswith(LAST) else float(text),
    "must be at least 0 and below 1, or last:PART with a part of the steps above 0, at most 1",
    _averages,
)


def setting(default: Any, help: str, number: Number | None = None, **option: Any) -> Any:
    """Declare a setting.

    Args:
        default: its value where none is given.
        help: of its option.
        number: the values that are allowed; None for a setting that is no number.
        **option: `flag`, where it is not the field's name; others as argparse takes them.

    Returns:
        The field.
    """
    return field(default=default, metadata={"help": help, "number": number, **option})


@dataclass(frozen=True)
class Settings:
    """Base class of settings: their values are checked against the metadata of their fields.

    Raises:
        ValueError: a value that `number` does not allow, or that is not one of `choices`.
    """

    def __post_init__(self) -> None:
        for each in fields(self):
            value, number = getattr(self, each.name), each.metadata.get("number")
            choices = each.metadata.get("choices", (value,))
            if number is not None and not number.allows(value):
                raise ValueError(f"{each.name} {number.condition}, got {value}")
            if value not in choices:
                raise ValueError(f"{each.name}={value!r} is unknown; choose {', '.join(choices)}")
