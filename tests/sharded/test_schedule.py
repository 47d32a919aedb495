"""Slabs, owners, buckets and bytes: pure functions, against torch's own and against counted collectives."""

import itertools
import runpy
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from sharded_cases import alone, fsdp, plan_of, sharded, weights
from test_sharded_steps import MESHES
from threads import run
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

import surefoot as sf
from combinations import combinations
from surefoot import recipes
from surefoot.geometry.base import Extent
from surefoot.mesh.schedule import Work, cost, schedule
from surefoot.mesh.slabs import Slab, owners, slabs
from surefoot.optim import shard

sent_bytes = runpy.run_path(str(Path(__file__).parents[2] / "studies" / "scaling" / "run.py"))["sent_bytes"]

SHAPES = [(1, 4), (3, 5), (5, 3), (6, 6), (7,), (16, 9), (0, 3), (8, 4, 3)]
CUTS = [
    ((4,), (Shard(0),)),
    ((2, 2), (Replicate(), Shard(0))),
    ((2, 2), (Shard(0), Shard(0))),
    ((2, 2), (Shard(0), Shard(-1))),
    ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    ((2, 3), (_StridedShard(0, split_factor=3), Shard(0))),
    ((2, 2, 2), (Replicate(), _StridedShard(0, split_factor=2), Shard(0))),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("mesh", "placements"), CUTS, ids=str)
def test_slabs_are_torchs_and_cover_each_entry_once_a_copy(shape, mesh, placements):
    placements = tuple(Shard(len(shape) - 1) if x == Shard(-1) else x for x in placements)
    whole, covered = Slab((0,) * len(shape), shape), torch.zeros(shape)
    found = slabs(shape, mesh, placements)
    for coordinate, slab in zip(itertools.product(*map(range, mesh)), found, strict=True):
        size, start = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), placements)
        assert slab.size == size
        assert slab.start == start or not slab.numel
        covered[slab.within(whole)] += 1
    copies = torch.Size(n for n, x in zip(mesh, placements, strict=True) if x.is_replicate()).numel()
    assert bool((covered == copies).all())


def test_a_placement_that_is_no_box_is_refused_by_name():
    with pytest.raises(ValueError, match=r"^Partial\(sum\) is neither Replicate nor Shard"):
        slabs((4, 4), (2,), (Partial(),))
    with pytest.raises(ValueError, match=r"_StridedShard.* is no contiguous part"):
        slabs((4, 4), (2, 2), (_StridedShard(0, split_factor=4), Shard(0)))


@pytest.mark.parametrize("ranks", [1, 3, 8, 64])
def test_owners_take_the_longest_first_and_are_within_a_third_of_the_best(ranks):
    costs = torch.randint(1, 1000, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = owners(costs, ranks)
    loads = [sum(costs[i] for i, owner in chosen.items() if owner == rank) for rank in range(ranks)]
    assert max(loads) <= 4 / 3 * max(sum(costs) / ranks, max(costs))
    assert owners(costs, ranks) == chosen


def llama(width: int, depth: int, heads: int, hidden: int) -> list[tuple[int, int]]:
    """The matrices of a LLaMA with grouped queries: q, k, v, o, gate, up, down."""
    keys = width if heads == 0 else heads
    layer = [(width, width), (keys, width), (keys, width), (width, width), *[(hidden, width)] * 2, (width, hidden)]
    return layer * depth


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("shapes", [llama(4096, 32, 0, 11008), llama(8192, 80, 1024, 28672)], ids=["7B", "70B"])
def test_the_busiest_rank_of_a_large_model_is_within_a_twentieth_of_the_mean(shapes, ranks):
    works = [
        Work(Slab((0, 0), shape), tuple(slabs(shape, (ranks,), (Shard(0),))), cost(*shape))
        for i, shape in enumerate(shapes)
    ]
    buckets = schedule(works)
    costs = [sum(work.cost for bucket in buckets for work in bucket[rank]) for rank in range(ranks)]
    assert max(costs) <= 1.05 * sum(costs) / ranks
    entries, e = sum(a * b for a, b in shapes), 4
    assert sum(sent_bytes(buckets, ranks)) <= 1.02 * 2 * (1 - 1 / ranks) * entries * e
    held = max(sum(work.box.numel * work.itemsize for work in works) for bucket in buckets for works in bucket)
    assert held <= max(64 << 20, max(a * b for a, b in shapes) * e)


EVEN = ((32, 32), (32, 64), (64, 32), (32, 32))


class Counted:
    """Collectives as the threads call them: name, group size, bytes sent to others."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, str, int]] = []

    def __enter__(self) -> "Counted":
        exchange, reduce = dist.all_to_all_single, dist.all_reduce

        def all_to_all(output, source, received, sent, group=None, async_op=False):
            rank, own = dist.get_rank(), dist.get_rank(group)
            others = sum(n for i, n in enumerate(sent) if i != own)
            self.calls.append((rank, "all_to_all", others * source.element_size()))
            return exchange(output, source, received, sent, group, async_op)

        def all_reduce(tensor, *args, **options):
            self.calls.append((dist.get_rank(), "all_reduce", tensor.nbytes))
            return reduce(tensor, *args, **options)

        self._patches = [mock.patch.object(dist, "all_to_all_single", all_to_all)]
        self._patches += [mock.patch.object(dist, "all_reduce", all_reduce)]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        for patch in self._patches:
            patch.stop()

    def count(self, name: str, rank: int = 0) -> int:
        return sum(1 for who, what, _ in self.calls if (who, what) == (rank, name))


@combinations(
    pairs=True,
    recipe=[recipes.steady(), recipes.lion()],
    stabiliser=[sf.Free(), sf.WeightDecay(0.1), sf.PostClip(1.0), sf.Normalise(1.0)],
    shapes=["even", "any"],
)
def test_counted_bytes_and_collectives_are_the_schedules(recipe, stabiliser, shapes):
    plan = plan_of(recipe, stabiliser)
    if recipe.name == "lion" and stabiliser.extent == Extent.ENTRY:
        pytest.skip("each entry is stepped where it lies")
    if shapes == "even":
        plan = sf.Plan("even", {f"{i}": replace(plan["square"], shape=shape) for i, shape in enumerate(EVEN)})
    steps, schedules = 3, [None] * 4

    def work(rank):
        from sharded_cases import distribute, gradient
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (4,))
        params = {
            n: nn.Parameter(distribute(w, mesh, fsdp(n, w.shape))) for n, w in weights(plan, torch.float32).items()
        }
        optimizer = sf.SteepestDescent(list(params.items()), plan, lr=0.1)
        schedules[rank] = optimizer._sharding.exchanges[0].buckets
        dist.barrier()
        counted.calls.clear()
        dist.barrier()
        for step in range(steps):
            for name, p in params.items():
                p.grad = distribute(gradient(name, p.shape, step, torch.float32).nan_to_num(), mesh, p.placements)
            optimizer.step()

    with Counted() as counted:
        run(4, work)
    found = schedules[0]
    fused = isinstance(stabiliser, sf.Normalise) and shapes == "any"  # the tables' norms
    for rank in range(4):
        assert counted.count("all_to_all", rank) == steps * 2 * len(found)
        assert counted.count("all_reduce", rank) == steps * (1 + fused)
        sent = sum(n for who, what, n in counted.calls if (who, what) == (rank, "all_to_all"))
        assert sent == steps * sent_bytes(found, 4)[rank]
    if shapes == "even":
        entries = sum(torch.Size(x.shape).numel() for x in plan.placements.values())
        tensors = 2 if stabiliser.extent == Extent.ENTRY else 3 + (recipe.name == "lion")  # and which entries rest
        assert sum(sent_bytes(found, 4)) <= 1.02 * tensors * 0.75 * entries * 4


def test_rows_entries_and_experts_send_nothing_but_flags():
    table = {
        n: x
        for n, x in plan_of(recipes.steady(), None).placements.items()
        if n in ("embedding", "head", "gain", "experts", "gates", "turned")
    }
    plan = sf.Plan("local", table)
    with Counted() as counted:
        run(4, sharded, plan, (4,), fsdp, 3, torch.float32, 0.1, {})
    assert {what for _, what, _ in counted.calls} == {"all_reduce"}
    assert counted.count("all_reduce") == 3
    assert max(n for _, _, n in counted.calls) <= 4 * len(table)


def test_every_matrix_is_stepped_once_in_each_group_of_replicas():
    seen = []
    original = sf.geometry.Spectral.direction

    def direction(self, g):
        seen.append((dist.get_rank(), g.shape[0] * g.shape[1]))
        return original(self, g)

    plan = plan_of(recipes.steady(), None)
    plan = sf.Plan("matrices", {n: plan.placements[n] for n in ("square", "three", "five", "column", "fused")})
    with mock.patch.object(sf.geometry.Spectral, "direction", direction):
        run(4, sharded, plan, *MESHES["HSDP"], 1, torch.float64, 0.1, {})
    matrices = 1 + 1 + 1 + 1 + 3
    for replica in ((0, 1), (2, 3)):
        assert sum(n for rank, n in seen if rank in replica) == matrices


def test_a_small_budget_makes_more_buckets_and_the_same_step(monkeypatch):
    plan = plan_of(recipes.steady(), sf.PostClip(1.0))
    want = alone(plan, 4, torch.float64, 0.05)
    monkeypatch.setattr(schedule, "__defaults__", (200,))
    found = run(3, sharded, plan, (3,), fsdp, 4, torch.float64, 0.05, {})
    for got in found:
        for name, w in want.items():
            torch.testing.assert_close(got[name], w, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("recipe", "stabiliser", "name", "cut", "way"),
    [
        (recipes.steady(), None, "square", (Shard(0),), shard.DIRECTION),
        (recipes.steady(), None, "embedding", (Shard(0),), shard.HERE),
        (recipes.steady(), None, "experts", (Shard(0),), shard.HERE),
        (recipes.steady(), None, "embedding", (Shard(1),), shard.ALL),  # a row's history is of all its columns
        (recipes.steady(), sf.PostClip(1.0), "square", (Shard(0),), shard.WEIGHT),
        (recipes.steady(), sf.Normalise(1.0), "embedding", (Shard(0),), shard.ROWS),
        (recipes.steady(), sf.Stiefel(1.0), "embedding", (Shard(0),), shard.ALL),
        (recipes.mano(), sf.Free(), "square", (Shard(0),), shard.WEIGHT),  # its direction reads the weight
        (recipes.lion(), None, "square", (Shard(0),), shard.HERE),
        (recipes.lion(), sf.RowSphere(), "square", (Shard(0),), shard.WEIGHT),
        (sf.contrib.shampoo_muon(), None, "square", (Shard(0),), shard.ALL),
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_a_cut_parameter_goes_as_far_as_its_step_looks(recipe, stabiliser, name, cut, way):
    placement = plan_of(recipe, stabiliser)[name]
    boxes = slabs(placement.shape, (2,), cut)
    assert shard.chosen(placement, boxes, boxes[0].size)[0] == way


def test_what_is_whole_here_is_stepped_here():
    placement = plan_of(recipes.steady(), sf.Stiefel(1.0))["square"]
    boxes = slabs(placement.shape, (1,), (Shard(0),))
    assert shard.chosen(placement, boxes, boxes[0].size) == (shard.HERE, placement)
