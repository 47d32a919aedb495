"""Steps of matrices that several processes hold: whole to an owner, stepped there, and back, a bucket at a time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.mesh.schedule import Schedule, Work, schedule
from surefoot.mesh.transport import Transport
from surefoot.optim.batching import split_blocks, stack_blocks, stacked_at_once, write_, write_back
from surefoot.optim.jobs import Job, advance, jobs_of
from surefoot.optim.param_groups import learning_rate
from surefoot.optim.precision import Precision
from surefoot.optim.shard import Shard
from surefoot.stabilise.running_bound import RunningBound
from surefoot.step import move, smooth
from surefoot.views.state import join_blocks, split_by_block


@dataclass(eq=False)
class Prepared:
    """What this process has of a parameter while it is exchanged.

    Args:
        sent: slabs of what the owner needs, until all of it is on its way.
        w: the slab of the weight, in the dtype of the step.
        active: which entries move, of the slab's shape; 1 for all.
        waiting: jobs that are not on their way.
        left: jobs that are not finished.
    """

    sent: list[Tensor]
    w: Tensor
    active: Tensor | float
    waiting: int
    left: int


class Exchange:
    """The parameters of one group of processes that are stepped by owners.

    Args:
        shards: the parameters, of one dtype and device.
        precision: in which numbers weights and momentum are kept.
        bounds: running bounds of the matrices that this process owns.
    """

    def __init__(self, shards: Sequence[Shard], precision: Precision, bounds: RunningBound) -> None:
        self._precision, self._bounds = precision, bounds
        self._dtype = torch.promote_types(shards[0].local.dtype, torch.float32)
        jobs = [job for shard in shards for job in jobs_of(shard, self._dtype)]
        self._jobs: dict[Work, Job] = {job.work: job for job in jobs}
        self.schedule: Schedule = schedule([*self._jobs])
        cut, like = shards[0].cut, torch.empty(0, dtype=self._dtype, device=shards[0].local.device)
        self._transport = Transport(self.schedule, cut.group, cut.mine, like)
        self._counts = Counter(job.shard for job in jobs)
        self._prepared: dict[Shard, Prepared] = {}
        self._groups: dict[Tensor, dict[str, Any]] = {}

    def step(self, groups: dict[Tensor, dict[str, Any]]) -> None:
        """Take one step of all of them.

        Args:
            groups: the parameter group of each parameter.
        """
        self._groups = groups
        self._transport.run(self._prepare, self._compute, self._finalize)

    def owned(self) -> list[tuple[Job, int]]:
        """Every job with its owner's index in the group."""
        return [(self._jobs[work], owner) for bucket in self.schedule for work, owner in bucket.works]

    def _prepare(self, work: Work) -> list[Tensor]:
        """This process's parts of what the owner of a job is sent."""
        job = self._jobs[work]
        if job.shard not in self._prepared:
            self._prepared[job.shard] = self._smoothed(job.shard, self._groups[job.shard.p])
        prepared = self._prepared[job.shard]
        parts = [x[job.region] for x in prepared.sent]
        prepared.waiting -= 1
        if not prepared.waiting:
            prepared.sent = []
        return parts

    def _smoothed(self, shard: Shard, group: dict[str, Any]) -> Prepared:
        """What this process has of a parameter at the start of a step, smoothed unless the owner does it."""
        x = {"g": shard.gradient().to(self._dtype)}
        x["g"] = -x["g"] if group["maximize"] else x["g"]
        x["w"] = self._precision.rounding(shard.local).read(shard.local, shard.state, self._dtype)
        x |= {name: shard.state[name].to(self._dtype) for name in shard.shaped}
        active: Tensor | float = 1.0
        if "smooth" not in shard.way.owner:
            active = shard.mask_of_slab(x["g"])
            role, finite = shard.placement.role, shard.known.finite.reshape(1, *(1,) * x["g"].ndim)
            before = {name: x.get(name, y)[None] for name, y in shard.state.items() if name in role.smoothed}
            after, m, active = smooth(role, x["g"][None], before, finite, active)
            x["m"] = m[0]
            for name, new in after.items():
                kept = self._precision.keep(new[0], shard.state[name], shard.state, shard.noise_index())
                if name not in shard.shaped:  # a count goes on unless there is no gradient on any process
                    kept = torch.where(shard.known.there, kept, shard.state[name])
                write_(shard.state[name], kept)
        if isinstance(active, Tensor):
            active = active[0].expand(x["w"].shape)
        sent = [x[name] for name in shard.names(shard.way.sent)]
        if shard.masked:
            sent.append(torch.as_tensor(active, device=x["w"].device).expand(x["w"].shape))
        return Prepared(sent, x["w"], active, self._counts[shard], self._counts[shard])

    def _compute(self, whole: dict[Work, list[Tensor]]) -> dict[Work, list[Tensor]]:
        """The owned jobs' results, like ones in batches."""
        like: dict[Any, list[Job]] = defaultdict(list)
        for job in map(self._jobs.__getitem__, whole):
            placement = job.placement
            like[placement.role, placement.shape, job.shard.way, id(self._groups[job.shard.p])].append(job)
        results: dict[Work, list[Tensor]] = {}
        for jobs in like.values():
            count = stacked_at_once(jobs[0].shard.local.device, jobs[0].work.box.numel)
            for some in (jobs[i : i + count] for i in range(0, len(jobs), count)):
                results |= self._batch(some, [whole.pop(job.work) for job in some])
        return results

    def _batch(self, jobs: list[Job], tensors: list[list[Tensor]]) -> dict[Work, list[Tensor]]:
        """Take the owner's part of the step of like jobs."""
        placement, role = jobs[0].placement, jobs[0].placement.role
        lr, back = learning_rate(self._groups[jobs[0].shard.p]), jobs[0].shard.names(jobs[0].shard.way.back)
        stacks = [stack_blocks(list(x), role.view) for x in zip(*tensors, strict=True)]
        tensors.clear()
        split = [split_by_block(job.kept(), placement.blocks) for job in jobs]
        kept = [{name: torch.stack([x[name] for x in own]) for name in own[0]} for own in zip(*split, strict=True)]
        if bounded := "upper" in kept[0]:  # on an accelerator certified each time: the weights come from elsewhere
            kept = self._bounds.revalidate([job.key for job in jobs], stacks[1], kept, role.weight_geometry, due=True)
        outs, there = [], torch.stack([job.shard.known.there for job in jobs])
        for i, old in enumerate(kept):
            new = advance(jobs, i, [stack[i] for stack in stacks], old, lr)
            outs.append([new[name] for name in back])
            for name, x in old.items():
                present = there.reshape(-1, *(1,) * (x.ndim - 1))
                old[name] = torch.where(present, new[name], x[tuple(slice(n) for n in new[name].shape)])
        results = [list(out) for out in zip(*outs, strict=True)]
        if bounded:
            self._bounds.record([job.key for job in jobs], results[0])
        wholes = [split_blocks(result, role.view, placement.shape) for result in results]
        found: dict[Work, list[Tensor]] = {}
        for j, job in enumerate(jobs):
            own = join_blocks([{name: x[j] for name, x in block.items()} for block in kept], role.owned)
            for name, x in job.owned().items():
                x.copy_(own[name])
            numbers = [own[name].reshape(-1).to(self._dtype) for name in job.numbers()]
            found[job.work] = [*(whole[j] for whole in wholes), torch.cat([stacks[0][0].new_empty(0), *numbers])]
        return found

    def _finalize(self, work: Work, tensors: list[Tensor], numbers: Tensor) -> None:
        """Take what has come home of a job; when the parameter's last part has come, write it back."""
        job = self._jobs[work]
        shard, region, prepared = job.shard, job.region, self._prepared[job.shard]
        places = list(job.numbers().values())
        for place, own in zip(places, torch.split(numbers, [place.numel() for place in places]), strict=True):
            place.copy_(own.reshape(place.shape))
        x = dict(zip(shard.names(shard.way.back), tensors, strict=True))
        if "move" not in shard.way.owner:
            x["w"] = self._moved(job, prepared, x.pop("d"))
        prepared.w[region] = x.pop("w")
        for name, new in x.items():
            write_(shard.state[name], self._precision.keep(new, shard.state[name], shard.state, shard.noise_index()))
        prepared.left -= 1
        if not prepared.left:
            write_back(shard.leaf(), prepared.w, {}, self._precision)
            del self._prepared[shard]

    def _moved(self, job: Job, prepared: Prepared, d: Tensor) -> Tensor:
        """The next weights of this process's part, from the direction; each block by its own stabiliser and rate."""
        placement, role, w, active = job.placement, job.placement.role, prepared.w[job.region], prepared.active
        lr = learning_rate(self._groups[job.shard.p])
        if isinstance(active, Tensor):
            active = active[job.region]
        kinds = {*zip(placement.stabilisers, map(role.lr_scale, placement.blocks), strict=True)}
        if len(kinds) == 1:
            ((stabiliser, scale),) = kinds
            return move(role, stabiliser, w, d, {}, lr * scale * active)[0]
        moved = w
        for stabiliser, scale in kinds:
            here = job.shard.blocks_like(stabiliser, scale)[job.region]
            moved = torch.where(here, move(role, stabiliser, w.clone(), d, {}, lr * scale * active)[0], moved)
        return moved
