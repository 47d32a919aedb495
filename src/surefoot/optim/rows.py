"""Tables whose rows lie on several processes, under schemes that need the norm of all rows: one reduced number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from surefoot.geometry.base import ChangeBounds, Completed, Geometry
from surefoot.optim.batching import Batch, Blocks, load, store
from surefoot.optim.param_groups import learning_rate
from surefoot.optim.precision import Precision
from surefoot.optim.shard import Shard
from surefoot.stabilise.base import Moved, where_moved
from surefoot.step import direct, smooth


@dataclass(frozen=True)
class Reduced(Completed):
    """A norm that is the largest of the rows': of the rows here, or, where that is known, of all rows.

    Args:
        norm_of: the norm.
        asked: the norms of the rows here, in the order in which a scheme asked for them.
        known: those of all rows, if they are known already.
    """

    asked: list[Tensor] = field(default_factory=list)
    known: Iterator[Tensor] | None = None

    def norm(self, w: Tensor) -> Tensor:
        """Of all rows if it is known; else of those here, which is remembered."""
        if self.known is not None:
            return next(self.known)
        self.asked.append(self.norm_of.norm(w))
        return self.asked[-1]

    def is_zero(self, w: Tensor) -> Tensor:
        """Whether all rows are zero."""
        return self.norm(w)[(..., *(None,) * self.ndim)] == 0


def step_by_rows(shards: list[Shard], groups: dict[Tensor, dict[str, Any]], precision: Precision) -> None:
    """Take the step of tables, with one all-reduce for each group of processes.

    Each scheme runs twice: to find which norms it asks for, and with those of all rows.

    Args:
        shards: the parameters.
        groups: the parameter group of each parameter.
        precision: in which numbers weights and momentum are kept.
    """
    found: dict[tuple[int, ...], list[Shard]] = {}
    for shard in shards:
        found.setdefault(shard.cut.ranks, []).append(shard)
    for like in found.values():
        tables = [_Table(shard, groups[shard.p], precision) for shard in like]
        local = [table.ask() for table in tables]
        if asked := [x for own in local for x in own]:
            numbers = torch.cat([x.to(torch.float64).flatten() for x in asked])
            dist.all_reduce(numbers, dist.ReduceOp.MAX, like[0].cut.group)
            parts = torch.split(numbers, [x.numel() for x in asked])
            asked = [part.to(x.dtype).reshape(x.shape) for part, x in zip(parts, asked, strict=True)]
        known = iter(asked)
        for table, own in zip(tables, local, strict=True):
            table.finish([next(known) for _ in own])


class _Table:
    """One table between the two runs of its scheme."""

    def __init__(self, shard: Shard, group: dict[str, Any], precision: Precision) -> None:
        self._batch, self._precision = Batch([shard.leaf()], group), precision
        self._blocks: Blocks = load(self._batch, precision)
        role, blocks = shard.here.role, self._blocks
        finite = blocks.finite.reshape(-1, *(1,) * (blocks.weights[0].ndim - 1))
        self._smoothed, m, self._active = smooth(role, blocks.gradients[0], blocks.states[0], finite)
        kept = {name: x for name, x in blocks.states[0].items() if name not in self._smoothed}
        self._d, self._kept = direct(role, shard.here.stabilisers[0], blocks.weights[0], m, kept, self._active)
        self._placement, self._lr, self._moves = shard.here, learning_rate(group), shard.known.moves

    def _move(self, ball: Reduced) -> Moved:
        placement, w = self._placement, self._blocks.weights[0]
        eta = self._lr * placement.role.lr_scale(placement.blocks[0]) * self._active
        return placement.stabilisers[0].move(w.clone(), self._d, eta, ball, self._kept, self._longest)

    def _longest(self, ball: Geometry) -> float:
        """The largest norm of a direction, in the norm that is reduced."""
        assert isinstance(ball, Reduced)
        return ChangeBounds.of(self._placement.role.geometry).direction_norm_bound(
            ball.norm_of, tuple(self._blocks.weights[0].shape)
        )

    def ask(self) -> list[Tensor]:
        """What the scheme asks of the rows here."""
        ball = Reduced(self._placement.role.weight_geometry)
        self._move(ball)
        return ball.asked

    def finish(self, numbers: list[Tensor]) -> None:
        """Take the step with the numbers of all rows."""
        w = self._blocks.weights[0]
        moved, kept = self._move(Reduced(self._placement.role.weight_geometry, known=iter(numbers)))
        self._blocks.weights[0] = where_moved(self._moves.to(w.dtype), (), moved, w)
        self._blocks.states[0] = {**self._smoothed, **self._kept, **(kept or {})}
        store(self._batch, self._blocks, self._precision)
