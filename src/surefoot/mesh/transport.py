"""Exchange of tensors with the owner ranks that compute with them, one bucket at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from surefoot.mesh.groups import Cut, apart
from surefoot.mesh.schedule import Bucket, Work

Prepare = Callable[[Any], Sequence[Tensor]]
"""`Work` -> this process's parts of the tensors to send to its owner."""

Compute = Callable[[dict[Any, list[Tensor]]], dict[Any, list[Tensor]]]
"""The owned works' whole tensors, which it may pop, -> each work's results: `Work.returned` tensors of the work's box,
then one of further numbers for every process."""

Finalize = Callable[[Any, list[Tensor], Tensor], None]
"""Takes a work, this process's parts of its results, and the further numbers."""

Coming = tuple[Any, Tensor, list[int]]
"""A collective under way: its handle with the send buffer, its receive buffer, and the entries from each process."""


class Transport:
    """The exchange within one process group: the next bucket is sent while one is computed.

    Args:
        buckets: the works that each process owns, in order.
        cut: of any parameter over these processes, for the group and this process's index.
        like: an empty tensor of the dtype and the device of what is sent.
        copied: whether every process already has all entries, so that owners are sent nothing.
    """

    def __init__(self, buckets: list[Bucket], cut: Cut, like: Tensor, copied: bool) -> None:
        self._buckets, self._like, self._copied = buckets, like, copied
        self._group, self._rank = cut.group, cut.mine

    def run(self, prepare: Prepare, compute: Compute, finalize: Finalize) -> None:
        """Send, compute and return one bucket after the other; the next one is sent while one is computed."""
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
        """How many entries of each result of a work this process receives, then how many further numbers."""
        return [*[work.parts[self._rank].numel] * work.returned, work.numbers]

    def _start(self, pieces: list[list[Tensor]], received: list[int]) -> Coming:
        """Start an all-to-all of the pieces for each process; for replicas an all-gather, padded to the longest."""
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
        """Assemble the owned works' whole tensors from every process's parts; no tensors where none are sent."""
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
    """Wait for a collective; returns what each process sent, flat."""
    (handle, _), incoming, received = coming
    handle.wait()
    return torch.split(incoming, received)
