"""Gradients whose squares overflow or vanish, in every recipe: weights stay finite, steps keep their bound."""

from copy import deepcopy

import pytest
import torch
from torch import nn

import surefoot as sf
from combinations import combinations
from surefoot.experiment.training.methods import METHODS, Steepest, method

from .roles import SCHEMES

RECIPES = [name for name in METHODS if isinstance(method(name), Steepest)]


@pytest.fixture
def model():
    torch.manual_seed(0)
    head = nn.Linear(24, 20, bias=False)
    return nn.Sequential(nn.Embedding(20, 24), nn.Linear(24, 40), nn.Linear(40, 24), nn.LayerNorm(24), head)


def fill(model, scale):
    for p in model.parameters():
        p.grad = scale * torch.randn_like(p).sign() * (1 + torch.rand_like(p))


@combinations(name=RECIPES, scale=[1e15, 1e20, 1e37])
def test_one_huge_gradient_leaves_weights_finite_and_steps_within_their_bound(model, name, scale):
    """It counts as not finite where squares are kept; a direction's length alone does not depend on it."""
    plan = sf.Plan.of(model, method(name).recipe, stabiliser=sf.PostClip(2.0))
    plan.initialise_(model)
    optimizer = sf.SteepestDescent(model, plan, lr=0.1)
    kept = {weight for weight, placement in plan.placements.items() if placement.role.momentum.squares}
    for size in (1.0, scale, 1.0, 1.0):
        before = {weight: p.detach().clone() for weight, p in model.named_parameters()}
        bounds = optimizer.stability()
        fill(model, size)
        optimizer.step()
        for weight, numbers in optimizer.stability(before).items():
            assert numbers["update_measured"] <= bounds[weight]["update_upper"] * 1.001 + 1e-6, weight
            assert numbers["forward_upper"] <= 1.001 * plan[weight].stabilisers[0].radius, weight
    assert set(optimizer.skipped()) == (kept if scale > 1.8e16 else set())


@pytest.mark.parametrize("scale", [1e-30, 1e-24, 2e-22, 1e-21, 1e-20, 1e-19, 1e-18, 1e-17, 1e-16])
def test_rows_whose_squares_lose_digits_step_no_further_than_they_may(scale):
    table = nn.Embedding(1, 8)
    nn.init.zeros_(table.weight)
    optimizer = sf.SteepestDescent(table, sf.Plan.of(table, head=()), lr=0.01)
    for _ in range(60):
        before, bound = {"weight": table.weight.detach().clone()}, optimizer.stability()["weight"]["update_upper"]
        table.weight.grad = torch.full_like(table.weight, scale)
        optimizer.step()
        assert optimizer.stability(before)["weight"]["update_measured"] <= bound * 1.001
    assert scale < 1e-17 or table.weight.abs().amax() > 0.5 * 60 * 0.01


def sequences(scale, p):
    """Of gradients of one size: alternating, long one way and back, of random signs, one column, between usual ones."""
    ones, usual = torch.full_like(p, scale), torch.randn_like(p)
    first = torch.zeros_like(p).index_fill_(-1, torch.tensor([0]), scale)
    yield [ones, -ones] * 3
    yield [ones] * 60 + [-ones] * 2
    yield [scale * torch.randn_like(p).sign() for _ in range(6)]
    yield [first] * 6 + [-first] * 2 + [usual]
    yield [usual, ones, usual, -ones, usual]


LARGEST = float(torch.finfo(torch.float32).max)


SCALES = [LARGEST / 4, 3.4e38, 8e37, 1e36, 2e38]


@combinations(scheme=[None, *SCHEMES], name=RECIPES, turn=range(5))
def test_averages_of_gradients_near_the_largest_float_are_finite(model, scheme, name, turn):
    """Differences of averages, and of what is added to them, are: so are weights and state, whatever comes next."""
    scale = SCALES[(turn + RECIPES.index(name)) % 5]
    plan = sf.Plan.of(model, method(name).recipe, stabiliser=scheme)
    plan.initialise_(model)
    optimizer = sf.SteepestDescent(model, plan, lr=1e-3, maximize=turn == 2)
    pulls = [list(sequences(scale, p))[turn] for p in model.parameters()]
    for step, gradients in enumerate(zip(*pulls, strict=True)):
        measured = turn == 0 and step in (0, len(pulls[0]) - 1)
        before = {weight: p.detach().clone() for weight, p in model.named_parameters()}
        bounds = optimizer.stability() if measured else {}
        for p, g in zip(model.parameters(), gradients, strict=True):
            p.grad = g
        optimizer.step()
        for weight, numbers in (optimizer.stability(before) if measured else {}).items():
            assert numbers["update_measured"] <= bounds[weight]["update_upper"] * 1.01 + 1e-6, weight
    for p in model.parameters():
        tensors = {**optimizer.state[p], "weight": p}
        assert all(x.isfinite().all() for key, x in tensors.items() if key != "upper" and x.is_floating_point())
    momentum = {weight for weight, placement in plan.placements.items() if not placement.role.momentum.squares}
    assert bool(optimizer.skipped().keys() & momentum) == (scale > LARGEST / 4 and bool(momentum))


def patterns(p):
    """Gradients of one size: all equal, of random signs, of alternating ones; one column, one row, one entry of it."""
    one = torch.zeros_like(p)
    one[..., 0] = 1
    yield torch.ones_like(p)
    yield torch.randn_like(p).sign()
    yield 1 - 2 * (torch.arange(p.numel()) % 2).reshape(p.shape).to(p.dtype)
    yield one
    yield torch.zeros_like(p).index_fill_(0, torch.tensor([0]), 1)
    yield one * torch.zeros_like(p).index_fill_(0, torch.tensor([0]), 1)


def weights_along(model, plan, scale):
    """After each step by one of the patterns, of roles that keep no squares."""
    plan.initialise_(model)
    torch.manual_seed(1)
    pulls = [list(patterns(p.detach())) for p in model.parameters()]
    optimizer = sf.SteepestDescent(model, plan, lr=0.01)
    for gradients in zip(*pulls, strict=True):
        for p, g in zip(model.parameters(), gradients, strict=True):
            p.grad = scale * g
        optimizer.step()
        assert all(p.isfinite().all() for p in model.parameters())
        yield {name: p.detach().clone() for name, p in model.named_parameters() if not plan[name].role.momentum.squares}


@combinations(
    lambda scheme, name: (
        RECIPES.index(name) % len(SCHEMES) == SCHEMES.index(scheme)
        or (name in ("scale", "sign_sgd") and isinstance(scheme, (sf.Stiefel, sf.ColumnSphere)))
    ),
    scheme=SCHEMES,
    name=RECIPES,
)
def test_steps_just_below_the_threshold_are_those_of_usual_gradients(model, scheme, name):
    """No sum of products overflows, under any recipe, stabiliser and role: the scale of a gradient does not matter."""
    plan, largest = sf.Plan.of(model, method(name).recipe, stabiliser=scheme), LARGEST / 4 * (1 - 1e-6)
    usual = weights_along(deepcopy(model), plan, largest * 2.0**-120)
    for far, near in zip(weights_along(model, plan, largest), usual, strict=True):
        for weight, x in far.items():
            torch.testing.assert_close(x, near[weight], atol=1e-3, rtol=0, msg=weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_threshold_is_that_of_the_dtype_of_the_step(dtype):
    """A quarter of the largest float32 for bfloat16 parameters, whose largest value is nearly as large."""
    largest = float(torch.finfo(torch.promote_types(dtype, torch.float32)).max)
    p = nn.Parameter(torch.zeros(4, 4, dtype=dtype))
    optimizer = sf.SteepestDescent([{"params": [("w", p)], "role": "linear"}], lr=0.1)
    for part, skipped in ((0.2, 0), (0.3, 1), (0.98, 2), (-0.98, 3)):
        p.grad = torch.full((4, 4), part * largest, dtype=dtype)
        optimizer.step()
        assert optimizer.skipped().get("w", 0) == skipped
    assert p.isfinite().all()
