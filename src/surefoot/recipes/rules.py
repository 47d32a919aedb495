"""`DepthRule`: rates and initial values by a residual stream's depth; `HorizonRule`: decay by a run's length."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from surefoot.initialise import AsBuilt, Fill, Scaled
from surefoot.roles import Role
from surefoot.scaling import Run, Times
from surefoot.stabilise import Decay, DecoupledWeightDecay


@dataclass(frozen=True)
class DepthRule:
    """With L branches in a stream: initial values times `sqrt(base/L)`, rate and decay times `base/L`; factors <= 1.

    In `x_L = x_0 + W_1 h_1 + ... + W_L h_L`, with inputs `h_l` of RMS about 1, it keeps three numbers the same at every
    depth:

    - The stream's size: independent initial values of norm s in L branches add `s^2 L` to its mean square, hence
      `s = sqrt(base/L)`.
    - How far a step moves the stream: all branches follow one loss, so their changes may add up to L times the norm of
      one, hence `eta base/L`.
    - How much the stream amplifies a difference at its start: with independent initial values by `exp(s^2 L / 2)` in
      the mean, which the same s keeps constant.

    Decay has the rate's factor, so the norm it leads to does not depend on the depth.

    Args:
        base: number of branches up to which nothing changes: two blocks of attention and MLP.
        rate: power of `base/L` in the rate's factor.
        initial: power of `base/L` in the factor of initial values that are drawn.

    Raises:
        ValueError: a base below 1, or a power that is negative.

    Source: the three numbers are those of "Beyond MuP 1"; N. Dey et al., "Don't be lazy: CompleteP enables
    compute-efficient deep transformers" (2025), multiplies branches by 1/L.

    >>> DepthRule().factors(4), DepthRule().factors(64)
    ((1.0, 1.0), (0.0625, 0.25))
    """

    base: int = 4
    rate: float = 1.0
    initial: float = 0.5

    def __post_init__(self) -> None:
        if not (self.base >= 1 and self.rate >= 0 and self.initial >= 0):
            raise ValueError(f"DepthRule needs a base of at least 1 and powers of at least 0, not {self}")

    def factors(self, branches: int) -> tuple[float, float]:
        """Factors on rate and initial values for weights that write into a stream of so many branches."""
        part = min(1.0, self.base / branches)
        return math.pow(part, self.rate), math.pow(part, self.initial)

    def of(self, branches: int) -> Branches:
        """Change for the `overrides` of `Plan.of`: this parameter writes into a stream of so many branches.

        Args:
            branches: number of branches that add up in the stream, whatever discovery found.

        Returns:
            A function from a role to the same role with its rate, decay and initial values times the factors.

        Raises:
            ValueError: branches is no positive whole number.

        >>> from surefoot.roles import NATURAL
        >>> DepthRule().of(8)(NATURAL["linear"]).lr_scale
        Times(factor=0.5, scale=Constant(value=1.0))
        """
        if type(branches) is not int or branches < 1:
            raise ValueError(f"branches must be a positive integer, not {branches!r}")
        return Branches(*self.factors(branches))


@dataclass(frozen=True)
class Branches:
    """A change of a role by the factors of a `DepthRule`; in an override it replaces the recipe's rule.

    Args:
        rate: factor on rate and decay.
        initial: factor on initial values.
    """

    rate: float
    initial: float

    def __call__(self, role: Role) -> Role:
        """The role times the factors: initial values where they are drawn."""
        if self.initial != 1 and not isinstance(role.initial, AsBuilt | Fill):
            role = replace(role, initial=Scaled(role.initial, self.initial))
        if self.rate == 1:
            return role
        decay, scale = role.stabiliser, Times(self.rate, role.lr_scale)
        if isinstance(decay, DecoupledWeightDecay):
            decay = replace(decay, rate=self.rate * decay.rate, lr_scale=Times(self.rate, decay.lr_scale))
        return replace(role, lr_scale=scale, stabiliser=decay)


@dataclass(frozen=True)
class HorizonRule:
    """Decay times `base / steps`, at most 1: in longer runs weights remember the same fraction of the run.

    Under decay at a rate r in units of lr, a weight is a mean over its last `1 / (lr r)` steps. In long runs the best
    memory is a fixed fraction of the run; in short ones decay hardly matters.

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
        return min(1.0, self.base / Run(steps, tokens=1).steps)

    def of(self, role: Role, steps: int) -> Role:
        """The role with its decay, if it has one, times the factor of a run of so many steps."""
        return with_decay(role, self.factor(steps))


def with_decay(role: Role, factor: float) -> Role:
    """The role with its decay, if it has one, times a factor above 0."""
    decay = role.stabiliser
    if factor == 1 or not isinstance(decay, Decay):
        return role
    return replace(role, stabiliser=replace(decay, rate=factor * decay.rate))
