"""Steps of sharded matrices: each goes whole to its owner rank, is stepped there and comes back, bucket by bucket."""

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from surefoot.linalg import device
from surefoot.mesh.groups import apart
from surefoot.mesh.schedule import Bucket, Work, cost, schedule
from surefoot.mesh.slabs import Slab
from surefoot.mesh.transport import Transport
from surefoot.momentum import State
from surefoot.optim.batching import Batch, batches, by_block, named, stack_blocks
from surefoot.optim.param_groups import learning_rate
from surefoot.optim.precision import Leaf, Precision, average
from surefoot.optim.shard import REPLICAS, Shard, part_of
from surefoot.plan import Placement
from surefoot.stabilise.running_bound import RunningBound
from surefoot.step import move, smooth


@dataclass(frozen=True, eq=False, kw_only=True)
class Job(Work):
    """A matrix, an expert or a vector that its owner rank steps whole.

    Args:
        shard: this process's shard of the parameter.
        placement: role and shape of the whole parameter, or of one expert.
        key: identifies the matrix in a `RunningBound`.
    """

    shard: Shard
    placement: Placement
    key: Tensor

    @cached_property
    def region(self) -> tuple[slice, ...]:
        """Slices of this process's slab that belong to this job."""
        return self.parts[self.shard.cut.mine].within(self.shard.cut.slab)

    def entries(self, names: Iterable[str]) -> State:
        """The named entries of the shard's state, cut to this job's rows."""
        state = self.shard.state
        return {name: self.own(state[name]) for name in names}

    def own(self, x: Tensor) -> Tensor:
        """This job's rows of a tensor with one row per matrix of the stack; a single row serves all jobs."""
        if self.placement is self.shard.placement or not x.ndim or len(x) == 1:
            return x
        each, expert = self.placement.blocks[0][0], self.box.start[0]
        return x[each * expert : each * (expert + 1)]


def jobs_of(shard: Shard, dtype: torch.dtype) -> list[Job]:
    """Split a parameter into jobs: one per expert of a stack, else one."""
    placement, shape = shard.placement, shard.placement.shape
    boxes = [Slab.of(shape)]
    if placement.role.view.stacked and "m" in shard.way.sent and shape[0] > 0:
        placement = part_of(placement, (1, *shape[1:]), placement.role.view)
        boxes = [Slab((i, *boxes[0].start[1:]), placement.shape) for i in range(shape[0])]
    numbers = sum(shard.state[name].numel() for name in shard.small) // len(boxes)
    each = sum(cost(*block) for block in placement.blocks)
    sent = 0 if shard.way is REPLICAS else len(shard.sent)
    work = (shard.cut.slabs, each, sent, len(shard.back), numbers, dtype.itemsize)
    return [Job(box, *work, shard=shard, placement=placement, key=shard.local.new_empty(0)) for box in boxes]


Parts = dict[Job, list[Tensor]]
"""Each job not yet sent -> this process's parts of the tensors that its owner needs."""

Home = tuple[Job, list[Tensor], Tensor]
"""A finished job, this process's parts of its results, and the numbers that its owner sends to every process."""


class Exchange:
    """Steps those parameters of one process group whose matrices are stepped by owner ranks.

    Args:
        shards: the parameters, all of one dtype and device.
        precision: the formats in which weights and momentum are stored.
        bounds: running bounds of the matrices that this process owns.
    """

    def __init__(self, shards: Sequence[Shard], precision: Precision, bounds: RunningBound) -> None:
        self._precision, self._bounds = precision, bounds
        self._dtype = torch.promote_types(shards[0].local.dtype, torch.float32)
        like = shards[0].local.new_empty(0, dtype=self._dtype)
        self._jobs = {shard: jobs_of(shard, self._dtype) for shard in shards}
        self.buckets: list[Bucket] = schedule([job for jobs in self._jobs.values() for job in jobs])
        self._transport = Transport(self.buckets, shards[0].cut, like, shards[0].way is REPLICAS)
        self._going: dict[Shard, tuple[Generator[Parts, Home, None], Parts]] = {}

    def step(self) -> None:
        """Take one step of all parameters."""
        self._going.clear()  # of a step that raised
        self._transport.run(self._prepare, self._compute, self._finalize)

    @property
    def owners(self) -> list[tuple[Any, int]]:
        """Every job with its owner's index in the group."""
        return [(job, owner) for bucket in self.buckets for owner, jobs in enumerate(bucket) for job in jobs]

    def _prepare(self, job: Job) -> list[Tensor]:
        """This process's parts of the tensors to send to a job's owner."""
        if job.shard not in self._going:
            step = self._step_of(job.shard)
            self._going[job.shard] = step, next(step)
        return self._going[job.shard][1].pop(job) if job.sent else []

    def _step_of(self, shard: Shard) -> Generator[Parts, Home, None]:
        """A parameter's step on this process: yields the parts to send, and receives each job's results by `send`."""
        leaf, w, active, parts = self._smoothed(shard)
        for _ in self._jobs[shard]:
            job, tensors, numbers = yield parts
            places = list(job.entries(shard.small).values())
            for place, own in zip(places, apart(numbers, [place.shape for place in places]), strict=True):
                place.copy_(own)
            back = dict(zip(shard.back, tensors, strict=True))
            w[job.region] = back.pop("w") if "w" in back else _moved(job, w, back.pop("d"), active)
            self._precision.write_state_(leaf, back)
        self._precision.write_(leaf, w)

    def _smoothed(self, shard: Shard) -> tuple[Leaf, Tensor, Tensor | float, Parts]:
        """Smooth a gradient unless its owner does; returns leaf, weights, active mask (1: all move), parts to send."""
        leaf, role, dtype = shard.leaf(), shard.placement.role, self._dtype
        w, g = self._precision.read(leaf), leaf.grad.to(dtype)
        x: dict[str, Any] = {"w": w, "g": -g if leaf.group["maximize"] else g, "active": 1.0}
        x |= {name: average(leaf.state, name, dtype) for name in role.shaped}
        if "m" in shard.sent:
            before = {name: x.get(name, y)[None] for name, y in leaf.state.items() if name in role.smoothed}
            finite = shard.agreed.finite.reshape((1,) * (w.ndim + 1))
            after, (x["m"],), x["active"] = smooth(role, x["g"][None], before, finite, shard.mask(dtype))
            self._precision.write_state_(leaf, {name: y[0] for name, y in after.items()})
        if isinstance(x["active"], Tensor) or "active" in shard.sent:
            x["active"] = device.scalar_like(x["active"], w, dtype).expand(1, *w.shape)[0]
        return leaf, w, x["active"], {job: [x[name][job.region] for name in shard.sent] for job in self._jobs[shard]}

    def _compute(self, whole: dict[Job, list[Tensor]]) -> dict[Job, list[Tensor]]:
        """Results of the jobs that this process owns, computed in batches of like jobs."""
        results: dict[Job, list[Tensor]] = {}
        for jobs in batches([*whole], self._alike):
            results |= self._batch(jobs, [whole.pop(job) or self._going[job.shard][1].pop(job) for job in jobs])
        return results

    def _alike(self, job: Job) -> Any:
        """Key that is equal for jobs that may be stepped together."""
        return job.key.device, job.placement.shape, job.placement.roles, job.shard.way, id(job.shard.group)

    def _batch(self, jobs: list[Job], tensors: list[list[Tensor]]) -> Iterator[tuple[Job, list[Tensor]]]:
        """Take the owner's part of the step of like jobs; yields each job with its results."""
        shard, placement = jobs[0].shard, jobs[0].placement
        x = {n: stack_blocks(own, placement.role.view) for n, *own in zip(shard.sent, *tensors, strict=True)}
        tensors.clear()
        agreed = ([job.own(mask) for mask in job.shard.agreed.masks] for job in jobs)
        masks: list[Any] = x.get("active") or [torch.stack(own) for own in zip(*agreed, strict=True)]
        if "m" in x:  # active masks; those of raw gradients only say which are finite
            masks = [1.0 if device.on_cpu(mask) and bool(mask.all()) else mask.to(x["m"][0].dtype) for mask in masks]
        kept = [job.entries([*job.shard.small, *job.shard.owned]) for job in jobs]
        states = by_block(kept, placement, {name: x[name] for name in placement.role.shaped if name in x})
        m = x.get("m") or x["g"]
        w = x.get("w") or m  # where w is not sent, the step does not read it
        batch = Batch(placement, shard.group, [job.key for job in jobs], w, m, states, masks, placement.role.shaped)
        with named(shard.cut.name):
            stepped = batch.step(shard.way.take, self._bounds, foreign=True)
        for job, places, (out, new) in zip(jobs, kept, stepped, strict=True):
            for name, place in places.items():
                place.copy_(torch.where(job.shard.agreed.there, new[name], place))
            numbers = [places[name].reshape(-1).to(out.dtype) for name in job.shard.small]
            yield job, [out, *(new[name] for name in shard.back[1:]), torch.cat([out.new_empty(0), *numbers])]

    def _finalize(self, job: Job, tensors: list[Tensor], numbers: Tensor) -> None:
        """Pass a finished job to its parameter's step, which ends with the last job."""
        try:
            self._going[job.shard][0].send((job, tensors, numbers))
        except StopIteration:
            del self._going[job.shard]


def _moved(job: Job, whole: Tensor, d: Tensor, active: Tensor | float) -> Tensor:
    """This process's part of the next weights, from the direction d; each block moves by its own rule."""
    lr, (kinds, labels) = learning_rate(job.shard.group), job.shard.kinds
    active = active[job.region] if isinstance(active, Tensor) else active
    w = moved = whole[job.region]
    for i, (role, stabiliser, scale) in enumerate(kinds):
        own, _ = move(role, stabiliser, w.clone() if i < len(kinds) - 1 else w, d, {}, lr * scale * active)
        moved = torch.where(labels[job.region] == i, own, moved) if i else own
    return moved
