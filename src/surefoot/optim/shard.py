"""A parameter held by several processes: this process's shard, and where each of the three parts of its step runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from surefoot.geometry.adaptive import Adaptive
from surefoot.geometry.base import Extent
from surefoot.linalg import device
from surefoot.mesh.groups import Cut, apart, as_dtensor
from surefoot.mesh.slabs import Slab
from surefoot.momentum import State, is_finite
from surefoot.optim.batching import Rule, rules
from surefoot.optim.precision import ADDED, Agreed, Leaf
from surefoot.optim.rounding import Index
from surefoot.plan import Placement
from surefoot.scaling import Constant
from surefoot.step import Step, descend, direct, step, turned_by_row
from surefoot.views import OneBlock, Shape, Stack, Vector, View
from surefoot.views.state import entry


@dataclass(frozen=True)
class Way:
    """How a shard takes its step; parts of the step that no owner rank takes run on the shard itself.

    Args:
        name: the way's name.
        sent: tensors sent to a matrix's owner: gradient g, smoothed gradient m, weight w.
        back: tensors that the owner returns: direction d, weight w; empty where there is no owner.
        take: the owner's part of the step: all of it if g is sent, else the last two parts, or the second alone.
    """

    name: str
    sent: tuple[str, ...] = ()
    back: tuple[str, ...] = ()
    take: Step = step


HERE = Way("here")
ROWS = Way("rows")  # stepped by rows: norms are all-reduced over all rows before the move
DIRECTION = Way("direction", ("m",), ("d",), lambda role, how, w, m, kept, _, mask: direct(role, how, w, m, kept, mask))
WEIGHT = Way("weight", ("m", "w"), ("w",), descend)
ALL = Way("all", ("g", "w"), ("w",))  # momentum's state travels with them, both ways
REPLICAS = Way("replicas", ("m", "w"), ("w",), descend)  # the owner has its own copies of m and w: nothing is sent


@dataclass(eq=False)
class Shard:
    """One parameter, of which this process holds a slab or a copy.

    Args:
        p: the parameter.
        placement: role and shape of the whole parameter.
        cut: how it is cut, and over which processes.
        way: how the step is taken.
        here: role and shape of the slab if it is stepped by itself, else `placement`.
        local: the slab, sharing the parameter's memory.
        kept: the optimizer's state; an entry that is cut is a `DTensor`.
        group: the parameter group of the present step.
        agreed: what all processes agreed on before this step.
    """

    p: Tensor
    placement: Placement
    cut: Cut
    way: Way
    here: Placement
    local: Tensor
    kept: State
    group: dict[str, Any] = field(init=False)
    agreed: Agreed = field(init=False)

    @cached_property
    def problems(self) -> tuple[list[Shape], Tensor] | None:
        """Grid of independent problems of each block, and each slab entry's problem; None if no rest is agreed on."""
        couples, blocks = self.placement.role.geometry.couples, self.placement.blocks
        if "m" not in self.way.sent or not couples:
            return None
        shapes = [tuple(1 if i - len(block) in couples else n for i, n in enumerate(block)) for block in blocks]
        return shapes, self._labels(apart(torch.arange(sum(map(math.prod, shapes))), shapes))

    def _labels(self, of_blocks: Sequence[Tensor]) -> Tensor:
        """Map the blocks' labels to the slab's entries; a dimension along which all are equal keeps size 1."""
        blocks = [x.expand(block) for x, block in zip(of_blocks, self.placement.blocks, strict=True)]
        whole = self.placement.role.view.join(blocks, self.placement.shape)
        own = whole[self.cut.slab.within(Slab.of(whole.shape))]
        for dim in range(own.ndim):
            if own.shape[dim] and bool((own == own.narrow(dim, 0, 1)).all()):
                own = own.narrow(dim, 0, 1)
        return own.contiguous().to(self.local.device)

    @property
    def state(self) -> State:
        """This process's shards of the state, sharing its memory."""
        return {name: x.to_local() if isinstance(x, DTensor) else x for name, x in self.kept.items()}

    @property
    def index(self) -> Index:
        """Positions of the slab's entries in the flattened whole parameter."""
        shape, slab = self.placement.shape, self.cut.slab
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        if slab.size[1:] == shape[1:]:
            return slab.start[0] * strides[0] if shape else 0
        cuts = zip(slab.start, slab.size, strides, strict=True)
        steps = [torch.arange(start, start + n, device=self.local.device) * stride for start, n, stride in cuts]
        return sum(torch.meshgrid(*steps, indexing="ij"))

    def gradient(self) -> Tensor:
        """This process's part of the gradient, before the sum over copies; zeros where it has none."""
        g = self.p.grad
        if g is None:
            return torch.zeros_like(self.local)
        if isinstance(g, DTensor) and isinstance(self.p, DTensor):
            same = g.placements == self.p.placements or self._axes
            return (g if same else g.redistribute(self.p.device_mesh, self.p.placements)).to_local()
        return g

    @property
    def _axes(self) -> int:
        """The mesh axes along which the gradient is a sum over the parameter's copies, as bits.

        Of the last one where this process has none; -1 before the first.
        """
        g, p = self.p.grad, self.p
        if g is None and isinstance(p, DTensor):
            copied = any(x.is_replicate() for x in p.placements)
            return self.agreed.axes if hasattr(self, "agreed") else -1 if copied else 0
        if not (isinstance(g, DTensor) and isinstance(p, DTensor)) or g.placements == p.placements:
            return 0
        laid = [*zip(g.placements, p.placements, strict=True)]
        sums = [x == Partial() and y.is_replicate() for x, y in laid]
        known = all(x == y or is_sum for (x, y), is_sum in zip(laid, sums, strict=True))
        return sum(1 << i for i, is_sum in enumerate(sums) if is_sum and known)

    def _scaled(self, g: Tensor) -> Tensor:
        """A part of a sum, times their number: if that is finite on all processes, so is the sum."""
        if not (isinstance(self.p, DTensor) and (axes := self._axes)):
            return g
        sizes = (n for i, n in enumerate(self.p.device_mesh.shape) if axes >> i & 1)
        return g.to(torch.promote_types(g.dtype, torch.float32)) * math.prod(sizes)

    def _summed(self, present: Tensor) -> tuple[int, Tensor | None]:
        """`_axes`, and the sum of a gradient that is partial on any process, zeros where it is missing: a collective.

        The host waits for what was agreed only where the gradient is missing, and was partial or never there.
        """
        axes, p = self._axes, self.p
        said = int(present) if axes and p.grad is None else 0
        axes = said >> 1 if said else axes
        if not (axes and isinstance(p, DTensor) and self.group["params"] and (said or p.grad is not None)):
            return axes, None
        laid = [Partial() if axes >> i & 1 else x for i, x in enumerate(p.placements)]
        part = self.gradient().to(
            torch.promote_types(self.local.dtype, torch.float32)
        )  # which half precision may exceed
        whole = as_dtensor(part, p.device_mesh, laid, tuple(p.shape))
        return axes, whole.redistribute(p.device_mesh, p.placements).to_local()

    def leaf(self) -> Leaf:
        """The slab as a `Leaf`, a parameter of its own."""
        index = self.index if "rounds" in self.kept else 0
        g = self.gradient() if self.agreed.summed is None else self.agreed.summed
        return Leaf(self.local, g, self.here, self.state, self.group, self.agreed, index, self.cut.name)

    def flags(self) -> Tensor:
        """Flags of this process's gradient, uint8, which processes combine by their maximum.

        Not finite, present (and above that bit the axes of sums), missing, not zero; then for each independent problem:
        not zero.
        """
        g, there = self.gradient(), self.p.grad is not None and len(self.group["params"]) > 0
        present = (1 + 2 * self._axes) if there else 0
        known = torch.tensor([0, present, not there, 0], dtype=torch.uint8, device=g.device)
        if there and g.numel():
            known[0] = ~is_finite(self._scaled(g).reshape(1, -1), self.placement.role.momentum.squares)[0]
            known[3] = (g != 0).any() if self.way is ROWS else False
        if self.problems is None:
            return known
        some, (shapes, labels) = g != 0, self.problems
        for dim, size in enumerate(labels.shape):
            some = some if size > 1 else some.any(dim, keepdim=True)
        seen = torch.zeros(sum(map(math.prod, shapes)), dtype=torch.uint8, device=g.device)
        where = labels + torch.zeros_like(some, dtype=torch.int64)  # sizes of 1 are expanded, 0 stays
        seen.scatter_reduce_(0, where.flatten(), some.broadcast_to(where.shape).flatten().to(torch.uint8), "amax")
        return torch.cat([known, seen])

    def agree(self, flags: Tensor) -> None:
        """Set `agreed` from the combined flags, sum a partial gradient, and count a step that is skipped."""
        axes, summed = self._summed(flags[1])
        infinite, there, missing, some, seen = torch.split(flags.bool(), [1, 1, 1, 1, len(flags) - 4])
        copied = not isinstance(self.p, DTensor) or self.p.device_mesh.size() > len(self.cut.ranks)  # others hold it
        there &= ~(missing & copied)
        finite, by_problem = there & ~infinite, self.placement.role.momentum.by_problem
        masks = [finite.reshape((1,) * len(block)) for block in self.placement.blocks]
        if self.problems:
            masks = apart((seen | (not by_problem)) & finite, self.problems[0])
        self.agreed = Agreed(there[0], finite[0], (finite & (some | (not by_problem)))[0], masks, axes, summed)
        self.kept["skipped"] += (infinite & there)[0]

    def mask(self, dtype: torch.dtype) -> Tensor | float | None:
        """The slab's active mask, `(1, ...)`; None where the gradient tells it; 1 if the host knows that all move."""
        if self.problems is None or not self.placement.role.momentum.by_problem:
            return None
        mask = torch.cat([x.flatten() for x in self.agreed.masks])[self.problems[1]][None].to(dtype)
        return 1.0 if device.may_branch(mask) and bool((mask == 1).all()) else mask

    @property
    def sent(self) -> list[str]:
        """Tensors sent to the owner; with the active mask where single entries may rest and it reads more than m."""
        role, way = self.placement.role, self.way
        reads = way is WEIGHT or (way is DIRECTION and isinstance(role.geometry, Adaptive))
        masked = reads and role.momentum.by_problem and not role.geometry.couples
        return [*way.sent, *(sorted(role.shaped) if way is ALL else ()), *["active"] * masked]

    @property
    def back(self) -> list[str]:
        """Tensors that the owner returns."""
        return [*self.way.back, *(sorted(self.placement.role.shaped) if self.way is ALL else ())]

    @property
    def small(self) -> list[str]:
        """Names of the other state entries, which the owner changes and sends to every process."""
        role = self.placement.role
        others = {"skipped", *ADDED, *role.shaped, *role.owned, *(() if self.way is ALL else role.smoothed)}
        return sorted(name for name in self.state if entry(name) not in others)

    @property
    def owned(self) -> list[str]:
        """Names of the state entries that only the owner keeps."""
        return [name for name in self.state if entry(name) in self.placement.role.owned]

    @cached_property
    def kinds(self) -> tuple[list[Rule], Tensor]:
        """The distinct rules of the blocks, and the index of the rule that moves each entry of the slab."""
        own = rules(self.placement)
        kinds = [*dict.fromkeys(own)]
        labels = self._labels([torch.tensor(kinds.index(rule)) for rule in own]) if len(kinds) > 1 else torch.tensor(0)
        return kinds, labels.to(self.local.device).expand(self.cut.slab.size)


def chosen(placement: Placement, slabs: Sequence[Slab], local: Shape) -> tuple[Way, Placement]:
    """Choose the way of a parameter cut into slabs, and the placement with which this slab takes its step."""
    cut = {d for d, n in enumerate(placement.shape) if any(slab.size[d] != n for slab in slabs)}
    role, shape, block = placement.role, placement.shape, placement.blocks[0]
    view, momentum, ball = role.view, role.momentum, role.weight_geometry

    if not cut:
        return HERE, placement
    even = all(slab.size == slabs[0].size for slab in slabs)  # else numbers of an expert's matrices are split
    if cut == {0} and len(block) == 3 and block == shape and isinstance(view, OneBlock):  # a stack by another name
        return HERE, part_of(placement, local, Stack())
    if cut == {0} and view.stacked and (block[0] == shape[0] or even):
        return HERE, part_of(placement, local, view)
    if isinstance(view, OneBlock):
        columns = block[-1] if len(block) == 3 else 1
        first = next((d for d in range(len(shape) + 1) if math.prod(shape[d:]) == columns), len(shape))
        rows = all(d < first for d in cut) and turned_by_row(role.geometry)
        table = len(block) == 3 and block[0] == 1 and cut == {0}  # a vector is one row
        if rows and momentum.extent <= (Extent.ROW if table else Extent.ENTRY):
            extent, lines = placement.stabilisers[0].extent, AsRows(columns) if len(block) == 3 else Vector()
            if extent == Extent.ENTRY:
                return HERE, part_of(placement, local, lines)
            if extent <= Extent.NORM and -ball.ndim not in ball.couples and block[0] == 1:
                return ROWS, part_of(placement, local, lines)
    if momentum.extent > Extent.ENTRY:
        return ALL, placement
    reads = isinstance(role.geometry, Adaptive) and any("w" in change.reads for change in role.geometry.changes)
    entrywise = all(scheme.extent == Extent.ENTRY for scheme in placement.stabilisers)
    return (DIRECTION if entrywise and not reads else WEIGHT), placement


def part_of(placement: Placement, shape: Shape, view: View) -> Placement:
    """Placement of a part of a parameter, with the whole's learning-rate scale and radius, whatever its own size."""
    scale, stabiliser = Constant(placement.lr_scales[0]), placement.stabilisers[0]
    role = replace(placement.role, view=view, lr_scale=scale, stabiliser=stabiliser, radius_unit=Constant())
    return Placement(role, placement.why, shape)


@dataclass(frozen=True)
class AsRows(OneBlock):
    """View all rows of a part of a table, `(..., columns)`, as one matrix.

    Args:
        columns: entries of a row.
    """

    columns: int

    def block(self, shape: Shape) -> Shape:
        """`(1, rows, columns)`."""
        return (1, math.prod(shape) // max(1, self.columns), self.columns)
