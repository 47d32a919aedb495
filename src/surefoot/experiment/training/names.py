"""The names of the training methods, for the command line, the sweep and their errors. Nothing here imports torch."""

import math

from surefoot.experiment.errors import Respell, with_remedy

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
"""Every method, and a sensible log2 of its learning rate: where a search starts, and `train`'s default."""

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
        raise ValueError(f"{text!r}: {name} takes no value; {', '.join(VALUES)} do, as in moga_row:1.5")
    try:
        return name, float(value)
    except ValueError:
        raise ValueError(f"{text!r}: {value!r} is no number; write it as in moga_row:1.5") from None


def parse_at(text: str) -> tuple[str, float]:
    """A method and the learning rate that it was published with, from the text of the command line.

    Args:
        text: `method@rate`; the method as `parse` reads it.

    Returns:
        `(method, log2 of the rate)`.

    Raises:
        ValueError: no rate, one that is no finite number above 0, or not a method.

    >>> parse_at("moga_row:1.5@0.25")
    ('moga_row:1.5', -2.0)
    """
    method, _, rate = text.partition("@")
    parse(method)
    try:
        value = float(rate)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"{text!r} names no learning rate above 0; write it as in muon@0.02")
    return method, math.log2(value)


def log2_lr(text: str) -> float:
    """The log2 of the learning rate of `LOG2_LR`, that of the name for a method with a value.

    >>> log2_lr("moga_row:1.5")
    -4.0
    """
    return LOG2_LR[parse(text)[0]]
