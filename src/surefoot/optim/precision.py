"""`Precision`: in which numbers momentum and half-precision weights are stored; steps are taken in float32."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from surefoot.identity import plain_name
from surefoot.linalg import device
from surefoot.momentum import State
from surefoot.plan import Placement

HALF = (torch.bfloat16, torch.float16)

ADDED = ("master", "rounds")
"""What `Precision` adds to a parameter's state, beside momentum and stabiliser."""

Index = int | Tensor
"""Where entries lie in the whole parameter, flattened: the first one's position if they follow each other, or all."""


@dataclass(frozen=True)
class Agreed:
    """What all processes that hold a parameter have agreed on about its gradient.

    Args:
        there: whether there is one, on any process.
        finite: whether it is there, and finite on all.
        moves: whether any entry takes a step.
        masks: of each block, which independent problems take a step, bool: `(n, 1, 1)` of matrices; where that is not
            agreed on, `(1, 1, 1)`, whether the gradient is finite.
    """

    there: Tensor
    finite: Tensor
    moves: Tensor
    masks: list[Tensor]


@dataclass(frozen=True, eq=False)
class Leaf:
    """A parameter as a step sees it: tensors of this process that hold all that its rule couples.

    Args:
        value: the weights, which are written to.
        grad: their gradient.
        placement: their role and shape.
        state: the optimizer's state of them, which is written to.
        group: their parameter group.
        agreed: what other processes, that hold parts or copies, know of the gradient; they count those not finite, too.
        index: where the entries lie in the whole parameter, for the noise of stochastic rounding.
    """

    value: Tensor
    grad: Tensor
    placement: Placement
    state: State
    group: dict[str, Any]
    agreed: Agreed | None = None
    index: Index = 0


class Rounding:
    """How a half-precision weight is read for a step in float32, and written back. Pure: state in, state out."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = HALF
    """The dtypes that it can round to."""

    def init_state(self, p: Tensor, dtype: torch.dtype) -> State:
        """What is stored beside a weight p whose steps are taken in this dtype; by default nothing."""
        return {}

    def read(self, p: Tensor, state: State, dtype: torch.dtype) -> Tensor:
        """The weight that the step starts from."""
        return p.to(dtype)

    def write(self, w: Tensor, dtype: torch.dtype, state: State, index: Index = 0) -> tuple[Tensor, State]:
        """`(weight in its own dtype, changed entries of the state)`, of entries that lie at index in the parameter."""
        return w.to(dtype), {}


@dataclass(frozen=True)
class RoundToNearest(Rounding):
    """Rounded to nearest: a step below half a unit in the last place (2**-9 of an entry in bfloat16) is lost.

    >>> RoundToNearest().write(torch.tensor([1 + 2**-10]), torch.bfloat16, {})[0].tolist()
    [1.0]
    """


@dataclass(frozen=True)
class StochasticRounding(Rounding):
    """Rounded up or down at random, see `stochastic`: right on average, at no memory. bfloat16 only.

    >>> StochasticRounding().dtypes
    (torch.bfloat16,)
    """

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)  # float16's range would need other noise

    def write(self, w: Tensor, dtype: torch.dtype, state: State, index: Index = 0) -> tuple[Tensor, State]:
        """w in bfloat16; the noise differs from the momentum's."""
        return stochastic(w, noise_seed(~state["rounds"]), index), {}


@dataclass(frozen=True)
class MasterWeights(Rounding):
    """An exact float32 copy in the optimizer's state, 4 bytes a parameter.

    Entries of the parameter that were changed from outside take precedence over the master copy.

    >>> p = torch.ones(2, dtype=torch.bfloat16)
    >>> MasterWeights().read(p, {"master": torch.tensor([1 + 2**-10, 3.0])}, torch.float32).tolist()
    [1.0009765625, 1.0]
    """

    def init_state(self, p: Tensor, dtype: torch.dtype) -> State:
        """The master copy, in the dtype of the steps."""
        return {"master": p.detach().to(dtype)}

    def read(self, p: Tensor, state: State, dtype: torch.dtype) -> Tensor:
        """The copy, or the weight's own entry where that is no longer the copy's rounding."""
        return torch.where(state["master"].to(p.dtype) == p, state["master"], p.to(dtype))

    def write(self, w: Tensor, dtype: torch.dtype, state: State, index: Index = 0) -> tuple[Tensor, State]:
        """w rounded to nearest, and the copy."""
        return w.to(dtype), {"master": w}


@dataclass(frozen=True)
class Precision:
    """In which numbers momentum and half-precision weights are stored.

    Args:
        momentum: float32, 4 bytes per parameter; or bfloat16 by stochastic rounding, 2 bytes (float64 parameters have
            theirs in float64). Rounding to nearest would lose what a gradient adds to a much larger average.
        weights: how bfloat16 and float16 parameters are rounded; others never are.

    Raises:
        ValueError: another dtype for the momentum, or no `Rounding` for the weights.

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
            raise ValueError(f"weights is a rounding such as MasterWeights() or RoundToNearest(), not {self.weights!r}")

    def rounding(self, p: Tensor) -> Rounding:
        """How a parameter is rounded: as asked for in half precision; others need none."""
        return self.weights if p.dtype in HALF else RoundToNearest()

    def check(self, p: Tensor) -> None:
        """Raise ValueError for a parameter that cannot be stored so."""
        if p.is_floating_point() and p.dtype not in (torch.float32, torch.float64, *HALF):
            raise ValueError(f"parameters of {p.dtype} cannot be stepped: keep them in bfloat16 or float32")
        if p.dtype in HALF and p.dtype not in self.weights.dtypes:
            raise ValueError(f"{self.weights} cannot round to {p.dtype}; take MasterWeights() or RoundToNearest()")

    def convert(self, p: Tensor, place: Placement, state: State, name: str, new: Callable[[], State] = dict) -> State:
        """A parameter's state in the dtypes asked for: a new one, or one from a checkpoint of another precision.

        Args:
            p: the parameter.
            place: its role, which says what is stored in `momentum`'s dtype.
            state: of momentum and stabiliser.
            name: the parameter's, from which its rounding noise is drawn.
            new: a state whose other entries have the dtypes wanted, asked for where any here is not of the steps'.

        Returns:
            The state, with "master" and "rounds" where they are needed.
        """
        dtype = torch.promote_types(p.dtype, torch.float32)
        small = self.momentum if dtype == torch.float32 else dtype
        kept, averages = {key: x for key, x in state.items() if key not in ADDED}, place.role.momentum.averages
        others = [x for key, x in kept.items() if key not in averages and x.is_floating_point()]
        like = new() if any(x.dtype != dtype for x in others) else kept
        converted = {key: x.to(small if key in averages else like.get(key, x).dtype) for key, x in kept.items()}
        added = self.rounding(p).init_state(p, dtype)
        if small == torch.bfloat16 or isinstance(self.rounding(p), StochasticRounding):
            added["rounds"] = torch.full((), noise_key(name) << 32, dtype=torch.int64, device=p.device)
        return converted | {key: state.get(key, x) for key, x in added.items()}

    def read(self, leaf: Leaf) -> Tensor:
        """The weight that a step starts from."""
        dtype = torch.promote_types(leaf.value.dtype, torch.float32)
        return self.rounding(leaf.value).read(leaf.value, leaf.state, dtype)

    def write_state_(self, leaf: Leaf, new: State) -> None:
        """Write new entries, in the dtype of the step, of a parameter's state; averages in bfloat16 are rounded.

        Averages are kept by masks where the parameter rests; without a gradient on any process counts and what schemes
        refine stay, too.
        """
        for name, x in new.items():
            place = leaf.state[name]
            if leaf.agreed and name not in leaf.placement.role.momentum.averages:
                x = torch.where(leaf.agreed.there, x, place.to(x.dtype))
            rounded = place.dtype == torch.bfloat16 != x.dtype
            write_(place, stochastic(x, noise_seed(leaf.state["rounds"]), leaf.index) if rounded else x)

    def write_(self, leaf: Leaf, w: Tensor) -> None:
        """Write a parameter's next weights w, rounded: the end of its step."""
        value, added = self.rounding(leaf.value).write(w, leaf.value.dtype, leaf.state, leaf.index)
        write_(leaf.value, value)
        for name, x in added.items():
            write_(leaf.state[name], x)
        if "rounds" in leaf.state:
            leaf.state["rounds"] += leaf.agreed.there if leaf.agreed else 1


def write_(tensor: Tensor, value: Tensor) -> None:
    """Copy value, unless it is the tensor's own memory, which a step on a CPU may have written to already."""
    if not device.on_cpu(tensor) or value.data_ptr() != tensor.data_ptr():
        tensor.copy_(value)


def noise_key(name: str) -> int:
    """31 bits that tell a parameter's rounding noise from others': a hash of its name without what wrappers add.

    >>> noise_key("module.layer._orig_mod.weight") == noise_key("layer.weight")
    True
    """
    return int.from_bytes(hashlib.sha256(plain_name(name).encode()).digest()[:4], "big") >> 1


def noise_seed(rounds: Tensor) -> Tensor:
    """The seed of one rounding, int32, from the state's `rounds`, int64: `noise_key << 32`, plus a count of roundings.

    >>> noise_seed(torch.tensor(5 << 32)).dtype
    torch.int32
    """
    low, high = rounds << 32 >> 32, rounds >> 32
    return _hash(high.to(torch.int32)).bitwise_xor_(_hash(low.to(torch.int32)))


def stochastic(x: Tensor, seed: Tensor, index: Index = 0) -> Tensor:
    """x in bfloat16, rounded up or down at random so that the mean over seeds is x.

    `P(up) = (x - down) / (up - down)`; numbers that bfloat16 has, and those that are not finite, come back as they are.
    The noise is a hash of (index, seed): the same on every device, and no generator is consumed. A part of a tensor
    is rounded as in the whole if its index is given.

    Args:
        x: float32, any shape.
        seed: int32 scalar, another one for every rounding.
        index: the position of x's first entry in the whole parameter, or the positions of all, in x's shape.

    Returns:
        bfloat16, within one unit in the last place (2**-7 relatively). Cost: ten passes over integers of x's size.

    Source: the hash is "lowbias32", C. Wellons, https://nullprogram.com/blog/2018/07/31/.

    >>> seeds = torch.arange(1000, dtype=torch.int32)
    >>> rounded = torch.stack([stochastic(torch.tensor([1 + 2**-9]), seed) for seed in seeds])
    >>> rounded.unique().tolist(), round(float(rounded.float().mean() - 1) * 2**9, 1)
    ([1.0, 1.0078125], 1.0)
    """
    if isinstance(index, Tensor):  # a hash serves two neighbours, 16 bits each
        hashes = _hash((index // 2).to(torch.int32).add_(_hash(seed)))
        noise = (hashes >> 16 * (index % 2).to(torch.int32)).bitwise_and_(0xFFFF)
    else:
        first, last = index // 2, (index + x.numel() + 1) // 2
        hashes = _hash(torch.arange(first, last, dtype=torch.int32, device=x.device).add_(_hash(seed)))
        noise = hashes.view(torch.int16)[index % 2 : index % 2 + x.numel()].to(torch.int32).bitwise_and_(0xFFFF)
    bits = noise.view(x.shape).add_(x.contiguous().view(torch.int32))
    rounded = bits.bitwise_and_(-0x10000).view(torch.float32)  # an infinity has no low bits to carry from
    return torch.where(x.isnan(), x, rounded).to(torch.bfloat16)


def _hash(x: Tensor) -> Tensor:
    """A bijection of int32 whose low bits look random; a shift keeps the sign, hence the masks."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32))):
        x = (x >> shift).bitwise_and_((1 << 32 - shift) - 1).bitwise_xor_(x).mul_(factor)
    return (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x)
