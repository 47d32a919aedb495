"""Memory on a mesh: what a step has at once, by counted tensors; and momentum in 8 bits, saved and resumed."""

import weakref
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from sharded_cases import alone, distribute, fsdp, plan_of, whole
from test_sharded_state import advance, built, full
from test_sharded_steps import MESHES
from threads import run
from torch.distributed.tensor import Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import surefoot as sf
from combinations import combinations
from surefoot import recipes
from surefoot.mesh.schedule import schedule

SIDE, COUNT, RANKS = 48, 24, 4
MATRIX = 4 * SIDE * SIDE
EIGHT, FLOAT = sf.Precision(torch.int8), sf.Precision()


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
        workspace += 2 * MATRIX  # one weight alone is read and clipped where it lies, an owner has copies

    def work(rank):
        with mock.patch("surefoot.optim.exchange.schedule", partial(schedule, budget=budget * MATRIX)):
            params, optimizer = built(plan, (RANKS,), fsdp, torch.float32)
            most = peak(params, optimizer)
            (exchange,) = optimizer._sharding.exchanges
            return most, len(exchange.buckets)

    for most, buckets in run(RANKS, work):
        assert buckets == COUNT // RANKS // owned
        assert most <= 1.01 * (2 * tensors * owned * MATRIX + workspace)


@pytest.mark.parametrize(
    ("saved", "now"), [(EIGHT, EIGHT), (EIGHT, FLOAT), (FLOAT, EIGHT)], ids=["8 bits", "to float", "from float"]
)
def test_momentum_in_8_bits_is_cut_with_its_scales_and_goes_on_on_any_mesh(saved, now):
    """Saved on 3 processes after 4 steps; on to step 8 on 2 x 2, whose columns are whole, and in one process.

    Between precisions a state is converted, on a mesh of two as in one process.
    """
    plan, f32 = plan_of(recipes.steady(), None), torch.float32

    def save(rank, mesh=None, placements=None):
        params, optimizer = built(plan, mesh, placements, f32, precision=saved)
        advance(params, optimizer, range(4), f32)
        if mesh and saved == EIGHT:
            kept = optimizer.state[params["experts"]]
            assert (kept["momentum"].dtype, kept["momentum_scale"].dtype) == (torch.int8, torch.int8)
            assert (tuple(kept["momentum_scale"].shape), kept["momentum_scale"].placements) == ((4, 6, 1), (Shard(0),))
        return {n: whole(p) for n, p in params.items()}, full(optimizer.state_dict())

    values, state = save(0)
    for got, kept in run(3, save, (3,), fsdp) if saved == now else ():
        assert kept["state"].keys() == state["state"].keys()
        for name, w in values.items():
            torch.testing.assert_close(got[name], w, rtol=0, atol=1e-6, msg=name)
        for index, own in state["state"].items():
            torch.testing.assert_close(kept["state"][index], own, rtol=0, atol=1e-6)

    def resume(rank, mesh=None, placements=None):
        params, optimizer = built(plan, mesh, placements, f32, precision=now)
        for name, p in params.items():
            p.data.copy_(values[name] if mesh is None else distribute(values[name], p.device_mesh, p.placements))
        optimizer.load_state_dict(state)
        advance(params, optimizer, range(4, 8), f32)
        return {n: whole(p) for n, p in params.items()}

    want = alone(plan, 8, f32, 0.05, precision=saved) if saved == now else resume(0)
    for got in [resume(0), *(run(4, resume, *MESHES["HSDP"]) if saved == now else run(2, resume, (2,), fsdp))]:
        for name, w in want.items():
            torch.testing.assert_close(got[name], w, rtol=0, atol=1e-6, msg=name)


def test_columns_cut_within_entries_that_share_a_scale_are_refused():
    plan = plan_of(recipes.steady(), None)

    def work(rank):
        with pytest.raises(ValueError, match=r"square is cut after 4 columns, inside a block that shares"):
            built(
                plan,
                (2,),
                lambda name, shape: [Shard(len(shape) - 1) if shape else Replicate()],
                torch.float32,
                precision=EIGHT,
            )

    run(2, work)
