"""All parameters of an optimizer that several processes hold: what is decided, kept and stepped together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from surefoot.mesh.groups import Groups, gather, position
from surefoot.mesh.slabs import Slab, slabs
from surefoot.momentum import State, is_finite
from surefoot.optim import ways
from surefoot.optim.batching import Leaf, init_state
from surefoot.optim.exchange import Exchange
from surefoot.optim.param_groups import is_dtensor, whole_of
from surefoot.optim.precision import Precision
from surefoot.optim.rows import step_by_rows
from surefoot.optim.shard import Agreed, Shard, problems_of
from surefoot.plan import Placement
from surefoot.stabilise.running_bound import RunningBound

FLAGS = 4
"""Of each parameter: its gradient is not finite, is there, is missing, is not zero."""


class Sharding:
    """All parameters of an optimizer that are `DTensor`.

    Nothing here is called where there are none, and torch.distributed is not imported then.

    Args:
        precision: in which numbers weights and momentum are kept.
        bounds: the optimizer's running bounds.
        plain: whether the optimizer's step is `surefoot.step.step`, whose parts owners take.
    """

    def __init__(self, precision: Precision, bounds: RunningBound, plain: bool = True) -> None:
        self._precision, self._bounds, self._plain = precision, bounds, plain
        self._exchanges: list[Exchange] | None = None
        self.shards: dict[Tensor, Shard] = {}
        self._groups = Groups()
        self._agreements: dict[tuple[int, ...], list[Shard]] | None = None

    def add(self, p: DTensor, name: str, placement: Placement, state: State) -> State:
        """Find a parameter's slabs, and how its step is taken.

        Args:
            p: the parameter.
            name: its name.
            placement: its role and shape.
            state: the optimizer's; empty before the first step.

        Returns:
            The state, complete.

        Raises:
            ValueError: a placement that is neither a copy nor a contiguous part; a step of the user's for a parameter
                that needs other processes.
        """
        cut, local = self._groups.cut(p, name), p.to_local().detach()
        way, here = ways.chosen(placement, cut.slabs, tuple(local.shape))
        if way != ways.HERE and not self._plain:
            raise ValueError(f"{name} needs other processes for its step, which step=... cannot take: leave step out")
        self.shards[p] = Shard(p, placement, cut, way, here, local)
        if way in (ways.DIRECTION, ways.WEIGHT) and placement.role.geometry.couples:
            labels, count = problems_of(placement, cut.slab)
            self.shards[p].problems = (labels.to(local.device), count)
        self._agreements, self._exchanges = None, None
        self.shards[p].kept = state or self._init_state(self.shards[p], name)
        return self.shards[p].kept

    def _init_state(self, shard: Shard, name: str) -> State:
        """The state of a parameter before its first step, as the optimizer keeps it."""
        if not shard.way.owner:
            state = init_state(shard.here, shard.local)
        else:
            state = init_state(shard.placement, gather(shard.p, shard.cut))
            state |= shard.placement.role.momentum.init_state(
                torch.zeros_like(shard.local, dtype=torch.promote_types(shard.local.dtype, torch.float32))
            )
        averages = shard.placement.role.momentum.averages
        state = self._precision.convert(shard.local, state, averages, name)
        return {key: self.wrap(shard, key, x) for key, x in state.items()}

    def placed(self, p: Tensor, name: str, value: Tensor) -> Tensor | None:
        """An entry of a loaded state, a `DTensor` of any mesh or whole, cut as this mesh cuts it; None for others."""
        if p not in self.shards:
            return None
        like = self.shards[p].kept.get(name)
        if _on_one_mesh(value, like):
            return value.clone()
        value = whole_of(value).detach().to(device=self.shards[p].local.device, copy=True)
        if not isinstance(like, DTensor):
            return value
        if value.shape != like.shape:
            raise ValueError(f"the state's {name} has shape {tuple(value.shape)}, not {tuple(like.shape)}")
        own = slab_of(like).within(Slab((0,) * value.ndim, tuple(value.shape)))
        return _wrapped(value[own].clone(), like.device_mesh, like.placements, tuple(like.shape))

    def cut_like(self, p: Tensor, factor: Tensor) -> Tensor:
        """Factors as they are cut: of a `DTensor` one with its placements."""
        if p not in self.shards or isinstance(factor, DTensor):
            return factor
        own = factor[self.shards[p].cut.slab.within(Slab((0,) * p.ndim, tuple(p.shape)))]
        return _wrapped(own.contiguous(), self.shards[p].p.device_mesh, self.shards[p].p.placements, tuple(p.shape))

    def at_owner(self, p: Tensor, before: Tensor | None) -> tuple[Tensor, State, Tensor | None] | None:
        """A parameter, its singular-vector estimates and its weights before, whole at one process; None at the others.

        A collective of those that hold a part; they take turns.
        """
        shard = self.shards[p]
        owner = next(i for i, other in enumerate(self.shards) if other is p) % len(shard.cut.slabs)
        kept = {name: whole_of(shard.kept[name]) for name in ("vectors",) if name in shard.kept}
        whole = gather(shard.p, shard.cut, owner)
        then = None if before is None else gather(before, shard.cut, owner) if is_dtensor(before) else before
        return (whole, kept, then) if owner == shard.cut.mine else None

    def together(self, found: dict[str, Any]) -> dict[str, Any]:
        """What the processes found that hold parts of the same parameters: a collective of them."""
        for ranks in self._largest_groups():
            if (group := self._groups.of[ranks]) is not None:
                everybody: list[Any] = [None] * len(ranks)
                dist.all_gather_object(everybody, found, group)
                found = {name: numbers for own in everybody for name, numbers in own.items()}
        return found

    def gather_owned(self) -> None:
        """Give every process what only owners of matrices keep, for a checkpoint."""
        for exchange in self.exchanges:
            for job, owner in exchange.owned():
                for _, x in sorted(job.owned().items()):
                    dist.broadcast(x, group=job.shard.cut.group, group_src=owner)

    @property
    def exchanges(self) -> list[Exchange]:
        """One for each group of processes, dtype and device."""
        if self._exchanges is None:
            self._exchanges = self._new_exchanges()
        return self._exchanges

    def adopt(self, p: Tensor, state: State) -> None:
        """Step with this state from now on."""
        self.shards[p].kept = state

    def leaves(self, p: Tensor) -> Iterator[Leaf]:
        """The parameter's part, if it takes its step by itself."""
        shard = self.shards[p]
        if shard.way == ways.HERE and p.numel():  # none of an empty one
            yield shard.leaf()

    def step(self, groups: dict[Tensor, dict[str, Any]]) -> None:
        """Take the step of all parameters that need other processes for it.

        Args:
            groups: the parameter group of each parameter.
        """
        by_rows = [shard for shard in self.shards.values() if shard.way == ways.ROWS and shard.p.numel()]
        step_by_rows(by_rows, groups, self._precision)
        for exchange in self.exchanges:
            exchange.step(groups)

    def _new_exchanges(self) -> list[Exchange]:
        """One for each group of processes, dtype and device."""
        found: dict[Any, list[Shard]] = {}
        for shard in self.shards.values():
            if shard.way.owner and shard.p.numel():
                found.setdefault((shard.cut.ranks, shard.local.dtype, shard.local.device), []).append(shard)
        return [Exchange(shards, self._precision, self._bounds) for shards in found.values()]

    def agree(self) -> None:
        """One all-reduce: which gradients are finite and there, and which independent problems have one.

        A gradient that is missing on some processes counts as zero there; of a parameter with copies, which would come
        apart, as missing on all.
        """
        if self._agreements is None:
            self._agreements = self._largest_groups()
        for shard in self.shards.values():
            if (now := shard.p.to_local()).data_ptr() != shard.local.data_ptr():
                shard.local = now.detach()  # a wrapper has moved it
        for ranks, shards in self._agreements.items():
            flags = torch.cat([_flags(shard) for shard in shards])
            if (group := self._groups.of[ranks]) is not None:  # None: this process alone
                dist.all_reduce(flags, dist.ReduceOp.MAX, group)
            sizes = [FLAGS + shard.count for shard in shards]
            for shard, own in zip(shards, torch.split(flags, sizes), strict=True):
                infinite, there, missing, some = own[:FLAGS].bool().unbind()
                there &= ~(missing & shard.copies)
                finite = there & ~infinite
                moves = finite & (some | (not shard.placement.role.momentum.by_problem))
                shard.agreed = Agreed(there, finite, moves, own[FLAGS:])
                shard.kept["skipped"] += infinite & there

    def _largest_groups(self) -> dict[tuple[int, ...], list[Shard]]:
        """The parameters by the largest group of processes that hold all of them: usually one."""
        ranks = {}
        for shard in self.shards.values():
            mesh = shard.p.device_mesh
            ranks[shard] = self._groups.along(mesh, range(mesh.ndim))
        found: dict[tuple[int, ...], list[Shard]] = {}
        everyone = sorted({*ranks.values()}, key=lambda these: (-len(these), these))
        for shard, own in ranks.items():
            largest = next(these for these in everyone if {*own} <= {*these})
            found.setdefault(largest, []).append(shard)
        return found

    def wrap(self, shard: Shard, name: str, x: Tensor) -> Tensor:
        """An entry of the slab's state as the optimizer keeps it: a `DTensor` where it is cut like the parameter."""
        p, local = shard.p, tuple(shard.local.shape)
        if x.shape == local and name in (*shard.shaped, "master"):
            return _wrapped(x, p.device_mesh, p.placements, tuple(p.shape))
        block, cut = shard.placement.blocks[0], shard.here.role.view
        if shard.here is shard.placement or not x.ndim:
            return x
        dim = 0 if cut.stacked else 1
        if dim >= x.ndim:
            return x
        shape = (*x.shape[:dim], block[dim], *x.shape[dim + 1 :])
        placements = [y if y.is_replicate() else _moved(y, dim) for y in p.placements]
        return _wrapped(x, p.device_mesh, placements, shape)


def _wrapped(local: Tensor, mesh: Any, placements: Sequence[Any], shape: tuple[int, ...]) -> DTensor:
    """A contiguous `DTensor` of which this process holds local."""
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _on_one_mesh(x: Any, y: Any) -> bool:
    """Whether two tensors are `DTensor` with the same placements."""
    both = isinstance(x, DTensor) and isinstance(y, DTensor)
    return both and x.placements == y.placements and x.device_mesh == y.device_mesh


def slab_of(x: DTensor) -> Slab:
    """Which entries this process holds."""
    mesh = tuple(x.device_mesh.shape)
    return slabs(tuple(x.shape), mesh, x.placements)[position(mesh, x.device_mesh.get_coordinate() or ())]


def _moved(placement: Any, dim: int) -> Any:
    """The same cut along another dimension."""
    return type(placement)(dim, **({"split_factor": f} if (f := getattr(placement, "split_factor", None)) else {}))


def _flags(shard: Shard) -> Tensor:
    """What this process knows of a gradient, `(FLAGS + count,)`, uint8."""
    g, there = shard.gradient(), shard.p.grad is not None
    known = torch.tensor([False, there, not there, False], device=g.device)
    if there and g.numel():
        finite = is_finite(g.reshape(1, -1), shard.placement.role.momentum.squares)[0]
        known[0], known[3] = ~finite, (g != 0).any()
    if shard.problems is None:
        return known.to(torch.uint8)
    some, (labels, count) = g != 0, shard.problems
    for dim, size in enumerate(labels.shape):
        some = some if size > 1 else some.any(dim, keepdim=True)
    seen = torch.zeros(count, dtype=torch.uint8, device=g.device)
    where = labels + torch.zeros_like(some, dtype=torch.int64)  # sizes of 1 are expanded, 0 stays
    seen.scatter_reduce_(0, where.flatten(), some.broadcast_to(where.shape).flatten().to(torch.uint8), "amax")
    return torch.cat([known.to(torch.uint8), seen])
