"""Layouts and overrides that real models bring and that are easy to get wrong."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, distribute_module

import surefoot as sf
from comparisons import advanced
from surefoot.contrib import RadialBrake
from surefoot.scaling import Times
from surefoot.views import Vector


def test_channels_last_depthwise_kernels_are_initialised_as_contiguous_ones() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 6, 3))

    plain, last = net(), net().to(memory_format=torch.channels_last)
    for model in (plain, last):
        sf.Plan.of(model).initialise_(model, seed=3)
    for ours, theirs in zip(plain.parameters(), last.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    norms = sf.SteepestDescent(last, lr=0.1).stability()
    assert 0.5 < norms["0.weight"]["forward_lower"] < 3


def test_a_role_given_in_full_keeps_its_stabiliser() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    own = sf.Role("linear", sf.Spectral(), stabiliser=sf.PostClip(7.0))
    overrides = [("0.weight", own), ("1.weight", "linear")]
    plan = sf.Plan.of(model, stabiliser=sf.PostClip(2.0), overrides=overrides)
    assert plan["0.weight"].stabilisers[0] == sf.PostClip(7.0)
    assert plan["1.weight"].stabilisers[0] == sf.PostClip(2.0)


@pytest.mark.parametrize(
    ("part", "wrong", "kind"),
    [
        ("name", 3, "str"),
        ("geometry", sf.Spectral, "Geometry"),
        ("view", Vector, "View"),
        ("initial", 0.5, "Initial"),
        ("momentum", 0.9, "Smoothing"),
        ("lr_scale", 2.0, "Scale"),
        ("radius_unit", None, "Scale"),
        ("stabiliser", RadialBrake(), "Stabiliser"),
        ("weight_norm", "rms", "Geometry | None"),
    ],
)
def test_a_part_of_a_role_of_the_wrong_kind_is_refused(part: str, wrong: object, kind: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f": {part} must be a {kind}, not {wrong!r}")):
        replace(sf.Role("mine", sf.RMS(), weight_norm=sf.RMS()), **{part: wrong})


def test_a_declared_head_without_a_weight_is_refused() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 4)
            self.out = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 10))

        def get_output_embeddings(self) -> nn.Module:
            return self.out

    with pytest.raises(ValueError, match=r"get_output_embeddings\(\) is a Sequential.*head='path"):
        sf.Plan.of(Wrapped())
    assert sf.Plan.of(Wrapped(), head="out.1")["out.1.weight"].role.name == "head"


@pytest.mark.parametrize("shape", [(5, 8), (1, 5, 8), (1, 1, 8)])
def test_positions_and_class_tokens_are_rows(shape: tuple[int, ...]) -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(shape))

    model = Tokens()
    plan = sf.Plan.of(model, sf.recipes.beyond_mup(), overrides=[("table", "positions")])
    plan.initialise_(model)
    assert torch.equal(model.table, torch.ones(shape))  # as the model has it
    model.table.grad = torch.randn(shape)
    sf.SteepestDescent(model, plan, lr=0.5).step()
    moved = (1 - model.table.detach()).square()
    torch.testing.assert_close(moved.mean(-1).sqrt(), torch.full(shape[:-1], 0.5))


def test_a_geometry_needs_blocks_of_its_kind() -> None:
    for role, shape in ((sf.Role("x", sf.RMS()), (4, 4)), (sf.Role("x", sf.Spectral(), view=Vector()), (4,))):
        with pytest.raises(ValueError, match="blocks of shape"):
            sf.SteepestDescent([{"params": [nn.Parameter(torch.ones(shape))], "role": role}], lr=0.1)


def test_a_function_needs_a_role_to_change() -> None:
    model = nn.Bilinear(3, 4, 5)
    with pytest.raises(ValueError, match=r"weight.*no role was found"):
        sf.Plan.of(model, overrides=[("weight", lambda role: role)])


def test_a_row_of_eta_zero_is_not_moved_by_pre_decay() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        w = torch.randn(6, 5, generator=generator)
        g = torch.randn(6, 5, generator=generator)
        eta = torch.full((6, 1), 0.1)
        eta[w.square().sum(-1).argmax()] = 0  # the row that carries the norm
        moved, _ = advanced(sf.PreDecay(0.5), w, g, eta, sf.RowRMS())
        assert torch.equal(moved[eta[:, 0] == 0], w[eta[:, 0] == 0])


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"recipe": sf.recipes.muon}, "<function muon"),
        ({"recipe": "muon"}, "'muon'"),
        ({"recipe": sf.PostClip(2.0)}, "PostClip"),
        ({"stabiliser": 2.0}, "2.0"),
        ({"stabiliser": sf.PostClip}, "<class .*PostClip"),
        ({"run": 200}, "200"),
    ],
)
def test_what_is_no_recipe_stabiliser_or_run_is_named(given, named) -> None:
    with pytest.raises(ValueError, match=rf"give a (Recipe|Stabiliser|Run) like .*\), not {named}"):
        sf.Plan.of(nn.Linear(2, 2), **given)


def test_values_that_would_be_ignored_are_refused() -> None:
    with pytest.raises(ValueError, match="look ahead"):
        sf.Momentum(0.0, 0.5)
    with pytest.raises(ValueError, match=r"adam_lr=0\.5"):
        sf.recipes.muon(sf.Moonlight(), adam_lr=0.5)
    with pytest.raises(ValueError, match="unknown msign method"):
        sf.Spectral("newton")
    with pytest.raises(ValueError, match="Invalid learning rate"):
        sf.SteepestDescent([{"params": [nn.Parameter(torch.ones(2))], "role": "bias", "lr": -1.0}], lr=0.1)


@pytest.mark.parametrize("recipe", ["moonlight", "lion", "scale", "normuon", "steady"])
def test_a_layer_without_inputs_is_planned(recipe: str) -> None:
    with pytest.warns(UserWarning, match="zero-element"):
        model = nn.Sequential(nn.Linear(0, 4), nn.Linear(4, 4))
    optimizer = sf.create_optimizer(model, recipe, lr=0.1)
    model(torch.ones(2, 0)).sum().backward()
    optimizer.step()


def test_a_decays_promise_is_told_by_the_rate_that_is_given() -> None:
    plan = sf.Plan.of(nn.Linear(4, 4, bias=False), sf.recipes.scion())
    assert plan["weight"].promise == "norm <= max(initial, 50) by decay while lr <= 1"


@pytest.mark.parametrize("factor", [0.0, -2.0, math.nan, math.inf])
def test_a_scale_that_gives_no_positive_number_is_refused(factor: float) -> None:
    def scaled(role: sf.Role) -> sf.Role:
        return replace(role, lr_scale=Times(factor, role.lr_scale))

    with pytest.raises(ValueError, match="a scale must be positive and finite"):
        sf.Plan.of(nn.Linear(3, 3), overrides=[("weight", scaled)])


@pytest.mark.parametrize("adam", [sf.Adam, sf.RowAdam])
@pytest.mark.parametrize("fractions", [(1.0, 0.9), (-1.0, 0.9), (0.9, 1.0), (0.9, 1.5), (0.9, math.nan)])
def test_fractions_that_no_mean_has_are_refused(adam: type, fractions: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"fractions must lie in \[0, 1\)"):
        adam(*fractions)
    for eps in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="eps must be finite"):
            sf.Adam(eps=eps)


@pytest.mark.parametrize("factor", [0.25, 8.0])
def test_a_decay_promises_what_holds_where_the_roles_scale_is_another_than_its_own(factor: float) -> None:
    """Pulls along the weight at the largest rate of the promise, and beyond it, where nothing holds."""

    def scaled(role: sf.Role) -> sf.Role:
        return replace(role, lr_scale=Times(factor, role.lr_scale))

    norms = []
    for excess in (1.0, 2.5):
        plan = sf.Plan.of(layer := nn.Linear(8, 8, bias=False).double(), overrides=[("weight", scaled)], head=())
        bound, limit = map(float, re.fullmatch(r".*initial, (.*)\) by .* lr <= (.*)", plan["weight"].promise).groups())
        assert limit == pytest.approx(12.5 / factor, rel=1e-3)
        optimizer = sf.SteepestDescent(layer, plan, lr=excess * limit)
        plan.initialise_(layer)
        for step in range(40):
            layer.weight.grad = layer.weight.detach() * (-1) ** (step if excess > 1 else 1)
            optimizer.step()
        norms.append(float(sf.Spectral().norm(layer.weight.detach())) / bound)
    assert norms[0] <= 1.001 < norms[1]


def test_parameters_that_wrap_other_tensors_have_a_plan() -> None:
    """A `DTensor` has no address of its own, and is not taken for one memory with the others."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = distribute_module(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), mesh)
        assert {p.data_ptr() for p in model.parameters()} == {0}
        assert len(sf.Plan.of(model)) == 4
        partial = DTensor.from_local(torch.ones(4, 2), mesh, [Partial()])
        with pytest.raises(ValueError, match=r"^group0\.0 is a DTensor that cannot be stepped: Partial\(sum\)"):
            sf.SteepestDescent([{"params": [nn.Parameter(partial)], "role": "linear"}], lr=0.1)
    finally:
        dist.destroy_process_group()


def compiled_block(model):
    return nn.Sequential(torch.compile(model[0], backend="eager"), *model[1:])


def checkpointed(model):
    return nn.Sequential(*(checkpoint_wrapper(layer) for layer in model))


def data_parallel(model):
    """Of no device: another test of this process may have pretended that there is one."""
    with mock.patch("torch.nn.parallel.data_parallel._get_available_device_type", return_value=None):
        return nn.DataParallel(model)


@pytest.mark.parametrize("wrap", [data_parallel, compiled_block, checkpointed], ids=lambda wrap: wrap.__name__)
def test_a_plan_holds_with_and_without_what_wrappers_add_to_names(wrap):
    bare, other = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
    wrapped, plan = wrap(other), sf.Plan.of(bare)
    assert set(dict(wrapped.named_parameters())) != set(plan)
    plan.initialise_(bare)
    for given, model in ((plan, wrapped), (sf.Plan.of(wrapped), bare)):
        given.initialise_(model)
        optimizer = sf.SteepestDescent(model, given, lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).square().sum().backward()
            optimizer.step()
    for one, two in zip(bare.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(one, two)
    with pytest.raises(ValueError, match=r"the plan has no parameter 'module\.5\.weight'"):
        plan["module.5.weight"]
