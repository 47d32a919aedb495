"""Gradients whose squares overflow or vanish, in every recipe: weights stay finite, steps keep their bound."""

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.experiment.training.methods import METHODS, Steepest, method

RECIPES = [name for name in METHODS if isinstance(method(name), Steepest)]


@pytest.fixture
def model():
    torch.manual_seed(0)
    head = nn.Linear(8, 16, bias=False)
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 12), nn.Linear(12, 8), nn.LayerNorm(8), head)


def fill(model, scale):
    for p in model.parameters():
        p.grad = scale * torch.randn_like(p).sign() * (1 + torch.rand_like(p))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("scale", [1e15, 1e20, 1e37])
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
