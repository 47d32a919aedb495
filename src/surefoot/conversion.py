"""Learning rate and weight decay of one matrix, converted between the published conventions."""

import math
from collections.abc import Collection
from dataclasses import dataclass

from surefoot.scaling import Keller, Moonlight, Natural, Scale

_SCALES: dict[str, Scale] = {"natural": Natural(), "keller": Keller()}
_SCALES |= dict.fromkeys(("moonlight", "adamw", "mup"), Moonlight())

CONVENTIONS = tuple(_SCALES)
"""natural: steps of norm lr, decay by `lr rate`. keller, moonlight: Muon's published scales, decay by `lr wd`. adamw:
an AdamW rate, which Moonlight's scale reuses. mup: the AdamW rate of the same matrix in the base model, with fan-in
base_d_in; AdamW's here is `lr base_d_in / d_in`."""


@dataclass(frozen=True)
class Setting:
    """A learning rate and a weight decay in one convention.

    Args:
        lr: learning rate, positive.
        weight_decay: decay per step is `lr * weight_decay`; 0 is none.

    Raises:
        ValueError: a learning rate that is not positive and finite, a weight decay that is negative or not finite.

    >>> Setting(lr=3e-4, weight_decay=0.1)
    Setting(lr=0.0003, weight_decay=0.1)
    """

    lr: float
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError(f"a learning rate must be positive and finite, not {self.lr}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"a weight decay must be finite and not negative, not {self.weight_decay}")


SETTINGS = frozenset({"weight_decay", "betas", "momentum", "eps", "nesterov"})
"""Entries in other optimizers' parameter groups."""


def refuse_settings(given: Collection[str]) -> None:
    """Raise TypeError for settings of other optimizers, of a plan or of a run, and say where they belong here."""
    if lengths := sorted({*given} & {"steps", "tokens"}):
        raise TypeError(f"SteepestDescent takes no {', '.join(lengths)}: a run's length is run=Run(steps, tokens)")
    if planned := sorted({*given} & {"recipe", "stabiliser", "overrides", "head", "tied", "inputs"}):
        remedy = f"pass it to the plan, SteepestDescent(model, Plan.of(model, {planned[0]}=...))"
        raise TypeError(f"SteepestDescent takes no {', '.join(planned)}: {remedy}")
    if others := sorted({*given} - SETTINGS):
        raise TypeError(f"SteepestDescent takes no {', '.join(others)}: leave it out, steps are always batched")
    if given:
        decay = "follows from run=Run(steps, tokens) or is a stabiliser, Plan.of(model, stabiliser=WeightDecay(rate))"
        remedy = f"decay {decay}; momentum is the recipe's, Plan.of(model, recipe)"
        raise TypeError(f"SteepestDescent takes no {', '.join(sorted(given))}: {remedy}")


def convert(setting: Setting, source: str, target: str, d_in: int, d_out: int, base_d_in: int | None = None) -> Setting:
    """Convert a setting for a `(d_out, d_in)` matrix so that its steps and its decay stay the same.

    In each convention the step is `lr s(d_in, d_out) sqrt(d_out/d_in) msign(G)` and the decay `lr wd`, so the natural
    rate is `lr s` and the natural decay `wd / s`; the decay bounds the norm by `s / wd` where `lr wd` is at most 1.

    Args:
        setting: learning rate and weight decay in the source convention.
        source: convention of `setting`, one of `CONVENTIONS`.
        target: convention of the result, one of `CONVENTIONS`.
        d_in: fan-in of the matrix, at least 1.
        d_out: fan-out of the matrix, at least 1.
        base_d_in: fan-in of the same matrix in muP's base model, where its rates are AdamW's; for "mup".

    Returns:
        Learning rate and weight decay in the target convention.

    Raises:
        ValueError: an unknown convention, a size below 1, muP without base_d_in.

    >>> convert(Setting(0.02, 0.1), "keller", "natural", d_in=768, d_out=3072)
    Setting(lr=0.02, weight_decay=0.1)
    >>> convert(Setting(0.02, 0.1), "keller", "natural", d_in=3072, d_out=768)
    Setting(lr=0.04, weight_decay=0.05)
    >>> convert(Setting(1e-3), "mup", "adamw", d_in=1024, d_out=256, base_d_in=256).lr  # an output projection, 4x wide
    0.00025
    """
    sizes = {"d_in": d_in, "d_out": d_out, "base_d_in": base_d_in}
    if wrong := [name for name, size in sizes.items() if size is not None and size < 1]:
        raise ValueError(f"{wrong[0]} must be at least 1, not {sizes[wrong[0]]}")
    ratio = _factor(source, d_in, d_out, base_d_in) / _factor(target, d_in, d_out, base_d_in)
    return Setting(setting.lr * ratio, setting.weight_decay / ratio)


def table(setting: Setting, source: str, d_in: int, d_out: int, base_d_in: int | None = None) -> dict[str, Setting]:
    """Convert a setting to every convention; to muP's only with base_d_in.

    Args:
        setting: learning rate and weight decay in the source convention.
        source: convention of `setting`, one of `CONVENTIONS`.
        d_in: fan-in of the matrix, at least 1.
        d_out: fan-out of the matrix, at least 1.
        base_d_in: fan-in of the same matrix in muP's base model, where its rates are AdamW's; for "mup".

    Returns:
        Convention -> setting, in the order of `CONVENTIONS`.

    Raises:
        ValueError: as `convert`.

    >>> round(table(Setting(0.02), "keller", d_in=100, d_out=100)["moonlight"].lr, 6)
    0.01
    """
    targets = CONVENTIONS if base_d_in else [name for name in CONVENTIONS if name != "mup"]
    return {name: convert(setting, source, name, d_in, d_out, base_d_in) for name in targets}


def _factor(convention: str, d_in: int, d_out: int, base_d_in: int | None) -> float:
    """`s(d_in, d_out)`: natural learning rate divided by that of the convention."""
    if convention not in CONVENTIONS:
        raise ValueError(f"unknown convention {convention!r}; choose one of {', '.join(CONVENTIONS)}")
    factor = _SCALES[convention]((d_out, d_in))
    if convention != "mup":
        return factor
    if base_d_in is None:
        raise ValueError("muP's rates depend on the matrix's fan-in in the base model: give base_d_in")
    return factor * base_d_in / d_in
