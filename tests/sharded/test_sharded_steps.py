"""Steps on meshes are those of one process: all layouts, stabilisers, recipes, and gradients of every kind."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import sharded_cases
import torch
from sharded_cases import STACKS, alone, fsdp, plan_of, sharded
from threads import run
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import surefoot as sf
from combinations import combinations
from surefoot import contrib, recipes

STEPS = 8
STABILISERS = [
    sf.Free(), sf.WeightDecay(0.5), contrib.CautiousDecay(0.5), contrib.IndependentDecay(0.01),
    sf.PostClip(1.0), sf.PostClip(1.0, 1), sf.DecayedPostClip(0.5, sf.Constant(), 1.0),
    sf.Rescale(1.0), sf.PreDecay(0.5),
    sf.StreamingPostClip(1.0, 2), sf.StreamingPreDecay(0.5, 2),
    sf.Normalise(), sf.Normalise(1.0), sf.Normalise(norm=sf.Frobenius()), sf.SpectralSphere(1.0), sf.Hyperball(),
    sf.RowSphere(), sf.ColumnSphere(), sf.Stiefel(1.0),
]  # fmt: skip
RECIPES = [
    recipes.steady(), recipes.beyond_mup(), recipes.muon(), recipes.scion(), recipes.lion(), recipes.moga_row(1.5),
    recipes.moga_column(2), recipes.hyperball(), contrib.sign_natural(), recipes.moonlight(), recipes.normuon(),
]  # fmt: skip
TABLES = ("embedding", "head", "fused")


def hsdp(name: str, shape: Sequence[int]) -> tuple[Any, ...]:
    return (Replicate(), *fsdp(name, shape))


def tensor_parallel(name: str, shape: Sequence[int]) -> tuple[Any, ...]:
    if not shape:
        return (Replicate(),)
    return (Shard(0),) if len(shape) == 1 or name in TABLES else (Shard(1),)


EXPERTS = ("experts", *STACKS)


def both(name: str, shape: Sequence[int]) -> tuple[Any, ...]:
    """FSDP2 of what tensor parallelism has cut along the rows, or the columns."""
    if not shape:
        return (Replicate(), Replicate())
    rows = len(shape) == 1 or name in (*TABLES, "square", *EXPERTS)
    return (_StridedShard(0, split_factor=2), Shard(0)) if rows else (Shard(0), Shard(1))


def experts(name: str, shape: Sequence[int]) -> tuple[Any, ...]:
    """Expert parallelism, whose experts FSDP2 cuts along the rows; all else is cut by FSDP2 alone."""
    if name not in EXPERTS:
        return (Shard(0), Replicate()) if shape else (Replicate(), Replicate())
    return (Shard(1), Shard(0))


MESHES = {"HSDP": ((2, 2), hsdp), "TP": ((4,), tensor_parallel), "FSDP2 x TP": ((2, 2), both)}


def differences(
    recipe: sf.recipes.Recipe, stabiliser: sf.Stabiliser | None, mesh: tuple[int, ...], placements: Any,
    dtype: torch.dtype = torch.float64, lr: float = 0.05, **options: Any,
) -> dict[str, float]:  # fmt: skip
    """The largest difference of each parameter from one process's, over all ranks."""
    plan = plan_of(recipe, stabiliser)
    want = alone(plan, STEPS, dtype, lr, **options)
    ranks = torch.Size(mesh).numel()
    found = run(ranks, sharded, plan, mesh, placements, STEPS, dtype, lr, options)
    moved = {name: (w - want[name]).abs() for weights in found for name, w in weights.items()}
    assert {name for name, x in moved.items() if x.isnan().any()} == set()
    return {name: max([(w[name] - want[name]).abs().max().item() for w in found if w[name].numel()], default=0.0)
            for name in want}  # fmt: skip


@pytest.mark.parametrize("stabiliser", STABILISERS, ids=str)
def test_fsdp_under_every_stabiliser(stabiliser):
    worst = differences(recipes.steady(), stabiliser, (3,), fsdp)
    assert max(worst.values()) <= 1e-12, worst


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_fsdp_under_every_recipe(recipe, ranks):
    """Decays too, as published; on 4 ranks with a radius."""
    worst = differences(recipe, sf.PostClip(1.0) if ranks == 4 else None, (ranks,), fsdp)
    assert max(worst.values()) <= 1e-12, worst


@combinations(
    lambda mesh, recipe, stabiliser: recipe.name == "steady" or mesh == "FSDP2 x TP",
    mesh=[*MESHES],
    recipe=[recipes.steady(), recipes.lion()],
    stabiliser=[None, sf.PostClip(1.0), sf.Normalise(1.0), sf.SpectralSphere(1.0), sf.Rescale(1.0)],
)
def test_other_meshes(mesh, recipe, stabiliser):
    worst = differences(recipe, stabiliser, *MESHES[mesh])
    assert max(worst.values()) <= 1e-12, worst


@pytest.mark.parametrize(
    ("ranks", "placements", "named"),
    [([1, 0], fsdp, True), ([[0, 2], [1, 3]], both, True), ([[0, 2], [1, 3]], both, False)],
    ids=["FSDP2", "FSDP2 x TP", "without names"],
)
def test_meshes_whose_ranks_do_not_ascend(monkeypatch, ranks, placements, named):
    """torch numbers the processes of a group by their ranks, in whatever order a mesh has them."""

    def mesh(device: str, sizes: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> DeviceMesh:
        return DeviceMesh(device, ranks, mesh_dim_names=mesh_dim_names if named else None)

    monkeypatch.setattr(sharded_cases, "init_device_mesh", mesh)
    worst = differences(recipes.steady(), sf.PostClip(1.0), tuple(torch.tensor(ranks).shape), placements)
    assert max(worst.values()) <= 1e-12, worst


@pytest.mark.parametrize("stabiliser", [None, sf.PostClip(1.0)], ids=str)
@pytest.mark.parametrize("cut", [(_StridedShard(0, split_factor=2), Shard(0)), (Shard(1), Shard(0))], ids=str)
def test_experts_cut_along_the_stack_or_the_rows(cut, stabiliser):
    def placements(name: str, shape: Sequence[int]) -> tuple[Any, ...]:
        return cut if name in EXPERTS else experts(name, shape)

    worst = differences(recipes.steady(), stabiliser, (2, 2), placements)
    assert max(worst.values()) <= 1e-12, worst


@pytest.mark.parametrize(
    "change",
    [
        {"geometry": contrib.RadialBrake()}, {"geometry": contrib.UpdateFloor()}, {"geometry": contrib.DualScaled()},
        {"geometry": sf.NormalisedRows()}, {"geometry": sf.StreamingSpectral()},
        {"geometry": contrib.MeanLookahead(contrib.RadialBrake(sf.NormalisedRows()))},
        {"momentum": sf.Adam()}, {"momentum": sf.RowAdam()}, {"momentum": sf.Whitened()},
        {"momentum": sf.SOAP()}, {"momentum": sf.SOAP(sides="shorter")},
        {"momentum": sf.Momentum(0.0)},
    ],
    ids=str,
)  # fmt: skip
def test_whatever_changes_a_direction(change):
    """Adaptive directions and preconditioned gradients, on rows and on boxes of both dimensions."""
    table = dict(recipes.steady().table)
    table["linear"] = replace(table["linear"], **change)
    recipe = recipes.Recipe("changed", table)
    for stabiliser, mesh, placements in ((None, (3,), fsdp), (sf.PostClip(1.0), (2, 2), both)):
        worst = differences(recipe, stabiliser, mesh, placements)
        assert max(worst.values()) <= 1e-12, worst


@pytest.mark.parametrize(
    ("stabiliser", "change"),
    [(sf.Hyperball(), None), (sf.Stiefel(1.0), None), (sf.PostClip(1.0), contrib.RadialBrake),
     (sf.WeightDecay(0.5), contrib.MeanLookahead)],
    ids=str,
)  # fmt: skip
def test_entries_at_rest_keep_their_part_in_what_couples_entries(stabiliser, change):
    """Signs are of entries, lengths and what a direction remembers of all; half of the gradients are sparse."""
    table = dict(recipes.lion().table)
    if change:
        table["linear"] = replace(table["linear"], geometry=change(table["linear"].geometry))
    worst = differences(recipes.Recipe("signs", table), stabiliser, *MESHES["FSDP2 x TP"])
    assert max(worst.values()) <= 1e-12, worst


def test_the_row_of_a_vector_is_all_of_it():
    table = dict(recipes.steady().table)
    table["gain"] = replace(table["gain"], momentum=sf.RowAdam(), geometry=sf.Identity())
    worst = differences(recipes.Recipe("rows", table), sf.Free(), (3,), fsdp)
    assert max(worst.values()) <= 1e-12, worst


def test_momentum_that_follows_the_steps():
    """Each parameter's own, which count no step for which there is no gradient."""
    warm = contrib.ScheduledMomentum(((0, sf.Momentum(0.5)), (20, sf.Momentum(0.9, 0.7))))
    table = {kind: replace(role, momentum=warm) for kind, role in recipes.beyond_mup().table.items()}
    for stabiliser, mesh, placements in ((None, (3,), fsdp), (sf.PostClip(1.0), (2, 2), both)):
        worst = differences(recipes.Recipe("warm", table), stabiliser, mesh, placements)
        assert max(worst.values()) <= 1e-12, worst


@pytest.mark.parametrize("mesh", [*MESHES, "FSDP2"])
@pytest.mark.parametrize(("stabiliser", "options"), [(None, {"maximize": True}), (sf.PostClip(1.0), {})], ids=str)
def test_single_precision(mesh, stabiliser, options):
    worst = differences(
        recipes.steady(), stabiliser, *(MESHES | {"FSDP2": ((4,), fsdp)})[mesh], torch.float32, **options
    )
    assert max(worst.values()) <= 1e-6, worst


@pytest.mark.slow
@pytest.mark.parametrize("stabiliser", STABILISERS, ids=str)
def test_single_precision_under_every_stabiliser(stabiliser):
    """The sign of a skew matrix of odd size, which is singular, amplifies rounding: 4e-5 under `Stiefel`."""
    limit = {sf.Stiefel(1.0): 1e-4, sf.SpectralSphere(1.0): 2e-6}.get(stabiliser, 1e-6)
    worst = differences(recipes.steady(), stabiliser, (3,), fsdp, torch.float32)
    assert max(worst.values()) <= limit, worst


@pytest.mark.parametrize("weights", [sf.RoundToNearest(), sf.StochasticRounding(), sf.MasterWeights()], ids=str)
@pytest.mark.parametrize("mesh", ["FSDP2 x TP", "TP"])
def test_half_precision_rounds_each_entry_as_in_the_whole(weights, mesh):
    """bfloat16 weights and momentum: noise goes by the entry's place in the whole parameter."""
    worst = differences(
        recipes.steady(), None, *MESHES[mesh], torch.bfloat16, precision=sf.Precision(torch.bfloat16, weights)
    )
    assert max(worst.values()) == 0, worst
