"""`HorizonRule`: decay by the length of the run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from surefoot.roles import Role
from surefoot.stabilise import Decay, DecoupledWeightDecay


@dataclass(frozen=True)
class HorizonRule:
    """Decay times `base / steps`, at most 1: in longer runs weights remember the same part of the run.

    Under decay at a rate r in units of lr, a weight is a mean of its steps over the last `1 / (lr r)`. The memory that
    is best is a part of the run, as long as the run is long; in a short one decay hardly matters.

    Args:
        base: steps up to which nothing changes.

    Raises:
        ValueError: a base below 1.

    Source: measured, studies/sizes/decay.py, docs/transfer.md; X. Wang, L. Aitchison, "How to set AdamW's weight decay
    as you scale model and dataset size" (2024), for the memory as a part of the run.

    >>> HorizonRule().factor(100), HorizonRule().factor(1600)
    (1.0, 0.25)
    """

    base: int = 400

    def __post_init__(self) -> None:
        if not self.base >= 1:
            raise ValueError(f"HorizonRule needs a base of at least 1, not {self.base}")

    def factor(self, steps: int) -> float:
        """The factor on decay in a run of so many optimizer steps.

        Args:
            steps: number of optimizer steps of the whole run.

        Returns:
            The factor, at most 1.

        Raises:
            ValueError: steps is no positive whole number.
        """
        if type(steps) is not int or steps < 1:
            raise ValueError(f"steps is a positive whole number, not {steps!r}")
        return min(1.0, self.base / steps)

    def of(self, role: Role, steps: int) -> Role:
        """The role with its decay, if it has one, times the factor of a run of so many steps."""
        return with_decay(role, self.factor(steps))


def with_decay(role: Role, factor: float) -> Role:
    """The role with its decay, if it has one, times a factor above 0."""
    decay = role.stabiliser
    if factor == 1 or not isinstance(decay, Decay | DecoupledWeightDecay):
        return role
    return replace(role, stabiliser=replace(decay, rate=factor * decay.rate))
