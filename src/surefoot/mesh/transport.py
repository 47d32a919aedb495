"""Parts of tensors to their owners and results back, a bucket at a time, under way while others compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from surefoot.mesh.schedule import Bucket, Schedule, Work

Prepare = Callable[[Any], Sequence[Tensor]]
"""From a `Work` to this process's parts of what its owner is sent."""

Compute = Callable[[dict[Any, list[Tensor]]], dict[Any, list[Tensor]]]
"""From the whole tensors of the works that this process owns, which it may take out, to results: `Work.returned`
tensors of the work's box, then one of further numbers for everybody."""

Finalize = Callable[[Any, list[Tensor], Tensor], None]
"""Take this process's parts of a work's results, and the numbers."""

Coming = tuple[Any, Tensor, list[int]]
"""A collective under way with what it sends, what it fills, and how much of that comes from each process."""


class Transport:
    """The exchange of one group of processes.

    Args:
        schedule: what is computed where.
        group: the processes.
        rank: this one's index in the group.
        like: an empty tensor of the dtype and the device of what is sent.
    """

    def __init__(self, schedule: Schedule, group: dist.ProcessGroup | None, rank: int, like: Tensor) -> None:
        self.schedule = schedule
        self._group, self._rank, self._like = group, rank, like

    def run(self, prepare: Prepare, compute: Compute, finalize: Finalize) -> None:
        """Send, compute and return one bucket after the other; the next one is on its way while one is computed."""
        buckets, going = self.schedule.buckets, None
        coming = self._send(buckets[0], prepare)
        for bucket, following in zip(buckets, [*buckets[1:], None], strict=True):
            whole = self._whole(bucket, coming)
            coming = self._send(following, prepare) if following else None
            results = compute(whole)
            if going is not None:
                self._finish(*going, finalize)
            going = bucket, self._return(bucket, results)
            del results
        if going is not None:
            self._finish(*going, finalize)

    def _send(self, bucket: Bucket, prepare: Prepare) -> Coming | None:
        pieces = []
        for owner in range(self.schedule.ranks):
            for work in bucket.owned_by(owner):
                pieces += [x.reshape(-1) for x in prepare(work)]
        return None if bucket.copied else self._start(pieces, *bucket.counts(self._rank, Work.out))

    def _return(self, bucket: Bucket, results: dict[Any, list[Tensor]]) -> Coming:
        pieces = []
        for rank in [self._rank] if bucket.copied else range(self.schedule.ranks):
            for work in bucket.owned_by(self._rank):
                *tensors, numbers = results[work]
                part = work.parts[rank].within(work.box)
                pieces += [*(x[part].reshape(-1) for x in tensors), numbers]
        received, sent = bucket.counts(self._rank, Work.back)
        return self._start(pieces, sent, received, bucket.copied)

    def _start(self, pieces: list[Tensor], sent: list[int], received: list[int], alike: bool = False) -> Coming:
        """One all-to-all; where everybody is sent alike, an all-gather, padded to the longest."""
        outgoing = torch.cat([self._like, *pieces])
        if alike:
            received = [max(received)] * len(received)
            outgoing = torch.nn.functional.pad(outgoing, (0, received[0] - len(outgoing)))
        incoming = self._like.new_empty(sum(received))
        if alike:
            handle = dist.all_gather(list(torch.split(incoming, received)), outgoing, self._group, async_op=True)
        else:
            handle = dist.all_to_all_single(incoming, outgoing, received, sent, self._group, async_op=True)
        return (handle, outgoing), incoming, received

    def _whole(self, bucket: Bucket, coming: Coming | None) -> dict[Work, list[Tensor]]:
        """The whole tensors of the works that this process owns, from everybody's parts; none where it has all."""
        mine = bucket.owned_by(self._rank)
        whole = {work: [self._like.new_empty(work.box.size) for _ in range(work.sent)] for work in mine}
        for rank, numbers in enumerate(_arrived(coming) if coming else ()):
            start = 0
            for work in mine:
                part = work.parts[rank]
                for x in whole[work]:
                    x[part.within(work.box)] = numbers[start : start + part.numel].reshape(part.size)
                    start += part.numel
        return whole

    def _finish(self, bucket: Bucket, coming: Coming, finalize: Finalize) -> None:
        for owner, numbers in enumerate(_arrived(coming)):
            for work in bucket.owned_by(owner):
                part = work.parts[self._rank]
                sizes = [*[part.numel] * work.returned, work.numbers]
                *tensors, own, numbers = torch.split(numbers, [*sizes, len(numbers) - sum(sizes)])
                finalize(work, [x.reshape(part.size) for x in tensors], own)


def _arrived(coming: Coming) -> Sequence[Tensor]:
    """What has come from each process, flat."""
    (handle, _), incoming, received = coming
    handle.wait()
    return torch.split(incoming, received)
