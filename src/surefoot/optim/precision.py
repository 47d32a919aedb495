"""`Precision`: how momentum and half-precision weights are stored; steps are taken in float32."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from surefoot.linalg import device
from surefoot.momentum import State
from surefoot.optim.rounding import Index, blocks_of, from_int8, noise_key, noise_seed, stochastic, to_int8
from surefoot.plan import Placement

HALF = (torch.bfloat16, torch.float16)

SCALES = {"momentum": "momentum_scale", "exp_avg": "exp_avg_scale"}
"""Averages that may be kept in 8 bits, and the names of their scales: not Adam's two, see `Precision.packs`."""

ADDED = ("master", "rounds", *SCALES.values())
"""What `Precision` adds to a parameter's state, beside momentum and stabiliser."""


@dataclass(frozen=True)
class Agreed:
    """What all processes that hold a parameter have agreed on about its gradient.

    Args:
        there: whether any process has one.
        finite: whether it is there, and finite on all.
        moves: whether any entry takes a step.
        masks: of each block, which independent problems take a step, bool: `(n, 1, 1)` of matrices; where that is not
            agreed on, `(1, 1, 1)`, whether the gradient is finite.
        axes: the mesh axes along which the last gradient was a sum over copies (sequence parallelism leaves such), as
            bits; -1 before the first.
        summed: this process's part of the sum, of such a gradient.
    """

    there: Tensor
    finite: Tensor
    moves: Tensor
    masks: list[Tensor]
    axes: int
    summed: Tensor | None


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
        name: the parameter's, for messages.
    """

    value: Tensor
    grad: Tensor
    placement: Placement
    state: State
    group: dict[str, Any]
    agreed: Agreed | None = None
    index: Index = 0
    name: str = ""


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
    """Rounded up or down at random, see `stochastic`: unbiased, without extra memory; bfloat16 only.

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
    """How momentum and half-precision weights are stored.

    Args:
        momentum: float32, 4 bytes per parameter; bfloat16, 2 bytes; or int8, 1.03 bytes: 32 entries share a scale, but
            vectors and Adam's two means use bfloat16. The short formats round stochastically: rounding to nearest would
            lose what a gradient adds to a much larger average. float64 parameters have float64 momentum.
        weights: how bfloat16 and float16 parameters are rounded; others never are.

    Raises:
        ValueError: another dtype for the momentum, or weights that are no `Rounding`.

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
        if self.momentum not in (torch.float32, torch.bfloat16, torch.int8):
            raise ValueError(f"momentum must be torch.float32, torch.bfloat16 or torch.int8, not {self.momentum!r}")
        if not isinstance(self.weights, Rounding):
            raise ValueError(f"weights is a rounding such as MasterWeights() or RoundToNearest(), not {self.weights!r}")

    def rounding(self, p: Tensor) -> Rounding:
        """How a parameter is rounded: as asked for in half precision; others need none."""
        return self.weights if p.dtype in HALF else RoundToNearest()

    def check(self, p: Tensor, name: str) -> None:
        """Raise ValueError for a parameter that cannot be stepped or stored this way."""
        if torch.nn.parameter.is_lazy(p):
            raise ValueError(f"{name} has no shape before the first forward pass: call the model on a batch first")
        if p.dtype.is_complex:
            raise ValueError(f"{name} is complex, which no role takes: give real and imaginary parts")
        if p.dtype not in (torch.float32, torch.float64, *HALF):
            raise ValueError(f"{name} of {p.dtype} cannot be stepped: keep it in bfloat16 or float32, or freeze it")
        if p.dtype in HALF and p.dtype not in self.weights.dtypes:
            raise ValueError(f"{name}: {self.weights} cannot store {p.dtype}; take MasterWeights() or RoundToNearest()")

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
        less = torch.bfloat16 if small == torch.int8 else small
        averages = place.role.momentum.averages
        kept = {k: average(state, k, dtype) if k in averages else x for k, x in state.items() if k not in ADDED}
        others = [x for key, x in kept.items() if key not in averages and x.is_floating_point()]
        like = new() if any(x.dtype != dtype for x in others) else kept
        added = self.rounding(p).init_state(p, dtype)
        converted = {key: x.to(less if key in averages else like.get(key, x).dtype) for key, x in kept.items()}
        for key in SCALES.keys() & averages & kept.keys() if self.packs(p, place) else ():
            converted[key], converted[SCALES[key]] = to_int8(kept[key])
        if less == torch.bfloat16 or isinstance(self.rounding(p), StochasticRounding):
            added["rounds"] = torch.full((), noise_key(name) << 32, dtype=torch.int64, device=p.device)
        return converted | {key: state.get(key, x) for key, x in added.items()}

    def packs(self, p: Tensor, place: Placement) -> bool:
        """Whether a parameter's average is kept in 8 bits, with a scale: not one that each entry's own history divides.

        An entry far below others of its scale is rounded to 0 or far above its history: steps would have no bound.
        """
        apart = "exp_avg_sq" in place.role.momentum.averages
        return self.momentum == torch.int8 and p.ndim > 1 and p.dtype != torch.float64 and not apart

    def in_full(self, p: Tensor, place: Placement, entries: State, whole: Callable[[Tensor], Tensor]) -> State:
        """A parameter's saved state, whose averages in 8 bits are made float32 unless they are kept so.

        Args:
            p: the parameter.
            place: its role.
            entries: its state in a checkpoint.
            whole: gives all of a tensor that may be cut.

        Returns:
            The state without scales, or itself.
        """
        if self.packs(p, place) or not SCALES.values() & entries.keys():
            return entries
        found = {name: whole(x) for name, x in entries.items()}
        full = {name: from_int8(found[name], found[scale]) for name, scale in SCALES.items() if scale in found}
        return {name: x for name, x in (found | full).items() if name not in SCALES.values()}

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
            if place.dtype == torch.int8:
                x, scale = to_int8(x, noise_seed(leaf.state["rounds"]), leaf.index)
                write_(leaf.state[SCALES[name]], scale)
            elif place.dtype == torch.bfloat16 != x.dtype:
                x = stochastic(x, noise_seed(leaf.state["rounds"]), leaf.index)
            write_(place, x)

    def write_(self, leaf: Leaf, w: Tensor) -> None:
        """Write a parameter's next weights w, rounded: the end of its step."""
        value, added = self.rounding(leaf.value).write(w, leaf.value.dtype, leaf.state, leaf.index)
        write_(leaf.value, value)
        for name, x in added.items():
            write_(leaf.state[name], x)
        if "rounds" in leaf.state:
            leaf.state["rounds"] += leaf.agreed.there if leaf.agreed else 1


def as_precision(given: object) -> Precision:
    """The precision that an optimizer was given, or the default one; ValueError for what is none."""
    if isinstance(given, Precision | None):
        return given or Precision()
    allowed = "torch.bfloat16 or torch.int8, weights RoundToNearest(), StochasticRounding() or MasterWeights()"
    raise ValueError(f"precision must be a Precision(...), momentum torch.float32, {allowed}, not {given!r}")


def average(state: State, name: str, dtype: torch.dtype) -> Tensor:
    """An average of a state in the dtype of the step, however it is kept."""
    x = state[name]
    return from_int8(x, state[SCALES[name]]) if x.dtype == torch.int8 else x.to(dtype)


def layouts(new: State, saved: Mapping[Any, Any], p: Tensor) -> State:
    """What a parameter's saved state must have, in shape and kind: as a new one, averages in 8 bits or not as saved."""
    known = {name: x for name, x in new.items() if name not in ADDED}
    for name in SCALES.keys() & known.keys():
        if packed := p.ndim > 1 and getattr(saved.get(name), "dtype", None) == torch.int8:
            known[SCALES[name]] = torch.empty(*p.shape[:-1], blocks_of(p.shape[-1]), dtype=torch.int8, device="meta")
        known[name] = torch.empty(p.shape, dtype=torch.int8 if packed else torch.float32, device="meta")
    return known


def write_(tensor: Tensor, value: Tensor) -> None:
    """Copy value, unless it is the tensor's own memory, which a step on a CPU may have written to already."""
    if not device.on_cpu(tensor) or value.data_ptr() != tensor.data_ptr():
        tensor.copy_(value)
