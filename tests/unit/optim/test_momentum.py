"""State and dtypes: momentum as the average of gradients, rounding, memory per parameter, and random numbers."""

import dataclasses
import math

import pytest
import torch
from optim_helpers import ROLES, all_recipes, backward, noise, one, small
from torch import nn

import surefoot as sf
from comparisons import bits
from surefoot import Plan, SteepestDescent
from surefoot.roles import NATURAL


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lookahead", [None, 0.9, 0.5])
@pytest.mark.parametrize("role", ROLES)
def test_momentum_is_the_average_of_the_gradients(role, lookahead, dtype):
    """Normalising must not write to it, whatever the direction is computed from (torch's Muon did, in bfloat16)."""
    rule = dataclasses.replace(NATURAL[role], momentum=sf.Momentum(0.9, lookahead))
    w, optimizer = one(rule, noise(*ROLES[role]).to(dtype))
    average = torch.zeros(ROLES[role], dtype=torch.float64)
    for seed in range(6):
        w.grad = noise(*ROLES[role], seed=seed).to(dtype)
        average = 0.9 * average + 0.1 * w.grad.double()
        optimizer.step()
        assert optimizer.state[w]["momentum"].dtype == torch.float32
        assert torch.allclose(optimizer.state[w]["momentum"].double(), average, atol=1e-6)


def test_lookahead_uses_the_old_momentum():
    rule = sf.Role("own", sf.RMS(), view=NATURAL["bias"].view, momentum=sf.Momentum(0.9, 0.5))
    w, optimizer = one(rule, torch.zeros(4), lr=1.0)
    gradients = [noise(4, seed=s) for s in (1, 2)]
    for g in gradients:
        before = w.detach().clone()
        w.grad = g
        optimizer.step()
    look = 0.5 * 0.1 * gradients[0] + 0.5 * gradients[1]
    assert torch.allclose(before - w.detach(), look / look.square().mean().sqrt(), atol=1e-6)


@pytest.mark.parametrize("role", ROLES)
def test_low_precision_weights_are_rounded_once(role):
    value = noise(*ROLES[role]).bfloat16()
    w, optimizer = one(role, value)
    exact, twin = one(role, value.float())
    for seed in range(4):
        w.grad = noise(*ROLES[role], seed=seed).bfloat16()
        exact.grad = w.grad.float()
        optimizer.step()
        twin.step()
        assert torch.equal(bits(w), bits(exact.bfloat16()))
        with torch.no_grad():
            exact.copy_(exact.bfloat16())
    assert torch.equal(optimizer.state[w]["momentum"], twin.state[exact]["momentum"])


def test_float64_parameters_have_float64_momentum():
    value, g = noise(6, 4).double(), noise(6, 4, seed=1).double()
    w, optimizer = one("linear", value, lr=1.0)
    w.grad = g
    optimizer.step()
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    assert optimizer.state[w]["momentum"].dtype == torch.float64
    assert torch.allclose(value - w.detach(), math.sqrt(6 / 4) * u @ vh, atol=1e-3)
    assert torch.allclose(optimizer.state[w]["momentum"], 0.05 * g, atol=1e-15)


@all_recipes
def test_state_is_four_bytes_a_parameter_or_what_the_recipe_says(recipe):
    class Model(nn.Module):
        def __init__(self, d=64, v=256):
            super().__init__()
            self.table, self.out = nn.Embedding(v, d), nn.Linear(d, v, bias=False)
            self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(d, 4, 3 * d) for _ in range(2))

    model = Model()
    optimizer = SteepestDescent(model, Plan.of(model, recipe), lr=0.1)
    for p in model.parameters():
        p.grad = noise(*p.shape)
    optimizer.step()
    sizes = [t.numel() * t.element_size() for state in optimizer.state.values() for t in state.values()]
    entries = sum(p.numel() for p in model.parameters())
    limits = {"sign_sgd": 0.1, "steady": 5.2, "steady_soap": 10.6, "muon(keller)": 8.1}  # tables have 8 at most
    limit = limits.get(recipe.name, 4.1)
    assert sum(sizes) / entries <= limit


def test_state_holds_tensors_and_the_groups_plain_values():
    model = small()
    optimizer = SteepestDescent(model, lr=0.1)
    backward(model, 0)
    optimizer.step()
    state = optimizer.state_dict()
    assert all(isinstance(v, torch.Tensor) for entry in state["state"].values() for v in entry.values())
    for group in state["param_groups"]:
        assert all(isinstance(v, (str, int, float, bool, list)) for v in group.values())
    names = str([{k: v for k, v in g.items() if k != "param_names"} for g in state["param_groups"]])
    assert "up.weight" not in names


@all_recipes
def test_a_step_draws_no_random_numbers(recipe):
    model = small()
    optimizer = SteepestDescent(model, Plan.of(model, recipe, stabiliser=sf.PostClip(0.5)), lr=0.1)
    backward(model, 0)
    before = torch.get_rng_state()
    for _ in range(2):
        optimizer.step()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("way", ["loaded", "cast"])
@pytest.mark.parametrize("weights", [sf.RoundToNearest(), sf.StochasticRounding(), sf.MasterWeights()], ids=repr)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (torch.float32, torch.float64),
        (torch.float64, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_all_state_follows_the_parameters_dtype(before, after, weights, way):
    """After a checkpoint of another dtype and after model.to(dtype); counts stay as they are."""

    def build(dtype, recipe):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 8)).to(dtype)
        plan = sf.Plan.of(model, recipe, stabiliser=sf.PostClip(1.0))
        return model, sf.SteepestDescent(model, plan, lr=0.1, precision=sf.Precision(weights=weights))

    def train(model, optimizer):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()

    for recipe in (sf.recipes.steady(), sf.recipes.steady_soap(), sf.recipes.normuon()):
        (model, optimizer), (fresh, wanted) = build(before, recipe), build(after, recipe)
        train(model, optimizer)
        if way == "cast":
            model.to(after)
        else:
            saved = optimizer.state_dict()
            model, optimizer = build(after, recipe)
            optimizer.load_state_dict(saved)
        optimizer.stability()
        train(model, optimizer)
        train(fresh, wanted)
        dtypes, like = ([{k: x.dtype for k, x in s.items()} for s in o.state.values()] for o in (optimizer, wanted))
        assert dtypes == like, recipe.name
        assert all(p.isfinite().all() for p in model.parameters())
