"""What an owner steps whole: a matrix, an expert or a vector of which several processes hold parts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from surefoot.linalg import device
from surefoot.mesh.schedule import Work, cost
from surefoot.mesh.slabs import Slab
from surefoot.momentum import State
from surefoot.optim.shard import Shard
from surefoot.plan import Placement
from surefoot.scaling import Constant
from surefoot.step import direct, move, smooth
from surefoot.views.state import entry


@dataclass(eq=False)
class Job:
    """A matrix, an expert or a vector that its owner steps whole.

    Args:
        shard: this process's part of the parameter.
        work: which entries, and what is sent.
        placement: role and shape of the entries.
        only: which expert of a stack this is; None: all of the parameter.
        key: stands for the matrix in a `RunningBound`.
    """

    shard: Shard
    work: Work
    placement: Placement
    only: int | None
    key: Tensor

    @property
    def region(self) -> tuple[slice, ...]:
        """Where this process's part of the entries lies in its slab."""
        return self.work.parts[self.shard.cut.mine].within(self.shard.cut.slab)

    def numbers(self) -> State:
        """What the owner changes of the state beside tensors of the parameter's shape: the same on every process."""
        return self._own(self.shard.small)

    def kept(self) -> State:
        """`numbers`, and what the owner alone keeps."""
        return self.numbers() | self.owned()

    def owned(self) -> State:
        """What the owner alone keeps."""
        names = self.shard.placement.role.owned
        return self._own(name for name in self.shard.state if entry(name) in names)

    def _own(self, names: Iterable[str]) -> State:
        own = {name: self.shard.state[name] for name in names}
        return {n: self._part(x) if x.ndim else x for n, x in own.items()}

    def _part(self, x: Tensor) -> Tensor:
        """What is this expert's of a tensor with a row for each matrix of the stack."""
        if self.only is None:
            return x
        each = self.placement.blocks[0][0]
        return x[each * self.only : each * (self.only + 1)]

    def masks(self) -> list[Tensor]:
        """The active mask of each block as the owner knows it, see `Shard.masks`."""
        masks = self.shard.masks()
        return masks if self.shard.problems is None else list(map(self._part, masks))


def jobs_of(shard: Shard, dtype: torch.dtype) -> list[Job]:
    """A parameter's jobs: one for each expert of a stack, else one."""
    placement, shape = shard.placement, shard.placement.shape
    block = placement.blocks[0]
    whole = Slab((0,) * len(shape), shape)
    separate = placement.role.view.stacked and "smooth" not in shard.way.owner and shape[0] > 0
    boxes = [Slab((i, *whole.start[1:]), (1, *shape[1:])) for i in range(shape[0])] if separate else [whole]
    if separate:
        role = replace(
            placement.role,
            lr_scale=Constant(placement.role.lr_scale(block)),
            stabiliser=placement.stabilisers[0],
            radius_unit=Constant(),
        )
        placement = Placement(role, placement.why, (1, *shape[1:]))
    sent, back = (len(shard.names(what)) for what in (shard.way.sent, shard.way.back))
    numbers = sum(shard.state[name].numel() for name in shard.small) // len(boxes)
    amount = sum(cost(*b) for b in placement.blocks)
    return [
        Job(
            shard,
            Work(str(shape), box, shard.cut.slabs, amount, sent, back, numbers, dtype.itemsize, shard.masked),
            placement,
            i if separate else None,
            torch.empty(0, device=shard.local.device),
        )
        for i, box in enumerate(boxes)
    ]


def advance(jobs: list[Job], i: int, tensors: list[Tensor], kept: State, lr: float | Tensor) -> State:
    """What an owner takes of the step of the i-th block of like jobs: direction d, weight w and state by name."""
    placement, shard = jobs[0].placement, jobs[0].shard
    role, stabiliser, shape = placement.role, placement.stabilisers[i], placement.blocks[i]
    x = dict(zip(shard.names(shard.way.sent), tensors, strict=False))  # behind them a mask
    smoothed: State = {}
    if "smooth" in shard.way.owner:
        finite = torch.stack([job.shard.known.finite for job in jobs]).reshape(-1, *(1,) * len(shape))
        state = {name: x[name] for name in shard.shaped} | kept
        smoothed, x["m"], active = smooth(role, x["g"], state, finite)
        kept = {name: y for name, y in state.items() if name not in smoothed}
    else:
        active = tensors[-1] if shard.masked else torch.stack([job.masks()[i] for job in jobs])
        active = 1.0 if device.on_cpu(active) and bool((active == 1).all()) else active
    x["d"], kept = direct(role, stabiliser, x.get("w", x["m"]), x["m"], kept, active)  # m where w is not read
    if "move" in shard.way.owner:
        x["w"], kept = move(role, stabiliser, x["w"], x["d"], kept, lr * role.lr_scale(shape) * active)
    return x | smoothed | kept
