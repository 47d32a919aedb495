"""Parts of tensors to their owners and results back: two all-to-alls a bucket, under way while others compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from surefoot.mesh.schedule import PACKED, Bucket, Schedule, Work

Prepare = Callable[[Work], Sequence[Tensor]]
"""This process's parts of what the owner of a work is sent, its mask last."""

Compute = Callable[[dict[Work, list[Tensor]]], dict[Work, list[Tensor]]]
"""From the whole tensors of the works that this process owns, which it may take out, to results: `Work.returned`
tensors of the work's box, then one of further numbers for everybody."""

Finalize = Callable[[Work, list[Tensor], Tensor], None]
"""Take this process's parts of a work's results, and the numbers."""


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
        buckets = list(self.schedule)
        coming: Any = self._send(buckets[0], prepare)
        going: tuple[Bucket, Any] | None = None
        for bucket, following in zip(buckets, [*buckets[1:], None], strict=True):
            whole, coming = self._whole(bucket, coming), following and self._send(following, prepare)
            results = compute(whole)
            if going is not None:
                self._finish(going, finalize)
            going = (bucket, self._return(bucket, results))
            del results
        if going is not None:
            self._finish(going, finalize)

    def _send(self, bucket: Bucket, prepare: Prepare) -> Any:
        pieces = []
        for owner in range(self.schedule.ranks):
            for work in bucket.owned_by(owner):
                parts = list(prepare(work))
                if work.masked:
                    parts[-1] = packed(parts[-1], self._like.dtype)
                pieces += [x.reshape(-1) for x in parts]
        return self._start(pieces, bucket.outward(self._rank))

    def _return(self, bucket: Bucket, results: dict[Work, list[Tensor]]) -> Any:
        pieces = []
        for rank in range(self.schedule.ranks):
            for work in bucket.owned_by(self._rank):
                *tensors, numbers = results[work]
                part = work.parts[rank].within(work.box)
                pieces += [x[part].reshape(-1) for x in tensors]
                pieces.append(numbers.to(self._like.dtype))
        return self._start(pieces, bucket.homeward(self._rank))

    def _start(self, pieces: list[Tensor], counts: list[tuple[int, int]]) -> tuple[Any, Tensor, list[int]]:
        """One all-to-all under way: its handle, what it fills, and how much comes from each process."""
        sent, received = map(list, zip(*counts, strict=True))
        outgoing = torch.cat(pieces) if pieces else self._like.new_empty(0)
        assert outgoing.numel() == sum(sent)
        incoming = self._like.new_empty(sum(received))
        handle = dist.all_to_all_single(incoming, outgoing, received, sent, self._group, async_op=True)
        return (handle, outgoing), incoming, received

    def _whole(self, bucket: Bucket, arrived: tuple[Any, Tensor, list[int]]) -> dict[Work, list[Tensor]]:
        """The whole tensors of the works that this process owns, from everybody's parts."""
        (handle, _), incoming, received = arrived
        handle.wait()
        mine = bucket.owned_by(self._rank)
        whole = {work: [incoming.new_empty(work.box.size) for _ in work.sizes(self._rank)] for work in mine}
        for rank, chunk in enumerate(torch.split(incoming, received)):
            numbers = iter(torch.split(chunk, [size for work in mine for size in work.sizes(rank)]))
            for work in mine:
                part = work.parts[rank]
                for i, x in enumerate(whole[work]):
                    own = next(numbers)
                    own = own.reshape(part.size) if i < work.sent else unpacked(own, part.size)
                    x[part.within(work.box)] = own
        return whole

    def _finish(self, going: tuple[Bucket, Any], finalize: Finalize) -> None:
        bucket, ((handle, _), incoming, received) = going
        handle.wait()
        for owner, chunk in enumerate(torch.split(incoming, received)):
            for work in bucket.owned_by(owner):
                part = work.parts[self._rank]
                *tensors, numbers, chunk = torch.split(
                    chunk, [*[part.numel] * work.returned, work.numbers, len(chunk) - work.back(self._rank)]
                )
                finalize(work, [x.reshape(part.size) for x in tensors], numbers)


def packed(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask, flat, `PACKED` entries a number.

    >>> packed(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.float32)
    tensor([13.])
    """
    bits = torch.nn.functional.pad(mask.reshape(-1).to(torch.int32), (0, -mask.numel() % PACKED))
    return (bits.reshape(-1, PACKED) << torch.arange(PACKED, device=mask.device)).sum(1).to(dtype)


def unpacked(numbers: Tensor, size: tuple[int, ...]) -> Tensor:
    """The mask of this size again: the inverse of `packed`."""
    bits = (numbers.to(torch.int32)[:, None] >> torch.arange(PACKED, device=numbers.device)) & 1
    return bits.reshape(-1)[: math.prod(size)].reshape(size).to(numbers.dtype)
