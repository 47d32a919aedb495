"""How tensors travel to the processes that compute with them, and results back, a bucket at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from surefoot.mesh.groups import Cut, apart
from surefoot.mesh.schedule import Bucket, Work

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
    """The exchange of one group of processes, a bucket at a time, under way while others compute.

    Args:
        buckets: what is computed where.
        cut: the processes, as a parameter is cut over them.
        like: an empty tensor of the dtype and the device of what is sent.
        copied: whether everybody has all entries already, and owners are sent nothing.
    """

    def __init__(self, buckets: list[Bucket], cut: Cut, like: Tensor, copied: bool) -> None:
        self._buckets, self._like, self._copied = buckets, like, copied
        self._group, self._rank = cut.group, cut.mine

    def run(self, prepare: Prepare, compute: Compute, finalize: Finalize) -> None:
        """Send, compute and return one bucket after the other; the next one is on its way while one is computed."""
        going, coming = None, self._send(self._buckets[0], prepare)
        for bucket, following in zip(self._buckets, [*self._buckets[1:], None], strict=True):
            whole = self._whole(bucket[self._rank], coming)
            coming = self._send(following, prepare) if following else None
            results = compute(whole)
            if going is not None:
                self._finish(*going, finalize)
            going = bucket, self._return(bucket, results)
            del results
        if going is not None:
            self._finish(*going, finalize)

    def _send(self, bucket: Bucket, prepare: Prepare) -> Coming | None:
        pieces = [[x.reshape(-1) for work in works for x in prepare(work)] for works in bucket]
        sizes = [sum(work.sent * work.parts[rank].numel for work in bucket[self._rank]) for rank in range(len(bucket))]
        return None if self._copied else self._start(pieces, sizes)

    def _return(self, bucket: Bucket, results: dict[Any, list[Tensor]]) -> Coming:
        def parts(work: Work, rank: int) -> list[Tensor]:
            *tensors, numbers = results[work]
            part = work.parts[rank].within(work.box)
            return [*(x[part].reshape(-1) for x in tensors), numbers]

        mine, ranks = bucket[self._rank], range(1 if self._copied else len(bucket))
        pieces = [[x for work in mine for x in parts(work, rank)] for rank in ranks]
        return self._start(pieces, [sum(map(sum, map(self._sizes, works))) for works in bucket])

    def _sizes(self, work: Work) -> list[int]:
        """Numbers that this process is sent of each tensor of a work's results, then the further ones."""
        return [*[work.parts[self._rank].numel] * work.returned, work.numbers]

    def _start(self, pieces: list[list[Tensor]], received: list[int]) -> Coming:
        """One all-to-all of pieces for each process; of copies an all-gather, padded to the longest."""
        outgoing = torch.cat([self._like, *(x for own in pieces for x in own)])
        if self._copied:
            received = [max(received)] * len(received)
            outgoing = torch.nn.functional.pad(outgoing, (0, received[0] - len(outgoing)))
        incoming = self._like.new_empty(sum(received))
        if self._copied:
            handle = dist.all_gather(list(torch.split(incoming, received)), outgoing, self._group, async_op=True)
        else:
            sent = [sum(map(len, own)) for own in pieces]
            handle = dist.all_to_all_single(incoming, outgoing, received, sent, self._group, async_op=True)
        return (handle, outgoing), incoming, received

    def _whole(self, mine: list[Work], coming: Coming | None) -> dict[Work, list[Tensor]]:
        """The whole tensors of the works that this process owns, from everybody's parts; none where it has all."""
        whole = {work: [self._like.new_empty(work.box.size) for _ in range(work.sent)] for work in mine}
        for rank, numbers in enumerate(_arrived(coming) if coming else ()):
            parts = [(x, work.parts[rank], work.box) for work in mine for x in whole[work]]
            for (x, part, box), own in zip(parts, apart(numbers, [part.size for _, part, _ in parts]), strict=True):
                x[part.within(box)] = own
        return whole

    def _finish(self, bucket: Bucket, coming: Coming, finalize: Finalize) -> None:
        for works, numbers in zip(bucket, _arrived(coming), strict=True):
            for work in works:
                sizes = self._sizes(work)
                *tensors, own, numbers = torch.split(numbers, [*sizes, len(numbers) - sum(sizes)])
                finalize(work, [x.reshape(work.parts[self._rank].size) for x in tensors], own)


def _arrived(coming: Coming) -> Sequence[Tensor]:
    """What has come from each process, flat."""
    (handle, _), incoming, received = coming
    handle.wait()
    return torch.split(incoming, received)
