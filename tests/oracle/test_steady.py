"""The default recipe against its docstring, written out; and that nothing in it depends on the width."""

import math

import pytest
import torch
from test_related import exact
from test_torch import HIDDEN, TABLES, compare, loops, polar, run

import surefoot as sf
from surefoot import recipes

LR = 0.02


def steady_loop(name, w, state, g, t):
    if name in TABLES:
        m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
        v = state["v"] = 0.98 * state.get("v", 0) + 0.02 * g.square().mean(1, keepdim=True)
        h = m / (1 - 0.9**t) / (v / (1 - 0.98**t)).sqrt()
        return w * (1 - 0.08 * LR) - LR * (20 * h / w.shape[1] if name == "out.weight" else 2 * h)
    old = state.get("m", torch.zeros_like(g))
    state["m"], ahead = 0.9 * old + 0.1 * g, 0.5 * old + 0.5 * g
    d_out, d_in = w.shape if w.ndim > 1 else (1, 1)
    if name in HIDDEN:
        return w * (1 - 0.08 * LR) - LR * max(1, d_in / d_out) * math.sqrt(d_out / d_in) * polar(ahead)
    if name == "norm.weight":
        return w - LR / 20 * ahead.sign()
    return w - LR / 10 * ahead / ahead.square().mean().sqrt()


def test_the_docstrings_loop():
    compare(run(exact(recipes.steady()), LR, steps=7), loops(steady_loop, steps=7), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["linear", "embedding", "head", "gain", "bias"])
def test_a_step_has_the_same_norm_at_every_width(kind):
    """In the role's own norm, for a gradient that never changes: the direction's norm 1 times the factor."""
    role, sizes = recipes.steady().role(kind), []
    for width in (32, 64, 256):
        shape = {"linear": (width, 4 * width), "gain": (width,), "bias": (width,)}.get(kind, (16, width))
        p = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
        optimizer = sf.SteepestDescent([{"params": [("weight", p)], "role": role}], lr=LR)
        p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
        optimizer.step()
        sizes.append(float(role.weight_geometry.norm(p.detach())) / LR)
    factor = {"linear": 4.0, "embedding": 2.0, "head": 20.0, "gain": 0.05, "bias": 0.1}[kind]
    assert sizes == pytest.approx([factor] * 3, rel=2e-3)


def test_experts_routers_and_positions_take_the_roles_they_derive_from():
    table = recipes.steady()
    for kind, base in (("experts", "linear"), ("router", "head"), ("tied_positions", "head")):
        derived, own = table.role(kind), table.role(base)
        assert (derived.geometry, derived.momentum, derived.lr_scale) == (own.geometry, own.momentum, own.lr_scale)
        assert derived.stabiliser == own.stabiliser


def test_state_of_a_table_is_a_float_an_entry_and_one_a_row():
    p = torch.nn.Parameter(torch.ones(100, 32))
    optimizer = sf.SteepestDescent([{"params": [("weight", p)], "role": recipes.steady().role("embedding")}], lr=LR)
    p.grad = torch.ones_like(p)
    optimizer.step()
    kept = (x for x in optimizer.state[p].values() if torch.is_tensor(x))
    assert sorted(x.numel() for x in kept if x.numel() > 1) == [100, 3200]


@pytest.mark.parametrize("last", [torch.nn.Linear, torch.nn.Conv1d])
def test_a_last_layer_of_fixed_size_takes_steps_of_one_norm_at_every_width(last):
    """Classes do not grow with the width, and a convolution's taps are no width."""
    moved = []
    for width in (64, 256, 1024):
        sizes = (width, 10) if last is torch.nn.Linear else (width, width, 3)
        model = last(*sizes, bias=False)
        plan = sf.Plan.of(model)
        start = model.weight.detach().clone()
        optimizer = sf.SteepestDescent(model, plan, lr=LR)
        model.weight.grad = torch.randn(start.shape, generator=torch.Generator().manual_seed(width))
        optimizer.step()
        role = plan["weight"].role
        moved.append(float(role.geometry.norm(role.view.split(model.weight.detach() - start)[0]).max()) / LR)
    assert moved == pytest.approx([4.0 if last is torch.nn.Linear else 2.0] * 3, rel=0.1)
