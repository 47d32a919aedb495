"""Steps on meshes are those of one process: all layouts, stabilisers, recipes, and gradients of every kind."""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
import sharded_cases
import torch
from sharded_cases import SOME, STACKS, alone, fsdp, plan_of, sharded
from threads import run
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import surefoot as sf
from combinations import combinations, label
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


def changed(**change: Any) -> recipes.Recipe:
    """The default recipe with something else about its linear layers."""
    table = recipes.steady().table
    name = ", ".join(map(str, change.values()))
    return recipes.Recipe(name, {**table, "linear": replace(table["linear"], **change)})


RECIPES = [
    changed(momentum=contrib.Whitened()), changed(geometry=contrib.RadialBrake()),
    changed(geometry=contrib.UpdateFloor()), changed(geometry=contrib.DualScaled()),
    changed(geometry=sf.NormalisedRows()),
    changed(geometry=contrib.MeanLookahead(contrib.RadialBrake(sf.NormalisedRows()))),
    changed(momentum=sf.Adam()), changed(momentum=sf.RowAdam()), changed(geometry=sf.StreamingSpectral()),
    changed(momentum=sf.SOAP(sides="shorter")), changed(momentum=sf.Momentum(0.0)),
    recipes.beyond_mup(), contrib.sign_natural(), recipes.hyperball(), recipes.steady(), recipes.normuon(),
    recipes.moga_row(1.5), recipes.moga_column(2), recipes.muon(),
    changed(momentum=sf.SOAP()), recipes.scion(), recipes.lion(), recipes.moonlight(),
]  # fmt: skip
PAIRS = [*itertools.zip_longest(RECIPES, STABILISERS)]
"""Each with one that does not hide what it gets wrong: lengths under decays and bounds, last those as published."""
RADIUS = {"FSDP2": None, "FSDP2 x TP": sf.PostClip(1.0)}
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


MESHES = {"FSDP2": ((3,), fsdp), "HSDP": ((2, 2), hsdp), "TP": ((3,), tensor_parallel), "FSDP2 x TP": ((2, 2), both)}


def differences(
    recipe: sf.recipes.Recipe, stabiliser: sf.Stabiliser | None, mesh: tuple[int, ...], placements: Any,
    dtype: torch.dtype = torch.float64, names: Collection[str] | None = None, **options: Any,
) -> dict[str, float]:  # fmt: skip
    """The largest difference of each parameter (or of these) from one process's, over all ranks."""
    plan, lr = plan_of(recipe, stabiliser, names), 0.05
    want = alone(plan, STEPS, dtype, lr, **options)
    ranks = torch.Size(mesh).numel()
    found = run(ranks, sharded, plan, mesh, placements, STEPS, dtype, lr, options)
    moved = {name: (w - want[name]).abs() for weights in found for name, w in weights.items()}
    assert {name for name, x in moved.items() if x.isnan().any()} == set()
    return {name: max([(w[name] - want[name]).abs().max().item() for w in found if w[name].numel()], default=0.0)
            for name in want}  # fmt: skip


@combinations(pair=PAIRS, mesh=[*MESHES])
def test_every_recipe_and_stabiliser(pair, mesh):
    """Adaptive directions, preconditioned gradients and published decays, on rows and on boxes of both dimensions."""
    worst = differences(*pair, *MESHES[mesh], names=SOME)
    assert max(worst.values()) <= 1e-12, worst


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("pair", PAIRS, ids=label)
def test_every_recipe_and_stabiliser_in_every_layout(pair, mesh):
    worst = differences(*pair, *MESHES[mesh])
    assert max(worst.values()) <= 1e-12, worst


@pytest.mark.parametrize(
    ("ranks", "placements", "named"),
    [
        pytest.param([1, 0], fsdp, True, id="FSDP2"),
        pytest.param([[0, 2], [1, 3]], both, True, id="FSDP2 x TP", marks=pytest.mark.slow),
        pytest.param([[0, 2], [1, 3]], both, False, id="without names"),
    ],
)
def test_meshes_whose_ranks_do_not_ascend(monkeypatch, ranks, placements, named):
    """torch numbers the processes of a group by their ranks, in whatever order a mesh has them."""

    def mesh(device: str, sizes: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> DeviceMesh:
        return DeviceMesh(device, ranks, mesh_dim_names=mesh_dim_names if named else None)

    monkeypatch.setattr(sharded_cases, "init_device_mesh", mesh)
    worst = differences(recipes.steady(), sf.PostClip(1.0), tuple(torch.tensor(ranks).shape), placements, names=SOME)
    assert max(worst.values()) <= 1e-12, worst


@combinations(
    stabiliser=[None, sf.PostClip(1.0)], cut=[(_StridedShard(0, split_factor=2), Shard(0)), (Shard(1), Shard(0))]
)
def test_experts_cut_along_the_stack_or_the_rows(cut, stabiliser):
    def placements(name: str, shape: Sequence[int]) -> tuple[Any, ...]:
        return cut if name in EXPERTS else experts(name, shape)

    worst = differences(recipes.steady(), stabiliser, (2, 2), placements, names=EXPERTS)
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
    worst = differences(recipes.Recipe("signs", table), stabiliser, *MESHES["FSDP2 x TP"], names=SOME)
    assert max(worst.values()) <= 1e-12, worst


def test_the_row_of_a_vector_is_all_of_it():
    table = dict(recipes.steady().table)
    table["gain"] = replace(table["gain"], momentum=sf.RowAdam(), geometry=sf.Identity())
    worst = differences(recipes.Recipe("rows", table), sf.Free(), (3,), fsdp, names=["gain"])
    assert max(worst.values()) <= 1e-12, worst


@pytest.mark.parametrize("mesh", ["FSDP2 x TP", pytest.param("FSDP2", marks=pytest.mark.slow)])
def test_momentum_that_follows_the_steps(mesh):
    """Each parameter's own, which count no step for which there is no gradient."""
    warm = contrib.ScheduledMomentum(((0, sf.Momentum(0.5)), (20, sf.Momentum(0.9, 0.7))))
    table = {kind: replace(role, momentum=warm) for kind, role in recipes.beyond_mup().table.items()}
    worst = differences(recipes.Recipe("warm", table), RADIUS[mesh], *MESHES[mesh], names=SOME)
    assert max(worst.values()) <= 1e-12, worst


@combinations(
    lambda mesh, stabiliser: RADIUS.get(mesh, mesh) == stabiliser, mesh=[*MESHES], stabiliser=[*RADIUS.values()]
)
def test_single_precision(mesh, stabiliser):
    worst = differences(recipes.steady(), stabiliser, *MESHES[mesh], torch.float32, maximize=stabiliser is None)
    assert max(worst.values()) <= 1e-6, worst


@pytest.mark.slow
@pytest.mark.parametrize("stabiliser", STABILISERS, ids=str)
def test_single_precision_under_every_stabiliser(stabiliser):
    """The sign of a skew matrix of odd size, which is singular, amplifies rounding: 4e-5 under `Stiefel`.

    So do the iterations for the multipliers of a norm and of lengths, 1e-6 and, by processor, 3e-6 or 9e-6; in float64
    all are below 1e-12.
    """
    lengths = dict.fromkeys((sf.RowSphere(), sf.ColumnSphere()), 2e-5)
    limit = {sf.Stiefel(1.0): 1e-4, sf.SpectralSphere(1.0): 2e-6, **lengths}.get(stabiliser, 1e-6)
    worst = differences(recipes.steady(), stabiliser, (3,), fsdp, torch.float32)
    assert max(worst.values()) <= limit, worst


@combinations(mesh=["TP", "FSDP2 x TP"], weights=[sf.RoundToNearest(), sf.StochasticRounding(), sf.MasterWeights()])
def test_half_precision_rounds_each_entry_as_in_the_whole(weights, mesh):
    """bfloat16 weights and momentum: noise goes by the entry's place in the whole parameter."""
    names, precision = (
        None if isinstance(weights, sf.StochasticRounding) else SOME,
        sf.Precision(torch.bfloat16, weights),
    )
    worst = differences(recipes.steady(), None, *MESHES[mesh], torch.bfloat16, names, precision=precision)
    assert max(worst.values()) == 0, worst


class Nothing(sf.geometry.Spectral):
    """A norm of one's own whose direction was forgotten."""

    def direction(self, g):
        return None


class NothingOfRows(sf.geometry.RowRMS):
    def direction(self, g):
        return None


@pytest.mark.parametrize(
    ("name", "change"),
    [
        pytest.param("embedding", {"geometry": NothingOfRows(), "stabiliser": sf.Free()}, id="here"),
        pytest.param("embedding", {"geometry": NothingOfRows(), "stabiliser": sf.PostClip(1.0)}, id="rows"),
        pytest.param("square", {"geometry": Nothing(), "stabiliser": sf.Free()}, id="direction"),
        pytest.param("square", {"geometry": Nothing(), "stabiliser": sf.PostClip(1.0)}, id="weight"),
        pytest.param("square", {"geometry": Nothing(), "momentum": sf.SOAP()}, id="all"),
    ],
)
def test_a_step_names_the_parameter_whose_direction_is_none(name, change):
    """Whether it is taken by the process that has the rows, or by the owner of a matrix."""
    placement = plan_of(recipes.steady(), None, [name])[name]
    plan = sf.Plan("own", {name: replace(placement, role=replace(placement.role, **change))})
    with pytest.raises(
        AssertionError, match=rf"ValueError: {name}: .*Nothing.*: its direction is None: return a tensor"
    ):
        run(2, sharded, plan, (2,), fsdp, 1, torch.float64, 0.1, {})
