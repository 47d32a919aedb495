"""A parameter that several processes hold: this process's part, and how its step is taken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from surefoot.geometry.adaptive import Adaptive
from surefoot.linalg import device
from surefoot.mesh.groups import Cut
from surefoot.mesh.slabs import Slab
from surefoot.momentum import State, where_finite
from surefoot.optim.batching import Leaf
from surefoot.optim.precision import ADDED, Index
from surefoot.optim.ways import DIRECTION, WEIGHT, Way
from surefoot.plan import Placement
from surefoot.stabilise import Stabiliser
from surefoot.views.state import entry


@dataclass(frozen=True)
class Agreed:
    """What all processes that hold a parameter have agreed on about its gradient.

    Args:
        there: whether there is one, on any process.
        finite: whether it is there, and finite on all.
        moves: whether any entry takes a step.
        active: which independent problems have a gradient other than 0, `(count,)`.
    """

    there: Tensor
    finite: Tensor
    moves: Tensor
    active: Tensor


@dataclass(eq=False)
class Shard:
    """One parameter, of which this process holds a slab.

    Args:
        p: the parameter.
        placement: role and shape of the whole.
        cut: over which processes, and how.
        way: how the step is taken.
        here: role and shape of the slab, where it is stepped by itself.
        local: the slab, over the parameter's memory.
        kept: the optimizer's state, `DTensor` where it is cut.
        problems: which independent problem each entry of the slab belongs to, broadcasting to it, and how many there
            are; None where it is stepped by itself.
        agreed: what was agreed on before the present step.
    """

    p: DTensor
    placement: Placement
    cut: Cut
    way: Way
    here: Placement
    local: Tensor
    kept: State = field(default_factory=dict)
    problems: tuple[Tensor, int] | None = None
    agreed: Agreed | None = None

    @property
    def state(self) -> State:
        """This process's parts of the state, over its memory."""
        return {name: x.to_local() if isinstance(x, DTensor) else x for name, x in self.kept.items()}

    @property
    def known(self) -> Agreed:
        """What was agreed on."""
        assert self.agreed is not None, "a step before the processes agreed"
        return self.agreed

    @property
    def count(self) -> int:
        """How many independent problems the processes agree on."""
        return 0 if self.problems is None else self.problems[1]

    @property
    def copies(self) -> bool:
        """Whether other processes hold the same entries."""
        return any(n > 1 and x.is_replicate() for n, x in zip(self.p.device_mesh.shape, self.p.placements, strict=True))

    @property
    def index(self) -> Index:
        """Where the slab's entries lie in the whole parameter."""
        shape = self.placement.shape
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        first = sum(start * stride for start, stride in zip(self.cut.slab.start, strides, strict=True))
        if self.cut.slab.size[1:] == shape[1:]:
            return first
        index = torch.full((), first, dtype=torch.int64, device=self.local.device)
        for dim, (size, stride) in enumerate(zip(self.cut.slab.size, strides, strict=True)):
            steps = torch.arange(size, device=self.local.device) * stride
            index = index + steps.reshape(-1, *(1,) * (len(shape) - 1 - dim))
        return index

    def gradient(self) -> Tensor:
        """This process's part of the gradient; zeros where it has none."""
        g = self.p.grad
        if g is None:
            return torch.zeros_like(self.local)
        if isinstance(g, DTensor):
            same = g.placements == self.p.placements
            return (g if same else g.redistribute(self.p.device_mesh, self.p.placements)).to_local()
        return g

    def noise_index(self) -> Index:
        """`index`, where stochastic rounding may need it."""
        return self.index if "rounds" in self.state else 0

    @cached_property
    def shaped(self) -> list[str]:
        """Names of the momentum's entries of the parameter's shape."""
        like = self.placement.role.momentum.init_state(torch.zeros(2, 3))
        return sorted(name for name, x in like.items() if x.shape == (2, 3))

    def names(self, what: Sequence[str]) -> list[str]:
        """What is sent or returned, the state of momentum by the names of its entries of the parameter's shape."""
        return [name for one in what for name in (self.shaped if one == "state" else [one])]

    @property
    def small(self) -> list[str]:
        """Names of the other entries that an owner of the whole changes, and sends to everybody."""
        role = self.placement.role
        others = {"skipped", *ADDED, *self.shaped, *role.owned}
        own = {name for name in self.state if entry(name) not in others}
        return sorted(own if "smooth" in self.way.owner else own - role.smoothed)

    @property
    def masked(self) -> bool:
        """Whether an owner is sent the mask: where entries rest one by one, and more is read of them than m."""
        role = self.placement.role
        reads = self.way == WEIGHT or (self.way == DIRECTION and isinstance(role.geometry, Adaptive))
        return reads and role.momentum.by_problem and not role.geometry.couples

    def masks(self) -> list[Tensor]:
        """The active mask of each block from what all agreed on: `(n, 1, 1)`, or as the geometry couples entries.

        Where entries are not coupled, `(1, 1, 1)`: 1 unless the gradient is not finite.
        """
        role, found, start = self.placement.role, [], 0
        for block in self.placement.blocks:
            alike = self.problems is None
            shape = [1 if alike or i - len(block) in role.geometry.couples else n for i, n in enumerate(block)]
            finite = self.known.finite.reshape(1, *(1,) * len(block))
            seen = finite if alike else self.known.active[start : start + math.prod(shape)].reshape(1, *shape)
            start += math.prod(shape)
            proxy = (seen.bool() & finite).to(torch.promote_types(self.local.dtype, torch.float32))
            mask = role.momentum.active(proxy, finite, role.geometry.couples)
            found.append(torch.as_tensor(mask, dtype=proxy.dtype, device=proxy.device).expand(1, *shape)[0])
        return found

    def mask_of_slab(self, g: Tensor) -> Tensor | float:
        """The active mask of the slab's entries, `(1, ...)`; 1 where the host can tell that all are active."""
        momentum, finite = self.placement.role.momentum, self.known.finite.reshape(1, *(1,) * g.ndim)
        if not momentum.by_problem:
            return momentum.active(where_finite(g[None], finite), finite, frozenset())
        if self.problems is None:
            mask = momentum.active(where_finite(g[None], finite), finite, frozenset())
        else:
            mask = torch.cat([x.flatten() for x in self.masks()])[self.problems[0]][None]
        if isinstance(mask, Tensor) and device.may_branch(mask) and bool((mask == 1).all()):
            return 1.0
        return mask

    def blocks_like(self, stabiliser: Stabiliser, scale: float) -> Tensor:
        """Which entries of the slab lie in blocks of this stabiliser and scale, bool, of the slab's shape."""
        placement = self.placement
        like = [
            torch.tensor(own == stabiliser and placement.role.lr_scale(block) == scale).expand(block)
            for own, block in zip(placement.stabilisers, placement.blocks, strict=True)
        ]
        return label_entries(placement, like, self.cut.slab).to(self.local.device).expand(self.cut.slab.size)

    def leaf(self) -> Leaf:
        """The slab as a parameter of its own."""
        return Leaf(
            self.local, self.gradient(), self.here, self.state, self.known.finite, self.known.there, self.noise_index()
        )


def problems_of(placement: Placement, slab: Slab) -> tuple[Tensor, int]:
    """The number of each entry's independent problem, `Geometry.couples`, broadcasting to the slab; and how many."""
    couples, blocks, count = placement.role.geometry.couples, [], 0
    for block in placement.blocks:
        shape = [1 if i - len(block) in couples else n for i, n in enumerate(block)]
        blocks.append(torch.arange(count, count + math.prod(shape)).reshape(shape).expand(block))
        count += math.prod(shape)
    return label_entries(placement, blocks, slab), count


def label_entries(placement: Placement, labels: Sequence[Tensor], slab: Slab) -> Tensor:
    """Labels of each block's entries as those of a slab's, of size 1 along dimensions where they are equal."""
    whole = placement.role.view.join(list(labels), placement.shape)
    own = whole[slab.within(Slab((0,) * len(placement.shape), placement.shape))]
    for dim in range(own.ndim):
        if own.shape[dim] and bool((own == own.narrow(dim, 0, 1)).all()):
            own = own.narrow(dim, 0, 1)
    return own.contiguous()
