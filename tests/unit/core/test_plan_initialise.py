"""The plan's initial values: their norms, and what they depend on and do not."""

import dataclasses
import math

import pytest
import torch
from plan_helpers import Language
from torch import nn

import surefoot as sf
from comparisons import natural_norm, same_bits, weights
from surefoot import Plan, recipes


@pytest.mark.parametrize("width", [64, 128, 256, 512])
def test_initial_norms_are_about_one_at_every_width(width):
    model = nn.ModuleDict(
        {
            "square": nn.Linear(width, width),
            "wide": nn.Linear(4 * width, width),
            "tall": nn.Linear(width, 4 * width),
            "table": nn.Embedding(300, width),
            "head": nn.Linear(width, 300),
            "conv": nn.Conv2d(width // 4, width, 3, groups=4),
            "norm": nn.LayerNorm(width),
        }
    )
    plan = Plan.of(model, head="head")
    plan.initialise_(model, seed=3)
    for name in ("square", "wide", "tall"):
        assert 0.9 < natural_norm(model[name].weight) < 1.06
        assert not model[name].bias.any()
    rms = model["table"].weight.square().mean(-1).sqrt()
    assert rms.max() < 1 + 3.2 / math.sqrt(width)
    assert rms.min() > 1 - 3.2 / math.sqrt(width)
    head = width * model["head"].weight.square().mean(-1).sqrt()
    assert 1 < head.max() < 1 + 3.2 / math.sqrt(width)
    for kernel in model["conv"].weight.reshape(4, width // 4, -1):
        assert 0.85 < natural_norm(kernel) < 1.1
    assert bool((model["norm"].weight == 1).all())
    assert not model["norm"].bias.any()


def test_initial_standard_deviations():
    model = Language(vocab=2000, width=128)
    Plan.of(model).initialise_(model)
    assert model.table.weight.std().item() == pytest.approx(1, rel=0.01)
    assert model.out.weight.std().item() == pytest.approx(1 / 128, rel=0.01)
    assert model.hidden.weight.std().item() == pytest.approx(1 / (2 * math.sqrt(128)), rel=0.02)
    layer = nn.Linear(100, 900)
    Plan.of(layer).initialise_(layer)
    assert layer.weight.std().item() == pytest.approx(3 / (10 + 30), rel=0.01)  # fan-in and fan-out differ


def initialised(model, seed=0, recipe=None, **kwargs):
    Plan.of(model, recipe, **kwargs).initialise_(model, seed)
    return weights(model)


def test_initialisation_is_deterministic_in_the_seed_and_leaves_the_global_generator():
    torch.manual_seed(5)
    a, b = Language(), Language()
    before = torch.get_rng_state()
    first, second, other = initialised(a), initialised(b), initialised(a, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    assert same_bits(first, second)
    assert same_bits(first, initialised(a))
    assert not torch.equal(first["hidden.weight"], other["hidden.weight"])


def test_equal_shapes_get_different_values():
    values = initialised(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    assert not torch.equal(values["0.weight"], values["1.weight"])


def test_initialisation_does_not_depend_on_the_order_or_the_other_parameters():
    class Reversed(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(8, 50, bias=False)
            self.extra = nn.Linear(8, 3)
            self.hidden = nn.Linear(8, 8)
            self.norm = nn.LayerNorm(8)
            self.table = nn.Embedding(50, 8)

    a, b = initialised(Language()), initialised(Reversed())
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "recipe",
    [recipes.moga_row(1.5), recipes.moga_column(), recipes.muon(), recipes.scion(), recipes.lion(), recipes.sign_sgd()],
    ids=lambda recipe: recipe.name,
)
def test_initialisation_does_not_depend_on_the_recipe(recipe):
    assert same_bits(initialised(Language()), initialised(Language(), recipe=recipe))
    assert same_bits(initialised(Language()), initialised(Language(), stabiliser=sf.PostClip(0.1)))


def test_initialisation_does_not_depend_on_default_dtype_and_device():
    model, expected = Language(), initialised(Language())
    plan = Plan.of(model)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            plan.initialise_(model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert same_bits(expected, weights(model))


def test_initialisation_by_way_of_the_meta_device():
    with torch.device("meta"):
        model = Language()
    plan = Plan.of(model)
    assert plan.hash == Plan.of(Language()).hash
    plan.initialise_(model)  # nothing to write to, and no error
    assert model.hidden.weight.is_meta
    model.to_empty(device="cpu")
    plan.initialise_(model)
    assert same_bits(initialised(Language()), weights(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_initialisation_in_other_dtypes_is_the_rounded_float32_value(dtype):
    expected, values = initialised(Language()), initialised(Language().to(dtype))
    assert all(values[name].dtype == dtype and torch.equal(values[name], expected[name].to(dtype)) for name in expected)


def test_initialisation_of_parameters_that_are_not_contiguous():
    conv, plain = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last), nn.Conv2d(4, 8, 3)
    linear, transposed = nn.Linear(6, 4), nn.Linear(6, 4)
    transposed.weight = nn.Parameter(torch.zeros(6, 4).T)
    assert not conv.weight.is_contiguous()
    assert not transposed.weight.is_contiguous()
    assert same_bits(initialised(plain), initialised(conv))
    assert same_bits(initialised(linear), initialised(transposed))
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_initialisation_leaves_frozen_parameters_and_buffers():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].weight.requires_grad_(False).fill_(7)
    model[1].running_mean.fill_(3)
    initialised(model)
    assert bool((model[0].weight == 7).all())
    assert bool((model[1].running_mean == 3).all())


@pytest.mark.parametrize(
    ("other", "message"),
    [(nn.Sequential(nn.Linear(4, 4)), "weight is missing"), (nn.Linear(4, 5), r"weight has shape \(5, 4\)")],
    ids=["missing", "shape"],
)
def test_initialising_another_model_raises(other, message):
    with pytest.raises(ValueError, match=message):
        Plan.of(nn.Linear(4, 4)).initialise_(other)


@pytest.mark.parametrize("shape", [(3, 6, 4), (1, 4, 6), (2, 5, 5), (1, 1, 7), (1, 0, 4)], ids=str)
def test_orthogonal_values_have_singular_values_of_norm_1(shape):
    w, again = torch.empty(shape), torch.empty(shape)
    sf.Orthogonal().fill_(w, torch.Generator().manual_seed(3))
    sf.Orthogonal().fill_(again, torch.Generator().manual_seed(3))
    assert torch.equal(w, again)
    natural = torch.linalg.svdvals(w.double()) * (shape[-1] / max(1, shape[-2])) ** 0.5
    torch.testing.assert_close(natural, torch.ones_like(natural), rtol=0, atol=1e-6)


@pytest.mark.parametrize("norm", [sf.Spectral(), sf.RowRMS(), sf.HeadRMS()], ids=repr)
def test_exactly_scaled_values_have_norm_1(norm):
    w = torch.empty(3, 6, 4)
    sf.ExactNorm(sf.LinearNormal(), norm).fill_(w, torch.Generator().manual_seed(0))
    torch.testing.assert_close(norm.norm(w), torch.ones(3), rtol=0, atol=1e-5)
    sf.ExactNorm(sf.Fill(0.0), norm).fill_(w, torch.Generator())
    assert not w.any()


def test_a_plan_fills_with_them():
    model = nn.Linear(8, 4, bias=False)
    role = dataclasses.replace(sf.recipes.beyond_mup().role("linear"), initial=sf.Orthogonal())
    plan = sf.Plan.of(model, overrides=[("weight", role)])
    plan.initialise_(model, seed=0)
    assert float(sf.Spectral().norm(model.weight.detach())) == pytest.approx(1, abs=1e-5)
    assert "orthogonal" in str(plan)


@pytest.mark.parametrize("row", [0, 2, -1])
@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag])
def test_the_padding_row_is_zero_and_stays_so_and_the_others_are_what_they_were(table, row):
    padded, usual = (nn.ModuleDict({"table": table(5, 4, padding_idx=index)}) for index in (row, None))
    plan = Plan.of(padded, head=())
    plan.initialise_(padded, seed=1)
    Plan.of(usual, head=()).initialise_(usual, seed=1)
    expected = usual["table"].weight.detach().clone()
    expected[row] = 0
    assert torch.equal(padded["table"].weight, expected)
    assert plan.rows()[0]["init"] == f"std 1 but 0 in row {row % 5}"
    optimizer = sf.SteepestDescent(padded, plan, lr=0.1)
    padded["table"](torch.arange(5)[None]).square().sum().backward()
    optimizer.step()
    assert [i for i, w in enumerate(padded["table"].weight) if not w.any()] == [row % 5]


def test_a_table_without_a_padding_row_keeps_its_role():
    assert Plan.of(nn.Embedding(5, 4), head=())["weight"].role.initial == sf.UnitNormal()


def test_the_padding_row_of_positions_beside_a_tied_table_is_zero():
    model = nn.Module()
    model.places, model.table, model.out = nn.Embedding(6, 8, padding_idx=1), nn.Embedding(50, 8), nn.Linear(8, 50)
    model.out.weight = model.table.weight
    plan = Plan.of(model)
    plan.initialise_(model)
    assert "added to table.weight" in plan["places.weight"].why
    assert [i for i, w in enumerate(model.places.weight) if not w.any()] == [1]
    assert 0 < model.places.weight.abs().max() < 1


def test_a_model_with_more_than_the_plan_has_is_refused_and_frozen_parts_are_not():
    plan = sf.Plan.of(nn.Sequential(nn.Linear(4, 4)), head=())
    larger = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = larger[0].weight.detach().clone()
    with pytest.raises(ValueError, match=r"1\.weight is not in the plan: make a plan of this model"):
        plan.initialise_(larger)
    assert torch.equal(before, larger[0].weight)
    larger[1].requires_grad_(False)
    plan.initialise_(larger)
    assert not torch.equal(before, larger[0].weight)


@pytest.mark.parametrize("inputs", [1, 10, 16])
def test_biases_of_few_inputs_are_drawn_with_the_size_that_torch_gives_them(inputs):
    layer = nn.Linear(inputs, 4096)
    built = layer.bias.detach().clone()
    plan = Plan.of(layer, head=())
    plan.initialise_(layer)
    rms, by_torch = (float(x.square().mean().sqrt()) for x in (layer.bias.detach(), built))
    assert rms == pytest.approx(by_torch, rel=0.05)
    assert rms == pytest.approx((3 * inputs) ** -0.5, rel=0.05)
    assert abs(float(layer.bias.detach().mean())) < 0.1 * rms


@pytest.mark.parametrize("layer", [nn.Linear(17, 64), nn.Conv2d(1, 64, 3), nn.ConvTranspose2d(1, 64, 3)], ids=str)
def test_other_biases_are_0(layer):
    Plan.of(layer, head=()).initialise_(layer)
    assert not layer.bias.any()


def test_initial_biases_of_the_recipes_own_are_kept():
    recipe = recipes.steady()
    bias = dataclasses.replace(recipe.role("bias"), initial=sf.Fill(3.0))
    layer = nn.Linear(1, 8)
    plan = Plan.of(layer, dataclasses.replace(recipe, table={**recipe.table, "bias": bias}), head=())
    plan.initialise_(layer)
    assert bool((layer.bias == 3).all())


def test_a_regressor_of_one_input_learns_at_the_rate_of_its_run():
    """Where all biases start at 0 it does not in 300 steps: .34 of the .5 that a constant has."""
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    run = sf.Run(300, 64)
    plan = Plan.of(model, run=run)
    plan.initialise_(model)
    optimizer = sf.SteepestDescent(model, plan)
    schedule, generator = run.schedule(optimizer), torch.Generator().manual_seed(1)
    for _ in range(run.steps):
        x = torch.rand(run.tokens, 1, generator=generator) * 2 - 1
        loss = (model(x) - (9 * x).sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    assert loss.item() < 0.05
