"""`BranchRate`: the rate of what writes into a residual stream, by the number of branches that add up in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from surefoot.roles import Role
from surefoot.scaling import Times
from surefoot.stabilise import DecoupledWeightDecay


@dataclass(frozen=True)
class BranchRate:
    """A rate that falls with the number of branches: `(base / branches)^power`, at most 1.

    In `x_L = x_0 + F_1 + ... + F_L`, with `F_l = W_l h_l(x)` and inputs `h_l` of RMS at most c, a step that changes
    every W_l by a matrix of norm s moves the stream by up to `c L s`: the changes of L branches add. At a step of norm
    `s = eta base / L` they add to `c base eta`, whatever the depth. Decay falls by the same factor, so that the bound
    on each norm stays.

    Args:
        base: number of branches up to which the factor is 1.
        power: 1 for changes that add in one direction; 1/2 would be for changes that are independent.

    Raises:
        ValueError: a base below 1, or a power that is negative.

    Source: the sum is that of "Beyond MuP 2" for a residual block; N. Dey et al., "Don't be lazy: CompleteP enables
    compute-efficient deep transformers" (2025), multiplies the branches themselves by 1/L.

    >>> BranchRate(base=4).factor(4), BranchRate(base=4).factor(32)
    (1.0, 0.125)
    """

    base: int = 4
    power: float = 1.0

    def __post_init__(self) -> None:
        if self.base < 1 or not self.power >= 0:
            raise ValueError(f"BranchRate needs a base of at least 1 and a power of at least 0, not {self}")

    def factor(self, branches: int) -> float:
        """The factor on the rate of what writes into a stream of so many branches."""
        return float(min(1.0, self.base / branches) ** self.power)

    def of(self, branches: int) -> Callable[[Role], Role]:
        """Change for the `overrides` of `Plan.of`: this parameter writes into a stream of so many branches.

        Args:
            branches: number of branches that add up in the stream.

        Returns:
            A function from a role to the same role with its rate, and its decay, times the factor.

        Raises:
            ValueError: branches is no positive whole number.

        >>> from surefoot.roles import NATURAL
        >>> BranchRate(base=4).of(8)(NATURAL["linear"]).lr_scale
        Times(factor=0.5, scale=Constant(value=1.0))
        """
        if type(branches) is not int or branches < 1:
            raise ValueError(f"branches is a positive whole number, not {branches!r}")

        def change(role: Role) -> Role:
            factor = self.factor(branches)
            if factor == 1:
                return role
            scale, stabiliser = Times(factor, role.lr_scale), role.stabiliser
            if isinstance(stabiliser, DecoupledWeightDecay):
                decay = Times(factor, stabiliser.lr_scale)
                stabiliser = replace(stabiliser, rate=stabiliser.rate * factor, lr_scale=decay)
            return replace(role, lr_scale=scale, stabiliser=stabiliser)

        return change
