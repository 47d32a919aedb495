"""Sentences of the explanations that say how large something is at worst: each at the inputs where it is."""

import math

import pytest
import torch
from doc_pages import ROOT
from torch import nn

import surefoot as sf


def rms(x):
    return x.square().mean(-1).sqrt()


@pytest.mark.parametrize(("layer", "eps"), [(nn.LayerNorm(64), 1e-5), (nn.RMSNorm(64, eps=1e-6), 1e-6)])
def test_a_norm_layer_depends_on_its_input_by_one_over_the_root_of_epsilon_at_most(layer, eps):
    x = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    x = (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)
    for size in (1e-6, 1e-3, 1.0):
        near = rms(layer(size * x) - layer(-size * x)) / rms(2 * size * x)
        far = rms(layer(size * x) - layer(x.flip(0))) / rms(size * x - x.flip(0))
        assert max(near.max(), far.max()) <= eps**-0.5 * (1 + 1e-5)
        assert size > 1e-6 or near.min() > 0.999 * eps**-0.5
    page = (ROOT / "docs" / "explanation" / "three-numbers.md").read_text("utf-8")
    assert f"{1e-5**-0.5:.0f} for the $\\varepsilon = 10^{{-5}}$" in page


def test_the_forward_number_of_two_layers_is_not_the_product_but_with_the_bias():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    for parameter in (first.weight, first.bias, second.weight):
        nn.init.zeros_(parameter)
    nn.init.ones_(second.bias)
    output = rms(second(first(torch.ones(4))))
    dependency = sf.Spectral().norm(second.weight)
    assert output == 0 * 1.0 * dependency + rms(second.bias) == 1


@pytest.mark.parametrize("width", [32, 512])
def test_a_step_of_length_one_changes_outputs_by_its_rank(width):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(width, width, generator=generator)
    ones = torch.outer(noise[0], noise[1])
    change = [float(sf.Spectral(method="svd").norm(step / step.norm())) for step in (noise, ones)]
    assert change[0] == pytest.approx(2 / math.sqrt(width), rel=0.1)
    assert change[1] == pytest.approx(1, rel=1e-4)


def lengths(stabiliser, lr, steps):
    """Lengths of a bfloat16 weight's rows over the first ones, and its norm, the smallest and largest of all steps."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(64, 64, bias=False)
    plan = sf.Plan.of(layer, stabiliser=stabiliser, head=())
    plan.initialise_(layer, seed=0)
    layer.to(torch.bfloat16)
    first = layer.weight.detach().float().norm(dim=-1)
    optimizer, found = sf.SteepestDescent(layer, plan, lr=lr), []
    pull = torch.randn(64, 64, generator=generator)
    for _ in range(steps):
        layer.weight.grad = (pull + torch.randn(64, 64, generator=generator)).bfloat16()
        optimizer.step()
        w = layer.weight.detach().float()
        found.append((w.norm(dim=-1) / first, torch.linalg.matrix_norm(w, 2)))
    rows, norms = (torch.stack(each) for each in zip(*found, strict=True))
    return rows.min(), rows.max(), norms.max()


@pytest.mark.slow
def test_in_bfloat16_what_goes_by_the_last_weight_drifts():
    shortest, longest, _ = lengths(sf.RowSphere(), 0.05, 300)
    assert 0.9 < shortest < 0.99 < 1.01 < longest < 1.1
    assert 1.004 < lengths(sf.PreDecay(1.0), 0.05, 300)[2] < 1.1


@pytest.mark.parametrize("stabiliser", [sf.PostClip(1.0), sf.Rescale(1.0), sf.Normalise(1.0)], ids=repr)
def test_in_bfloat16_a_radius_holds_to_rounding(stabiliser):
    assert lengths(stabiliser, 0.05, 100)[2] <= 1 + 4e-3
