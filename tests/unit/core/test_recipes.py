"""Recipes as role tables: they train, stay within their bounds, and place every kind of parameter."""

import dataclasses
import math

import pytest
import torch
from torch import nn

import surefoot as sf
from combinations import combinations
from surefoot import Plan, SteepestDescent, recipes
from surefoot.optim import create

RATES = {
    "steady": 0.03,
    "steady_bounded": 0.03,
    "steady_soap": 0.03,
    "beyond_mup": 0.03,
    "moga_row(1.5)": 0.03,
    "moga_column(2)": 0.03,
    "moga_column(3, head_p=1.5, bias_q=3)": 0.03,
    "muon(keller)": 0.2,
    "muon(moonlight)": 0.02,
    "scion": 3e-4,
    "lion": 3e-3,
    "sign_sgd": 3e-3,
    "sign_natural": 0.05,
    "hyperball": 0.03,
    "moonlight": 0.02,
    "scale": 0.003,
    "mano": 0.02,
    "rmnp": 0.05,
    "normalised_sgd": 0.01,
    "signum": 3e-3,
    "wion(5)": 0.03,
    "normuon": 0.02,
    "muon_squared": 0.02,
    "shampoo_muon": 0.02,
    "frobenius_sphere": 0.03,
}
RECIPES = [
    recipes.steady(),
    recipes.steady_bounded(),
    recipes.steady_soap(),
    recipes.beyond_mup(),
    recipes.moga_row(1.5),
    recipes.moga_column(),
    recipes.moga_column(3.0, head_p=1.5, bias_q=3.0),
    recipes.muon(),
    recipes.muon(sf.Moonlight()),
    recipes.scion(),
    recipes.lion(),
    recipes.sign_sgd(),
    sf.contrib.sign_natural(),
    recipes.hyperball(),
    recipes.moonlight(),
    recipes.scale(),
    recipes.mano(),
    recipes.rmnp(),
    recipes.normalised_sgd(),
    sf.contrib.signum(),
    recipes.wion(),
    recipes.normuon(),
    sf.contrib.muon_squared(),
    sf.contrib.shampoo_muon(),
    sf.contrib.frobenius_sphere(),
]
all_recipes = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
WITHIN_A_RADIUS = ("steady", "steady_bounded", "beyond_mup", "moga_row(1.5)", "moga_column(2)", "muon(keller)", "lion",
                   "normuon", "hyperball", "wion(5)")  # fmt: skip
"""Recipes with steps or radii of another norm each."""
VOCAB, WIDTH = 16, 24


class Bigram(nn.Module):
    """Predicts a fixed permutation of the tokens."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.out = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.table(tokens)
        return self.out(self.norm(x + self.down(self.up(x).relu())))


def train(recipe, lr, steps=40, **options):
    model = Bigram()
    plan = Plan.of(model, recipe, **options)
    plan.initialise_(model)
    optimizer = SteepestDescent(model, plan, lr=lr)
    tokens = torch.arange(VOCAB)
    goal = tokens.roll(5)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), goal)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, losses


@all_recipes
def test_every_recipe_learns(recipe):
    _, optimizer, losses = train(recipe, RATES[recipe.name])
    assert abs(losses[0] - math.log(VOCAB)) < 0.5
    assert losses[-1] < 0.5 * losses[0]
    assert optimizer.skipped() == {}


@combinations(lambda recipe: recipe.name in WITHIN_A_RADIUS, recipe=RECIPES)
def test_every_recipe_trains_within_a_radius(recipe):
    model, _, losses = train(recipe, RATES[recipe.name], 20, stabiliser=sf.PostClip(2.0))
    assert losses[-1] < 0.9 * losses[0]
    units = recipe if recipe.name == "steady_bounded" else None  # which has its own; norms are the natural ones
    plan = Plan.of(model, units)
    for name, p in model.named_parameters():
        role, block = plan[name].role, plan[name].blocks[0]
        norm = float(role.weight_geometry.norm(role.view.split(p.detach().double())[0]).max())
        assert norm <= 2.0 * role.radius_unit(block) * 1.001, name


def test_a_head_in_plain_units_cannot_reach_the_loss():
    """Radius 2 bounds the logits of a normed input by 2: the loss stays above log(1 + (V - 1) exp(-4))."""
    head = sf.recipes.beyond_mup().role("head")
    plain = dataclasses.replace(head, radius_unit=sf.Constant(), stabiliser=sf.PostClip(2.0))
    floor = math.log(1 + (VOCAB - 1) * math.exp(-2 * 2))
    radius = {"stabiliser": sf.PostClip(2.0)}
    *_, stuck = train(
        recipes.beyond_mup(), 0.05, 100, overrides=[("out.weight", plain), ("out.bias", "scalar")], **radius
    )
    *_, free = train(recipes.beyond_mup(), 0.05, 100, **radius)
    assert min(free) < min(0.5 * min(stuck), floor)


@all_recipes
def test_every_kind_of_parameter_has_a_role(recipe):
    kinds = ("linear", "embedding", "head", "gain", "bias", "scalar", "conv", "experts", "router", "positions")
    for kind in (*kinds, "patches", "last_gain"):
        role = recipe.role(kind)
        assert role.name == {"patches": "conv", "last_gain": "gain"}.get(kind, kind)
        assert isinstance(role.geometry, sf.Geometry)
        assert role.lr_scale((1, 4, 6)) > 0
    with pytest.raises(ValueError, match=r"'matrix'.*linear"):
        recipe.role("matrix")


@all_recipes
def test_derived_kinds_follow_their_base(recipe):
    bases = {"conv": "linear", "patches": "conv", "experts": "linear", "router": "head", "positions": "embedding"}
    for kind, base in {**bases, "last_gain": "gain"}.items():
        ours, theirs = recipe.role(kind), recipe.role(base)
        assert ours.geometry == theirs.geometry
        assert ours.momentum == theirs.momentum
        if kind not in recipe.table:  # a convolution under `steady` has a factor of its own
            assert ours.stabiliser == theirs.stabiliser
            assert ours.lr_scale == theirs.lr_scale


@all_recipes
def test_initial_values_and_layouts_are_natural_under_every_recipe(recipe):
    model = Bigram()
    natural, plan = Plan.of(model), Plan.of(model, recipe)
    for name in plan:
        assert plan[name].role.initial == natural[name].role.initial
        assert plan[name].blocks[0] == natural[name].blocks[0], name


def test_published_decay_is_by_the_learning_rate_alone():
    """Neither the role's scale nor its radius unit enters: weights shrink by `1 - 0.1 lr`."""
    lr = 0.5
    for recipe, ratio in ((recipes.lion(), 1.0), (recipes.muon(adam_lr=0.25), 0.25)):
        model = Bigram()
        plan = Plan.of(model, recipe)
        plan.initialise_(model)
        big = {name: 1e6 * p.detach() for name, p in model.named_parameters()}
        model.load_state_dict(big)
        optimizer = SteepestDescent(model, plan, lr=lr)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        for name in ("table.weight", "up.weight", "down.weight", "out.weight"):
            own = ratio if name in ("table.weight", "out.weight") else 1.0
            left = (model.get_parameter(name).norm() / big[name].norm()).item()
            assert left == pytest.approx(1 - 0.1 * lr * own, rel=1e-3), (recipe.name, name)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: recipes.moga_row(0.5), "1 <= p <= q"),
        (lambda: recipes.moga_column(0.5), "1 <= p <= q"),
        (lambda: recipes.moga_row(head_p=0.5), "1 <= p <= q"),
        (lambda: recipes.moga_row(bias_q=0.5), "VectorMean's exponent must be at least 1"),
        (lambda: sf.Momentum(1.0), r"\[0, 1\)"),
        (lambda: sf.Momentum(0.9, -0.1), r"\[0, 1\)"),
        (lambda: sf.Constant(0.0), "positive"),
        (lambda: sf.FanRatio(0.5), "limit must be at least 1"),
        (lambda: sf.FanRatio(math.nan), "limit must be at least 1"),
        (lambda: sf.PostClip(0.0), "positive"),
        (lambda: sf.WeightDecay(-1.0), "positive"),
        (lambda: sf.Rescale(math.inf), "finite"),
    ],
)
def test_impossible_settings_raise(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def published_plan(name, model, run):
    room = sf.contrib if name in sf.contrib.__all__ else recipes
    return Plan.of(model, getattr(room, name)(), run=run)


@pytest.mark.parametrize("name", create.RECIPES)
def test_an_optimizer_by_the_name_of_its_recipe_is_that_of_its_plan(name):
    model, run = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 8)), sf.Run(4000, 64)
    plan = published_plan(name, model, run)
    optimizer = sf.create_optimizer(model, name, run=run, lr=0.25, maximize=True)
    assert sorted(x for group in optimizer.param_groups for x in group["plan"]) == sorted(plan[n].digest for n in plan)
    assert all(group["lr"] == 0.25 and group["maximize"] for group in optimizer.param_groups)
    if plan.rate:
        assert sf.create_optimizer(model, name, run=run).param_groups[0]["lr"] == plan.rate
    else:
        with pytest.raises(ValueError, match="lr"):
            sf.create_optimizer(model, name, run=run)


def test_an_optimizer_by_a_recipe_of_ones_own_and_the_default():
    model, run = nn.Linear(4, 2, bias=False), sf.Run(100, 64)
    own = sf.create_optimizer(model, recipes.moga_row(1.5), lr=0.1)
    assert own.param_groups[0]["plan"] == [Plan.of(model, recipes.moga_row(1.5))["weight"].digest]
    default, plan = sf.create_optimizer(model, run=run), Plan.of(model, run=run)
    assert (default.param_groups[0]["plan"], default.param_groups[0]["lr"]) == ([plan["weight"].digest], plan.rate)


def test_an_unknown_name_is_refused_with_all_that_are_known():
    with pytest.raises(ValueError, match="unknown recipe 'adamw'; choose one of ") as caught:
        sf.create_optimizer(nn.Linear(4, 2), "adamw", lr=0.1)
    assert all(name in str(caught.value) for name in ("steady", "muon", "scion", "signum", *create.RECIPES))


def test_a_natural_sign_step_moves_every_token_by_the_same_at_every_width():
    """Under the matrix rule a token's step would fall as 1/width."""
    for width in (16, 64):
        model = nn.Embedding(8, width)
        plan = Plan.of(model, sf.contrib.sign_natural(), head=())
        optimizer = SteepestDescent(model, plan, lr=0.1)
        before = model.weight.detach().clone()
        model.weight.grad = torch.randn(8, width, generator=torch.Generator().manual_seed(0))
        optimizer.step()
        moved = (model.weight.detach() - before).square().mean(-1).sqrt()
        assert torch.allclose(moved, torch.full((8,), 0.1), atol=1e-6)


def test_the_default_moves_a_narrowing_layer_further_up_to_a_limit_and_a_convolution_by_two():
    """`FanRatio`: a step's spectral norm over its natural unit is d_in/d_out, 1 where that is less, 4 where more.

    A kernel whose patches do not overlap has factor 1.
    """
    cases = {nn.Linear(32, 8): 4.0, nn.Linear(24, 12): 2.0, nn.Linear(8, 32): 1.0, nn.Linear(96, 8): 4.0}
    patches = {nn.Conv2d(24, 12, 1): 1.0, nn.Conv2d(6, 12, 2, stride=2): 1.0, nn.Conv2d(6, 12, 2, 3, dilation=2): 1.0}
    kernels = {nn.Conv2d(24, 12, 3): 2.0, nn.Conv1d(2, 16, 2): 2.0, nn.Conv2d(6, 12, 2, 2, dilation=2): 2.0}
    for layer, factor in (cases | patches | kernels).items():
        model = nn.Sequential(layer, nn.LayerNorm(1))  # not last: a head is no hidden matrix
        before = layer.weight.detach().clone()
        optimizer = SteepestDescent(model, Plan.of(model, head=(), stabiliser=sf.Free()), lr=0.01)
        layer.weight.grad = torch.randn(before.shape, generator=torch.Generator().manual_seed(0))
        optimizer.step()
        d_out, d_in = len(before), before[0].numel()
        change = torch.linalg.matrix_norm((layer.weight.detach() - before).reshape(d_out, d_in), 2)
        assert change.item() == pytest.approx(0.01 * factor * math.sqrt(d_out / d_in), rel=0.03), layer
