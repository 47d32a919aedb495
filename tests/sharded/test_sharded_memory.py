"""What a step has in memory at once: counted tensors, of a step with many buckets."""

import weakref
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
from sharded_cases import fsdp, plan_of
from test_sharded_state import advance, built
from threads import run
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import surefoot as sf
from combinations import combinations
from surefoot import recipes
from surefoot.mesh.schedule import schedule

SIDE, COUNT, RANKS = 48, 24, 4
MATRIX = 4 * SIDE * SIDE


class Alive(TorchDispatchMode):
    """The most bytes of tensors that operations of this thread have made and that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if type(x) is torch.Tensor and (place := x.untyped_storage().data_ptr()) not in before | self._seen.keys():
                self._seen[place] = size = x.untyped_storage().nbytes()
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(x.untyped_storage(), self._gone, place, size)
        return result

    def _gone(self, place: int, size: int) -> None:
        self._seen.pop(place, None)
        self.now -= size


def matrices(count: int, stabiliser: sf.Stabiliser | None) -> sf.Plan:
    """Equal square matrices only."""
    square = plan_of(recipes.steady(), stabiliser).placements["square"]
    return sf.Plan("many", {f"m{i}": replace(square, shape=(SIDE, SIDE)) for i in range(count)})


def peak(params, optimizer) -> int:
    """Of the second step."""
    advance(params, optimizer, range(1), torch.float32)
    with Alive() as alive:
        optimizer.step()
    return alive.most


@combinations(budget=[1, 2, COUNT], stabiliser=[sf.PostClip(1.0), None])
def test_a_step_has_two_buckets_and_the_workspace_of_one(stabiliser, budget):
    """Two are exchanged under the default, three under Post Clip."""
    tensors = 3 if stabiliser else 2
    plan, owned = matrices(COUNT, stabiliser), min(budget, COUNT // RANKS)
    workspace = peak(*built(matrices(owned, stabiliser), None, None, torch.float32))
    if stabiliser and owned == 1:
        workspace += MATRIX  # one weight alone is read where it lies, an owner has a copy

    def work(rank):
        with mock.patch("surefoot.optim.exchange.schedule", partial(schedule, budget=budget * MATRIX)):
            params, optimizer = built(plan, (RANKS,), fsdp, torch.float32)
            most = peak(params, optimizer)
            (exchange,) = optimizer._sharding.exchanges
            return most, len(exchange.buckets)

    for most, buckets in run(RANKS, work):
        assert buckets == COUNT // RANKS // owned
        assert most <= 1.01 * (2 * tensors * owned * MATRIX + workspace)
