"""Steps of matrices that several processes hold: whole to an owner, stepped there, and back, a bucket at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from surefoot.mesh.schedule import Bucket, Schedule, schedule
from surefoot.momentum import State, where_finite
from surefoot.monitor.norms import join_blocks, split_by_block
from surefoot.optim.batching import split_blocks, stack_blocks, stacked_at_once, write_, write_back
from surefoot.optim.jobs import Job, advance, jobs_of, packed, unpacked
from surefoot.optim.param_groups import learning_rate
from surefoot.optim.precision import Precision
from surefoot.optim.shard import Shard
from surefoot.stabilise.running_bound import RunningBound
from surefoot.step import move


@dataclass(eq=False)
class Prepared:
    """What this process has of a parameter while it is exchanged.

    Args:
        sent: slabs of the tensors that the owner needs, until all of it is on its way.
        w: the slab of the weight, in the dtype of the step.
        active: which entries move, broadcasting to the slab; 1 for all.
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
        self._precision, self._bounds, self._group = precision, bounds, shards[0].cut.group
        self._me = shards[0].cut.mine
        self._dtype = torch.promote_types(shards[0].local.dtype, torch.float32)
        self._jobs = {id(job.work): job for shard in shards for job in jobs_of(shard, self._dtype)}
        self.schedule: Schedule = schedule([job.work for job in self._jobs.values()])
        self._counts: dict[Shard, int] = defaultdict(int)
        for job in self._jobs.values():
            self._counts[job.shard] += 1
        self._prepared: dict[Shard, Prepared] = {}

    def step(self, groups: dict[Tensor, dict[str, Any]]) -> None:
        """Take one step of all of them.

        Args:
            groups: the parameter group of each parameter.
        """
        buckets = list(self.schedule)
        coming: Any = self._send(buckets[0], groups)
        going: tuple[Bucket, Any] | None = None
        for bucket, following in zip(buckets, [*buckets[1:], None], strict=True):
            whole, coming = self._whole(bucket, coming), None
            coming = following and self._send(following, groups)  # under way while this is computed
            results = self._compute(whole, groups)
            if going is not None:
                self._finish(*going, groups)
            going = (bucket, self._return(bucket, results))
            del results
        if going is not None:
            self._finish(*going, groups)

    def owned(self) -> list[tuple[Job, int]]:
        """Every job with its owner's index in the group."""
        return [(self._jobs[id(work)], owner) for bucket in self.schedule for work, owner in bucket.works]

    def _mine(self, bucket: Bucket, owner: int) -> list[Job]:
        return [self._jobs[id(work)] for work, who in bucket.works if who == owner]

    def _send(self, bucket: Bucket, groups: dict[Tensor, dict[str, Any]]) -> tuple[Any, Tensor, list[int]]:
        """Start sending this process's parts to their owners."""
        pieces = []
        for owner in range(self.schedule.ranks):
            for job in self._mine(bucket, owner):
                prepared = self._prepare(job.shard, groups[job.shard.p])
                pieces += [x[job.region].reshape(-1) for x in prepared.sent]
                if job.work.masked:
                    mask = torch.as_tensor(prepared.active, device=prepared.w.device).expand(prepared.w.shape)
                    pieces.append(packed(mask[job.region], self._dtype))
                prepared.waiting -= 1
                if not prepared.waiting:
                    prepared.sent = []
        return self._start(pieces, bucket.outward(self._me))

    def _start(self, pieces: list[Tensor], counts: list[tuple[int, int]]) -> tuple[Any, Tensor, list[int]]:
        """One all-to-all under way: its handle, what it fills, and how much comes from each process."""
        sent, received = map(list, zip(*counts, strict=True))
        outgoing = torch.cat(pieces) if pieces else self._empty(0)
        assert outgoing.numel() == sum(sent)
        incoming = self._empty(sum(received))
        handle = dist.all_to_all_single(incoming, outgoing, received, sent, self._group, async_op=True)
        return (handle, outgoing), incoming, received

    def _empty(self, size: int) -> Tensor:
        where = next(iter(self._jobs.values())).shard.local.device
        return torch.empty(size, dtype=self._dtype, device=where)

    def _prepare(self, shard: Shard, group: dict[str, Any]) -> Prepared:
        """Smooth the gradient's slab, once a step."""
        if shard in self._prepared:
            return self._prepared[shard]
        g = shard.gradient().to(self._dtype)
        g = -g if group["maximize"] else g
        w = self._precision.rounding(shard.local).read(shard.local, shard.state, self._dtype)
        states = {name: shard.state[name].to(self._dtype) for name in shard.shaped}
        active: Tensor | float = 1.0
        if shard.way == "all":
            sent = [g, w, *states.values()]
        else:
            active = shard.mask_of_slab(g)
            scalars = {name: shard.state[name] for name in shard.placement.role.smoothed - states.keys()}
            before = {name: x[None] for name, x in (states | scalars).items()}
            finite = shard.known.finite.reshape(1, *(1,) * g.ndim)
            after, m = shard.placement.role.momentum(before, where_finite(g[None], finite), active)
            for name, x in after.items():
                kept = self._precision.keep(x[0], shard.state[name], shard.state, shard.noise_index())
                if name in scalars:  # a count goes on unless there is no gradient on any process
                    kept = torch.where(shard.known.there, kept, shard.state[name])
                write_(shard.state[name], kept)
            active = active[0] if isinstance(active, Tensor) else active
            sent = [m[0]] if shard.way == "direction" else [m[0], w]
        self._prepared[shard] = Prepared(sent, w, active, self._counts[shard], self._counts[shard])
        return self._prepared[shard]

    def _whole(self, bucket: Bucket, arrived: tuple[Any, Tensor, list[int]]) -> dict[Job, list[Tensor]]:
        """The whole tensors of the jobs that this process owns, from everybody's parts."""
        (handle, _), incoming, received = arrived
        handle.wait()
        mine = self._mine(bucket, self._me)
        whole = {job: [incoming.new_empty(job.work.box.size) for _ in job.work.sizes(self._me)] for job in mine}
        for rank, chunk in enumerate(torch.split(incoming, received)):
            start = 0
            for job in mine:
                part = job.work.parts[rank]
                for i, (x, size) in enumerate(zip(whole[job], job.work.sizes(rank), strict=True)):
                    numbers = chunk[start : start + size]
                    own = numbers.reshape(part.size) if i < job.work.sent else unpacked(numbers, part.size)
                    x[part.within(job.work.box)] = own
                    start += size
        return whole

    def _compute(
        self, whole: dict[Job, list[Tensor]], groups: dict[Tensor, dict[str, Any]]
    ) -> dict[Job, tuple[list[Tensor], State]]:
        """The owned jobs' results, like ones in batches: tensors of their boxes, and numbers."""
        like: dict[Any, list[Job]] = defaultdict(list)
        for job in whole:
            placement = job.placement
            like[placement.role, placement.shape, job.shard.way, id(groups[job.shard.p])].append(job)
        results: dict[Job, tuple[list[Tensor], State]] = {}
        for jobs in like.values():
            count = stacked_at_once(jobs[0].shard.local.device, jobs[0].work.box.numel)
            for some in (jobs[i : i + count] for i in range(0, len(jobs), count)):
                results |= self._batch(some, [whole.pop(job) for job in some], groups[some[0].shard.p])
        return results

    def _batch(
        self, jobs: list[Job], tensors: list[list[Tensor]], group: dict[str, Any]
    ) -> dict[Job, tuple[list[Tensor], State]]:
        """Take the step of like jobs."""
        placement, role = jobs[0].placement, jobs[0].placement.role
        stacks = [stack_blocks(list(x), role.view) for x in zip(*tensors, strict=True)]
        tensors.clear()
        split = [split_by_block(job.kept(), placement.blocks) for job in jobs]
        kept = [{name: torch.stack([x[name] for x in own]) for name in own[0]} for own in zip(*split, strict=True)]
        bounded = "upper" in kept[0]
        if bounded:  # on an accelerator certified at every step: the weights come from elsewhere
            kept = self._bounds.revalidate([job.key for job in jobs], stacks[1], kept, role.weight_geometry, due=True)
        outs, there = [], torch.stack([job.shard.known.there for job in jobs])
        for i, old in enumerate(kept):
            found, new = advance(jobs, i, [stack[i] for stack in stacks], old, learning_rate(group))
            outs.append(found)
            for name, x in old.items():
                present = there.reshape(-1, *(1,) * (x.ndim - 1))
                old[name] = torch.where(present, new[name], x[tuple(slice(n) for n in new[name].shape)])
        results = [list(out) for out in zip(*outs, strict=True)]
        if bounded:
            self._bounds.record([job.key for job in jobs], results[0])
        wholes = [split_blocks(result, role.view, placement.shape) for result in results]
        found_of: dict[Job, tuple[list[Tensor], State]] = {}
        for j, job in enumerate(jobs):
            own = join_blocks([{name: x[j] for name, x in block.items()} for block in kept], role.owned)
            for name, x in job.owned().items():
                x.copy_(own[name])
            found_of[job] = ([whole[j] for whole in wholes], {name: own[name] for name in job.numbers()})
        return found_of

    def _return(self, bucket: Bucket, results: dict[Job, tuple[list[Tensor], State]]) -> Any:
        """Start sending results to all who hold a part."""
        pieces = []
        for rank in range(self.schedule.ranks):
            for job in self._mine(bucket, self._me):
                tensors, numbers = results[job]
                part = job.work.parts[rank].within(job.work.box)
                pieces += [x[part].reshape(-1) for x in tensors]
                pieces += [x.reshape(-1).to(self._dtype) for x in numbers.values()]
        return self._start(pieces, bucket.homeward(self._me))

    def _finish(self, bucket: Bucket, returned: Any, groups: dict[Tensor, dict[str, Any]]) -> None:
        """Write what has come home."""
        (handle, _), incoming, received = returned
        handle.wait()
        for owner, chunk in enumerate(torch.split(incoming, received)):
            start = 0
            for job in self._mine(bucket, owner):
                part, tensors = job.work.parts[self._me], []
                for _ in range(job.work.returned):
                    tensors.append(chunk[start : start + part.numel].reshape(part.size))
                    start += part.numel
                for place in job.numbers().values():
                    place.copy_(chunk[start : start + place.numel()].reshape(place.shape))
                    start += place.numel()
                self._apply(job, tensors, groups[job.shard.p])

    def _apply(self, job: Job, tensors: list[Tensor], group: dict[str, Any]) -> None:
        """Move this process's part; when the parameter's last part has come, write it back."""
        shard, prepared = job.shard, self._prepared[job.shard]
        region, names = job.region, job.shard.shaped
        if shard.way == "direction":
            prepared.w[region] = self._moved(job, prepared, tensors[0], learning_rate(group))
        else:
            prepared.w[region] = tensors[0]
            for name, x in zip(names, tensors[1:], strict=False):
                index = shard.noise_index()
                write_(shard.state[name], self._precision.keep(x, shard.state[name], shard.state, index))
        prepared.left -= 1
        if not prepared.left:
            write_back(shard.leaf(), prepared.w, {}, self._precision)
            del self._prepared[shard]

    def _moved(self, job: Job, prepared: Prepared, d: Tensor, lr: float | Tensor) -> Tensor:
        """The next weights of this process's part, from the direction."""
        role, placement, region = job.placement.role, job.placement, job.region
        w, active = prepared.w[region], prepared.active
        if isinstance(active, Tensor):
            active = active.expand(prepared.w.shape)[region]
        moved = None
        kinds = list(dict.fromkeys(zip(placement.stabilisers, map(role.lr_scale, placement.blocks), strict=True)))
        for stabiliser, scale in kinds:
            eta = lr * scale * active
            new, _ = move(role, stabiliser, w if len(kinds) == 1 else w.clone(), d, {}, eta)
            if moved is None:
                moved = new
            else:
                here = job.shard.blocks_like(stabiliser, scale)[region]
                moved = torch.where(here, new, moved)
        assert moved is not None
        return moved
