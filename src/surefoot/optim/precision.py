"""Storage: in what numbers momentum and half-precision weights lie between two steps, which are taken in float32."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from surefoot.momentum import State

HALF = (torch.bfloat16, torch.float16)
GOLDEN = 0x9E3779B1
"""Of the golden ratio: its multiples lie far apart, so that no two parameters count through the same numbers."""

ADDED = ("master", "rounds")
"""What storage keeps in a parameter's state, beside momentum and stabiliser."""


class Rounding(ABC):
    """How a weight in half precision comes to the step in float32, and back. Pure: state in, state out.

    `dtypes` are those it can round to.
    """

    dtypes: ClassVar[tuple[torch.dtype, ...]] = HALF

    def init_state(self, p: Tensor, dtype: torch.dtype) -> State:
        """What is kept beside a weight `p` whose steps are taken in this dtype: nothing."""
        return {}

    def read(self, p: Tensor, state: State, dtype: torch.dtype) -> Tensor:
        """The weight that the step starts from."""
        return p.to(dtype)

    @abstractmethod
    def write(self, w: Tensor, dtype: torch.dtype, state: State) -> tuple[Tensor, State]:
        """`(weight in its own dtype, what changes in the state)`."""


@dataclass(frozen=True)
class RoundToNearest(Rounding):
    """Rounded to nearest: a step below half a unit in the last place (2**-9 of an entry in bfloat16) is lost."""

    def write(self, w: Tensor, dtype: torch.dtype, state: State) -> tuple[Tensor, State]:
        """Rounded."""
        return w.to(dtype), {}


@dataclass(frozen=True)
class StochasticRounding(Rounding):
    """Rounded up or down at random, see `stochastic`: right on average, at no memory. bfloat16 only."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)  # float16's range would need other noise

    def write(self, w: Tensor, dtype: torch.dtype, state: State) -> tuple[Tensor, State]:
        """Rounded."""
        return stochastic(w, ~state["rounds"]), {}


@dataclass(frozen=True)
class MasterWeights(Rounding):
    """An exact float32 copy in the optimizer's state, 4 bytes a parameter; where a weight was written to, it yields."""

    def init_state(self, p: Tensor, dtype: torch.dtype) -> State:
        """The copy."""
        return {"master": p.detach().to(dtype)}

    def read(self, p: Tensor, state: State, dtype: torch.dtype) -> Tensor:
        """The copy, or the weight's own entry where that is no longer the copy's rounding."""
        return torch.where(state["master"].to(p.dtype) == p, state["master"], p.to(dtype))

    def write(self, w: Tensor, dtype: torch.dtype, state: State) -> tuple[Tensor, State]:
        """Rounded to nearest, and the copy."""
        return w.to(dtype), {"master": w}


@dataclass(frozen=True)
class Precision:
    """In what numbers momentum and half-precision weights are kept.

    Args:
        momentum: float32, 4 bytes per parameter; or bfloat16 by stochastic rounding, 2 bytes (float64 parameters keep
            theirs in float64). Rounding to nearest would lose what a gradient adds to a much larger average.
        weights: how bfloat16 and float16 parameters are rounded; others are never.

    Raises:
        ValueError: another dtype for the momentum.

    >>> from surefoot.optim.optimizer import SteepestDescent
    >>> p = torch.nn.Parameter(torch.ones(4, 4))
    >>> optimizer = SteepestDescent([{"params": [p], "role": "linear"}], lr=0.1, precision=Precision(torch.bfloat16))
    >>> p.sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[p]["momentum"].dtype
    torch.bfloat16
    """

    momentum: torch.dtype = torch.float32
    weights: Rounding = field(default_factory=RoundToNearest)

    def __post_init__(self) -> None:
        if self.momentum not in (torch.float32, torch.bfloat16):
            raise ValueError(f"momentum is kept in torch.float32 or torch.bfloat16, not {self.momentum!r}")
        if not isinstance(self.weights, Rounding):
            raise ValueError(
                f"weights takes RoundToNearest(), StochasticRounding() or MasterWeights(), not {self.weights!r}"
            )

    def rounding(self, p: Tensor) -> Rounding:
        """That of a parameter: the one asked for in half precision, else none to speak of."""
        return self.weights if p.dtype in HALF else RoundToNearest()

    def check(self, p: Tensor) -> None:
        """Raise ValueError for a parameter that cannot be kept so."""
        if p.is_floating_point() and p.dtype not in (torch.float32, torch.float64, *HALF):
            raise ValueError(f"parameters of {p.dtype} cannot be stepped: keep them in bfloat16 or float32")
        if p.dtype in HALF and p.dtype not in self.weights.dtypes:
            raise ValueError(
                f"{self.weights} cannot round weights to {p.dtype}; take MasterWeights() or RoundToNearest()"
            )

    def conform(self, p: Tensor, state: State, averages: Collection[str], number: int) -> State:
        """A parameter's state as it is kept: fresh, or loaded from a checkpoint that was kept otherwise.

        Args:
            p: the parameter.
            state: what momentum and stabiliser keep.
            averages: the entries of it that are kept in `momentum`'s dtype.
            number: the parameter's own, so that no two are rounded by the same noise.
        """
        dtype = torch.promote_types(p.dtype, torch.float32)
        small = self.momentum if self.momentum == torch.bfloat16 and dtype == torch.float32 else dtype
        state = {name: x.to(small) if name in averages else x for name, x in state.items()}
        added = self.rounding(p).init_state(p, dtype)
        if small == torch.bfloat16 or isinstance(self.rounding(p), StochasticRounding):
            added["rounds"] = torch.full((), number * GOLDEN % 2**31, dtype=torch.int32, device=p.device)
        kept = {name: state.get(name, x) for name, x in added.items()}
        return {name: x for name, x in state.items() if name not in ADDED} | kept

    def keep(self, x: Tensor, like: Tensor, state: State) -> Tensor:
        """An average x for its place in the state, `like`."""
        return stochastic(x, state["rounds"]) if like.dtype == torch.bfloat16 != x.dtype else x


def stochastic(x: Tensor, count: Tensor) -> Tensor:
    """x in bfloat16, rounded up or down at random so that the mean over counts is x.

    `P(up) = (x - down) / (up - down)`; numbers that bfloat16 has, and those that are not finite, come back as they are.
    The noise is a hash of (index, count): the same on every device, and nobody's generator is consumed.

    Args:
        x: float32, any shape.
        count: int32 scalar, another one for every rounding.

    Returns:
        bfloat16, within one unit in the last place (2**-7 relatively). Cost: ten passes over integers of x's size.

    Source: the hash is "lowbias32", C. Wellons, https://nullprogram.com/blog/2018/07/31/.

    >>> counts = torch.arange(1000, dtype=torch.int32)
    >>> rounded = torch.stack([stochastic(torch.tensor([1 + 2**-9]), count) for count in counts])
    >>> rounded.unique().tolist(), round(float(rounded.float().mean() - 1) * 2**9, 1)
    ([1.0, 1.0078125], 1.0)
    """
    half = (x.numel() + 1) // 2
    pairs = _hash(torch.arange(half, dtype=torch.int32, device=x.device).add_(_hash(count)))
    noise = torch.cat([pairs & 0xFFFF, (pairs >> 16).bitwise_and_(0xFFFF)])[: x.numel()]
    bits = noise.view(x.shape).add_(x.contiguous().view(torch.int32))
    moved = bits.bitwise_and_(-0x10000).view(torch.float32)  # an infinity has no low bits to carry from
    return torch.where(x.isnan(), x, moved).to(torch.bfloat16)


def _hash(x: Tensor) -> Tensor:
    """A bijection of int32 whose low bits look random; a shift keeps the sign, hence the masks."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32))):
        x = (x >> shift).bitwise_and_((1 << 32 - shift) - 1).bitwise_xor_(x).mul_(factor)
    return (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x)
