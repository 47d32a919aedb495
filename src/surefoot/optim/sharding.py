"""All parameters of an optimizer that several processes hold: how each takes its step, its state, the joint step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from surefoot.geometry.base import ChangeBounds, Completed, expand
from surefoot.linalg.device import whole_of
from surefoot.mesh.groups import Cut, Groups, along, apart, as_dtensor, gather, slab_of
from surefoot.mesh.slabs import Slab
from surefoot.momentum import State
from surefoot.optim.batching import init_state, load, named, rules, store
from surefoot.optim.exchange import Exchange
from surefoot.optim.param_groups import learning_rate
from surefoot.optim.precision import SCALES, Precision
from surefoot.optim.rounding import BLOCK, blocks_of
from surefoot.optim.shard import HERE, REPLICAS, ROWS, Shard, chosen
from surefoot.plan import Placement
from surefoot.stabilise.base import where_moved
from surefoot.stabilise.running_bound import RunningBound
from surefoot.step import direct, smooth


class Sharding:
    """All `DTensor` parameters of an optimizer, and replicated ones whose matrix signs the replicas share out.

    Without such parameters nothing here is called, and torch.distributed is not imported.

    Args:
        precision: the formats in which weights and momentum are stored.
        bounds: the optimizer's running bounds.
        plain: whether the optimizer's step is `surefoot.step.step`, the only one whose parts owners can take.
        replicas: the process group that shares out matrix signs, if any.
    """

    def __init__(
        self, precision: Precision, bounds: RunningBound, plain: bool, replicas: dist.ProcessGroup | None
    ) -> None:
        self._precision, self._bounds, self._plain, self._replicas = precision, bounds, plain, replicas
        self.shards: dict[Tensor, Shard] = {}
        self._groups = Groups()

    def add(self, p: Tensor, name: str, placement: Placement, state: State) -> State:
        """Register a parameter: find its slabs, and choose how it takes its step.

        Args:
            p: the parameter.
            name: its name.
            placement: its role and shape.
            state: its optimizer state; empty before the first step.

        Returns:
            The state, complete.

        Raises:
            ValueError: a placement that is neither a copy nor a contiguous part; a user-defined step for a
                parameter that needs other processes; a parameter on the meta device.
        """
        if p.is_meta:
            raise ValueError(f"{name} has no values yet: make the optimizer after to_empty(device=...) of the model")
        if isinstance(p, DTensor):
            cut, local = self._groups.cut(p, name), p.to_local().detach()
            way, here = chosen(placement, cut.slabs, tuple(local.shape))
        else:
            assert self._replicas is not None
            ranks = tuple(dist.get_process_group_ranks(self._replicas))
            self._groups[ranks] = self._replicas
            cut = Cut((Slab.of(p.shape),) * len(ranks), dist.get_rank(self._replicas), ranks, self._replicas, name)
            way, here, local = REPLICAS, placement, p.detach()
        if way != HERE and not self._plain:
            raise ValueError(f"{name} needs other processes for its step, and step=... cannot use them: leave it out")
        ends = {slab.start[-1] + slab.size[-1] for slab in cut.slabs if p.ndim} - {*p.shape[-1:]}
        if self._precision.packs(p, placement) and (within := sorted(end for end in ends if end % BLOCK)):
            remedy = f"keep momentum in torch.bfloat16, or cut at multiples of {BLOCK}"
            what = f"{name} is cut after {within[0]} columns, inside a block that shares an 8-bit scale"
            raise ValueError(f"{what}: {remedy}")
        self.shards[p] = shard = Shard(p, placement, cut, way, here, local, state)
        vars(self).pop("_agreements", None)
        fresh = self.stored(p, name, self._init_state(shard))
        return self.stored(p, name, {key: self.placed(p, key, x) for key, x in state.items()}) if state else fresh

    def _init_state(self, shard: Shard) -> State:
        """The state of a parameter before its first step."""
        if not (shard.way.back and isinstance(shard.p, DTensor)):
            return init_state(shard.here, shard.local)
        state = init_state(shard.placement, gather(shard.p, shard.cut))
        slab = torch.zeros_like(shard.local, dtype=torch.promote_types(shard.local.dtype, torch.float32))
        return state | shard.placement.role.momentum.init_state(slab)

    def stored(self, p: Tensor, name: str, state: State) -> State:
        """Convert a parameter's state to precision's formats and keep it; only this process's parts are read."""
        shard = self.shards[p]
        if "exchanges" in vars(self):  # built for one dtype and set of parameters; owners may change
            self.gather_owned()
            del self.exchanges
        own = {key: x.to_local() if isinstance(x, DTensor) else x for key, x in state.items()}
        own = self._precision.convert(shard.local, shard.placement, own, name, lambda: self._init_state(shard))
        shard.kept = {key: _wrapped(shard, key, x) for key, x in own.items()}
        return shard.kept

    def placed(self, p: Tensor, name: str, value: Tensor) -> Tensor:
        """This process's part of a loaded state entry, which is whole or a `DTensor` of any mesh."""
        like = self.shards[p].kept.get(name) if p in self.shards else None
        laid = [(x.device_mesh, x.placements) for x in (value, like) if isinstance(x, DTensor)]
        if len(laid) == 2 and laid[0] == laid[1]:
            return value.to_local().clone()  # type: ignore[attr-defined,no-any-return]
        value = whole_of(value).detach().to(p.device, copy=True)
        return value[slab_of(like).within(Slab.of(value.shape))].clone() if isinstance(like, DTensor) else value

    def scale_(self, p: Tensor, factor: Tensor) -> None:
        """Multiply a parameter in place by a factor that is whole or cut like the parameter."""
        if isinstance(p, DTensor) and not isinstance(factor, DTensor):
            factor, p = factor[self.shards[p].cut.slab.within(Slab.of(p.shape))], p.to_local()
        p.mul_(factor)

    def at_owner(self, p: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor | None] | None:
        """Gather a parameter and its earlier weights whole on one process; None on the others.

        A collective of the processes that hold a part; they take turns as owner, parameter by parameter.
        """
        shard = self.shards[p]
        owner = next(i for i, other in enumerate(self.shards) if other is p) % len(shard.cut.slabs)
        whole = gather(shard.p, shard.cut, owner)
        then = gather(before, shard.cut, owner) if isinstance(before, DTensor) else before
        return (whole, then) if owner == shard.cut.mine else None

    def together(self, found: dict[str, Any]) -> dict[str, Any]:
        """Merge what all processes that hold parts of the same parameters found: a collective."""
        for ranks, shards in self._agreements.items():
            group = self._groups[ranks]
            if group is not None and any(isinstance(shard.p, DTensor) for shard in shards):
                everybody: list[Any] = [None] * len(ranks)
                dist.all_gather_object(everybody, found, group)
                found = {name: numbers for own in everybody for name, numbers in own.items()}
        return found

    def gather_owned(self) -> None:
        """Broadcast the state that only owners keep, for a checkpoint or before owners change."""
        for exchange in self.exchanges:
            for job, owner in exchange.owners:
                for _, x in sorted(job.entries(job.shard.owned).items()):
                    dist.broadcast(x, group=job.shard.cut.group, group_src=owner)

    @cached_property
    def exchanges(self) -> list[Exchange]:
        """One `Exchange` per process group, dtype and device."""
        found = defaultdict[Any, list[Shard]](list)
        for shard in self.shards.values():
            if shard.way.back and shard.p.numel():
                found[shard.cut.ranks, shard.way is REPLICAS, shard.local.dtype, shard.local.device].append(shard)
        return [Exchange(shards, self._precision, self._bounds) for shards in found.values()]

    def step(self) -> None:
        """Step all parameters whose step needs other processes."""
        tables = defaultdict[Any, list[Iterator[list[Tensor]]]](list)
        for shard in self.shards.values():
            if shard.way is ROWS and shard.p.numel():
                tables[shard.cut.group].append(self._step_of_rows(shard))
        for group, steps in tables.items():
            _step_by_rows(steps, group)
        for exchange in self.exchanges:
            exchange.step()

    def _step_of_rows(self, shard: Shard) -> Iterator[list[Tensor]]:
        """A table's step: yields the norms of the rows here, which the caller replaces by the norms of all rows.

        The stabiliser runs twice: to find which norms it asks for, and with those of all rows.
        """
        leaf, ((role, stabiliser, scale),) = shard.leaf(), rules(shard.here)
        batch = load([leaf], self._precision)
        (w,), (g,), (state,), (finite,) = batch.weights, batch.gradients, batch.states, batch.masks
        smoothed, m, active = smooth(role, g, state, finite)
        kept = {n: x for n, x in state.items() if n not in smoothed}
        with named(leaf.name):
            d, kept = direct(role, stabiliser, w, m, kept, active)
        eta, norm = learning_rate(shard.group) * scale * active, role.weight_geometry
        length = ChangeBounds.of(role.geometry).direction_norm_bound(norm, tuple(w.shape))
        asked = Reduced(norm)
        stabiliser.move(w.clone(), d, eta, asked, kept, lambda _: length)
        yield asked.norms
        moved, cache = stabiliser.move(w.clone(), d, eta, Reduced(norm, iter(asked.norms)), kept, lambda _: length)
        batch.weights = [where_moved(shard.agreed.moves.to(w.dtype), (), moved, w)]
        batch.states = [{**smoothed, **kept, **(cache or {})}]
        store(batch.results(), batch, [leaf], self._precision)

    def agree(self, groups: Sequence[dict[str, Any]]) -> list[Tensor]:
        """Agree, by all-reduce, on which gradients are present and finite and which independent problems have one.

        A gradient that is missing on some processes counts as zero there; if the parameter has copies, which would
        diverge, it counts as missing on all.

        Args:
            groups: the parameter groups of the step.

        Returns:
            The parameters whose dtype has changed.
        """
        cast, of = list[Tensor](), {p: group for group in groups for p in group["params"]}
        for p, shard in self.shards.items():
            shard.group = of.get(p, {"lr": 0.0, "maximize": False, "params": []})  # removed from its group: rests
            now, before = p.to_local() if isinstance(p, DTensor) else p, shard.local
            if now.dtype != before.dtype or now.data_ptr() != before.data_ptr():
                shard.local = now.detach()  # a wrapper has moved it, or `model.to`
            cast += [p] if now.dtype != before.dtype else []
        for ranks, shards in self._agreements.items():
            known = [shard.flags() for shard in shards]
            flags = torch.cat(known)
            if (group := self._groups[ranks]) is not None:  # None: this process alone
                dist.all_reduce(flags, dist.ReduceOp.MAX, group)
            for shard, own in zip(shards, torch.split(flags, [len(x) for x in known]), strict=True):
                shard.agree(own)
        return cast

    @cached_property
    def _agreements(self) -> dict[tuple[int, ...], list[Shard]]:
        """The parameters by the ranks of their mesh, in an order that is the same on all processes."""
        found = defaultdict[tuple[int, ...], list[Shard]](list)
        for shard in self.shards.values():
            mesh = shard.p.device_mesh if isinstance(shard.p, DTensor) else None
            found[self._groups.along(mesh, range(mesh.ndim)) if mesh else shard.cut.ranks].append(shard)
        return dict(sorted(found.items(), key=lambda each: (-len(each[0]), each[0])))


@dataclass(frozen=True)
class Reduced(Completed):
    """A norm that is the maximum over rows: over all rows once that is known, else over this process's rows.

    Args:
        norm_of: the norm.
        known: the norms over all rows, in the order in which a stabiliser asks for them.
        norms: the norms over this process's rows that it has asked for.
    """

    known: Iterator[Tensor] | None = None
    norms: list[Tensor] = field(default_factory=list)

    def norm(self, w: Tensor) -> Tensor:
        """The norm over all rows if known; else over the rows here, which is recorded."""
        if self.known is not None:
            return next(self.known)
        self.norms.append(self.norm_of.norm(w))
        return self.norms[-1]

    def is_zero(self, w: Tensor) -> Tensor:
        """Whether all rows are zero."""
        return expand(self.norm(w), self) == 0


def _step_by_rows(steps: Sequence[Iterator[list[Tensor]]], group: dist.ProcessGroup | None) -> None:
    """Step tables, with one all-reduce for all their norms."""
    if asked := [x for norms in map(next, steps) for x in norms]:
        numbers = torch.cat([x.to(torch.float64).flatten() for x in asked])
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group)
        for x, most in zip(asked, apart(numbers, [x.shape for x in asked]), strict=True):
            x.copy_(most)
    for step in steps:
        next(step, None)


def _wrapped(shard: Shard, name: str, x: Tensor) -> Tensor:
    """An entry of the slab's state as the optimizer keeps it: a `DTensor` where it is cut like the parameter."""
    p, block = shard.p, shard.placement.blocks[0]
    if not isinstance(p, DTensor):
        return x
    if x.shape == shard.local.shape and name in (*shard.placement.role.shaped, "master"):
        return as_dtensor(x, p.device_mesh, p.placements, tuple(p.shape))
    if name in SCALES.values():
        return as_dtensor(x, p.device_mesh, p.placements, (*p.shape[:-1], blocks_of(p.shape[-1])))
    dim = 0 if shard.here.role.view.stacked else 1
    if shard.here is shard.placement or dim >= x.ndim:
        return x
    shape = (*x.shape[:dim], block[dim], *x.shape[dim + 1 :])
    return as_dtensor(x, p.device_mesh, [y if y.is_replicate() else along(y, dim) for y in p.placements], shape)
