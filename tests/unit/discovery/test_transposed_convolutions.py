"""Transposed convolutions: layout, effective fan-in, and the norm that follows from it."""

import math

import pytest
import torch
from discovery_helpers import kinds
from torch import nn

import surefoot as sf
from surefoot import Plan, recipes

KERNELS = ("conv", "patches")


@pytest.mark.parametrize(
    ("layer", "block", "stride"),
    [
        (nn.ConvTranspose1d(6, 8, 3), (1, 8, 18), 1),
        (nn.ConvTranspose1d(6, 8, 4, stride=2), (1, 8, 24), 2),
        (nn.ConvTranspose2d(6, 8, 4, stride=2, groups=2), (2, 4, 48), 4),
        (nn.ConvTranspose2d(6, 8, (2, 3), stride=(4, 1)), (1, 8, 36), 2),  # gaps: two columns of taps, never together
        (nn.ConvTranspose1d(6, 8, 4, stride=2, dilation=2), (1, 8, 24), 1),  # every tap hits the same outputs
        (nn.ConvTranspose3d(4, 4, 2, stride=2, groups=4), (4, 1, 8), 8),
    ],
    ids=str,
)
def test_transposed_convolutions_by_group_and_effective_fan_in(layer, block, stride):
    plan = Plan.of(layer)
    for weight in (plan["weight"], *(Plan.of(layer, overrides=[("weight", one)])["weight"] for one in KERNELS)):
        assert weight.role.name == "conv"
        assert weight.blocks == (block,)
        assert getattr(weight.role.geometry, "stride", 1) == stride
    # the taps that make one output entry, counted: ones in, ones as weights
    ones = torch.ones(1, layer.in_channels, *[12] * (layer.weight.ndim - 2))
    with torch.no_grad():
        layer.weight.fill_(1)
        out = layer(ones) - layer.bias.reshape(1, -1, *[1] * (layer.weight.ndim - 2))
    assert float(out.max()) == pytest.approx(block[2] / stride)


def test_a_transposed_convolutions_norm_init_step_and_radius_share_the_fan_in():
    layer = nn.ConvTranspose2d(32, 48, 4, stride=2, bias=False)
    plan = Plan.of(layer, stabiliser=sf.PostClip(0.5, period=1))

    def norm(w):
        matrix = w.detach().double().permute(1, 0, 2, 3).reshape(48, 32 * 16)
        return float(torch.linalg.matrix_norm(matrix, 2)) * math.sqrt(32 * 16 / 4 / 48)

    plan.initialise_(layer)
    assert norm(layer.weight) == pytest.approx(1, abs=0.06)
    natural = Plan.of(layer, recipes.beyond_mup())
    free, before = sf.SteepestDescent(layer, natural, lr=0.1), layer.weight.detach().clone()
    layer.weight.grad = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(0))
    free.step()
    assert 0.096 < norm(layer.weight - before) < 0.1001
    optimizer = sf.SteepestDescent(layer, plan, lr=0.1)
    optimizer.step()
    assert norm(layer.weight) == pytest.approx(0.5, rel=1e-3)
    assert optimizer.stability()["weight"]["forward_upper"] == pytest.approx(0.5, rel=2e-3)


def test_a_strided_kernel_is_refused_by_recipes_without_the_spectral_norm():
    layer = nn.ConvTranspose1d(4, 8, 4, stride=2)
    said = r"weight: only Spectral.* transposed convolution of stride 2.*MeanOperator.*such as steady or muon, or"
    with pytest.raises(ValueError, match=said) as refused:
        Plan.of(layer, recipes.moga_row())
    names = {name: getattr(sf, name) for name in ("Role", "TransposedConvSpectral", "views", "LinearNormal")}
    role = eval(str(refused.value).partition("override it with ")[2], names)
    assert Plan.of(layer, recipes.moga_row(), overrides=[("weight", role)])["weight"].role == role
    assert (role.view, role.geometry.stride) == (sf.views.TransposedConvolution(), 2)
    assert kinds(nn.ConvTranspose1d(4, 8, 4), recipes.moga_row())["weight"] == "conv"  # stride 1 has no such trouble
    assert kinds(layer, recipes.muon())["weight"] == "conv"
