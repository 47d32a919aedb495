"""Stability numbers of the layers: those of the sources, attained by the worst input, and bounds of blocks of them."""

import copy
import math

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.experiment.models.decoder import reference
from surefoot.layers import InNormLinear, OutNormLinear, PostInNorm, PostNorm, PreNorm
from surefoot.monitor.block_bounds import block_bounds


def rms(x):
    return x.square().mean(-1).sqrt()


def changed(module, by=0.3):
    """The module after a change of all its parameters."""
    torch.manual_seed(7)
    new = copy.deepcopy(module)
    with torch.no_grad():
        for p in new.parameters():
            p.add_(torch.randn_like(p), alpha=by * float(p.abs().mean()) + 0.01)
    return new


def measured(new, old, d, sizes=(1e-6, 0.1, 1.0, 1e4)):
    """The largest RMS of the output and of its change over vectors of all these sizes."""
    torch.manual_seed(3)
    x = torch.cat([size * torch.randn(400, d, dtype=torch.float64) for size in sizes])
    with torch.no_grad():
        return float(rms(new(x)).max()), float(rms(new(x) - old(x)).max())


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (16, 16)])
def test_the_numbers_of_an_in_norm_layer_are_those_of_the_source(shape):
    """Forward and update are `sqrt(d_in/d_out) |W|_2` and that of dW, attained by inputs of any length."""
    torch.manual_seed(0)
    old = InNormLinear(*shape, bias=True, dtype=torch.float64)
    new = changed(old)
    bounds, factor = block_bounds(new, old), math.sqrt(shape[0] / shape[1])
    weight, bias = new.weight.detach(), new.bias.detach()
    step, bias_step = weight - old.weight.detach(), bias - old.bias.detach()
    assert bounds.keys() == {"forward_bound", "update_bound"}
    assert bounds["forward_bound"] == pytest.approx(
        factor * float(torch.linalg.matrix_norm(weight, 2)) + float(rms(bias)), rel=1e-6
    )
    assert bounds["update_bound"] == pytest.approx(
        factor * float(torch.linalg.matrix_norm(step, 2)) + float(rms(bias_step)), rel=1e-6
    )
    forward, update = measured(new, old, shape[0])
    assert forward <= bounds["forward_bound"]
    assert update <= bounds["update_bound"]
    worst = 1e-9 * torch.linalg.svd(weight).Vh[0]
    with torch.no_grad():
        assert float(rms(new(worst) - bias)) == pytest.approx(factor * float(torch.linalg.matrix_norm(weight, 2)))


def test_the_dependency_of_in_norm_on_the_sphere_is_the_norm_and_off_it_unbounded():
    torch.manual_seed(0)
    layer = InNormLinear(12, 5, dtype=torch.float64)
    norm = float(sf.Spectral().norm(layer.weight.detach()))
    x, y = (z / rms(z)[:, None] for z in torch.randn(2, 500, 12, dtype=torch.float64))
    with torch.no_grad():
        assert float((rms(layer(x) - layer(y)) / rms(x - y)).max()) <= norm
        near = 1e-6 * x
        assert float((rms(layer(near) - layer(-near)) / rms(2 * near)).max()) > 1e5 * norm


BLOCKS = {
    "rms norm": lambda: nn.RMSNorm(6, eps=1e-12),
    "layer norm": lambda: nn.LayerNorm(6),
    "norm and mlp": lambda: nn.Sequential(nn.RMSNorm(6, eps=1e-12), nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)),
    "in norm mlp": lambda: nn.Sequential(InNormLinear(6, 9, bias=True), nn.ReLU(), InNormLinear(9, 6)),
    "in norm, linear": lambda: nn.Sequential(InNormLinear(6, 9), nn.Linear(9, 6)),
    "out norm": lambda: OutNormLinear(6, 6),
    "out norm, linear": lambda: nn.Sequential(OutNormLinear(6, 9), nn.Linear(9, 6)),
    "post norm": lambda: PostNorm(nn.Linear(6, 6)),
    "post norm as in norm": lambda: PostInNorm(nn.Linear(6, 6)),
    "in norm, post in norm": lambda: nn.Sequential(InNormLinear(6, 6), PostInNorm(nn.Linear(6, 6))),
}
NO_UPDATE = {"in norm mlp", "in norm, post in norm"}
"""A norm behind a layer that changed: no bound."""


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_bounded_whatever_the_length_of_its_input(name):
    torch.manual_seed(0)
    old = BLOCKS[name]().double()
    new = changed(old)
    bounds = block_bounds(new, old)
    assert bounds.keys() == {"forward_bound", *([] if name in NO_UPDATE else ["update_bound"])}
    forward, update = measured(new, old, 6)
    assert forward <= bounds["forward_bound"] * (1 + 1e-9) <= 6 * forward
    assert update <= bounds.get("update_bound", math.inf)
    assert 0 < bounds.get("update_bound", 1) < math.inf


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_what_stands_before_an_in_norm_layer_changes_nothing(factor):
    torch.manual_seed(0)
    first, layer = nn.Linear(6, 9), InNormLinear(9, 4, bias=True)
    first.weight.data *= factor
    alone, behind = (block_bounds(f)["forward_bound"] for f in (layer, nn.Sequential(first, layer)))
    assert behind == alone


def test_a_pre_norm_block_adds_the_skip_connection():
    torch.manual_seed(0)
    old = PreNorm(nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6))).double()
    new = changed(old)
    inside, bounds = block_bounds(new.block, old.block), block_bounds(new, old)
    assert bounds == {"forward_bound": 1 + inside["forward_bound"], "update_bound": inside["update_bound"]}
    forward, update = measured(new, old, 6, sizes=(0.01, 0.1))
    assert forward <= bounds["forward_bound"]
    assert update <= bounds["update_bound"]
    assert block_bounds(PreNorm(nn.Bilinear(2, 2, 2))) == {}


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_reference_models_with_in_norm_have_bounds(name):
    model = reference(name, 32, norm="in")
    plan = sf.Plan.of(model, sf.recipes.beyond_mup())
    plan.initialise_(model)
    old = copy.deepcopy(model)
    optimizer = sf.SteepestDescent(model, plan, lr=0.1)
    tokens = torch.arange(32).reshape(2, 16)
    model(tokens).logsumexp(-1).sum().backward()
    optimizer.step()
    blocks = ["blocks.0.mlp", "blocks.0.attention"]
    numbers = sf.measure(model, tokens, before=old, plan=plan, names=blocks)
    for part in [*blocks, "blocks.0.attention.query", "blocks.0.mlp.up"]:
        assert numbers[part]["forward"] <= numbers[part]["forward_bound"], part
        assert "dependency_bound" not in numbers[part]
    up = numbers["blocks.0.mlp.up"]
    assert 0 < up["update"] <= up["update_bound"] == pytest.approx(0.1, rel=0.01)  # the learning rate
