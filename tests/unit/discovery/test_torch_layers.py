"""Kinds by structure and shape: norm layers of any class, tokens, channel scales, parametrizations."""

import copy

import pytest
import torch
from discovery_helpers import Own, kinds
from torch import nn
from torch.nn.utils import prune

from surefoot import Plan
from surefoot.initialise import AsBuilt


@pytest.mark.parametrize(
    "norm",
    [
        Own(weight=torch.ones(8), variance_epsilon=1e-6),
        Own(scale=torch.ones(8), eps=1e-5),
        Own(gamma=torch.ones(8), beta=torch.zeros(8), epsilon=0.0),
        Own(weight=torch.zeros(8), bias=torch.zeros(8), norm_eps=1e-6),
    ],
    ids=["weight", "scale", "gamma and beta", "centred"],
)
def test_a_norm_by_its_structure(norm):
    plan = Plan.of(norm)
    assert [plan[name].role.name for name in plan] == ["gain", "bias"][: len(plan)]
    (gain, *_) = norm.parameters()
    before = gain.detach().clone()
    plan.initialise_(norm)
    assert torch.equal(before, gain)  # 1 or, centred on 0, 0: as built
    assert "by its structure" in plan.rows()[0]["why"]


@pytest.mark.parametrize("biased", [True, False])
def test_a_norm_by_its_class_name_as_nanogpt_has_it(biased):
    class LayerNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.bias = nn.Parameter(torch.zeros(8)) if biased else None

    plan = Plan.of(LayerNorm())
    assert [plan[name].role.name for name in plan] == ["gain", "bias"][: len(plan)]
    assert "a norm by its class's name" in plan["weight"].why


@pytest.mark.parametrize(
    "module",
    [
        Own(weight=torch.ones(8)),
        Own(weight=torch.ones(8), eps=3.0),
        Own(weight=torch.ones(8), eps="small"),
        Own(weight=torch.ones(8), inner=nn.ReLU(), eps=1e-6),
        Own(weight=torch.ones(8), gain=torch.ones(8), eps=1e-6),
        Own(weight=torch.ones(8), bias=torch.ones(1), eps=1e-6),
        Own(weight=torch.ones(8), slope=torch.ones(8), eps=1e-6),
        Own(table=torch.ones(8), eps=1e-6),
    ],
    ids=["no epsilon", "large", "not a number", "a child", "two gains", "two sizes", "unknown part", "no gain"],
)
def test_what_is_no_norm_stays_a_vector(module):
    assert set(kinds(module).values()) == {"scalar"}


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("cls_token", (1, 1, 8), "positions"),
        ("pos_embed", (1, 17, 8), "positions"),
        ("p", (1, 17, 8), "positions"),
        ("seed", (1, 1, 8), "positions"),
        ("pos_embed", (1, 4, 4, 8), "positions"),
        ("gamma", (1, 1, 8), "scalar"),
        ("time_mix_k", (1, 1, 1, 8), "scalar"),
        ("p", (8, 1, 1), "scalar"),
        ("p", (1, 8, 1, 1), "scalar"),
        ("p", (8,), "scalar"),
    ],
)
def test_tokens_and_channel_scales_by_their_shape_and_name(name, shape, kind):
    plan = Plan.of(Own(**{name: torch.full(shape, 0.5)}))
    assert plan[name].role.name == kind
    assert plan[name].role.initial == AsBuilt()


def test_a_kernel_behind_a_leading_one_is_no_table():
    with pytest.raises(ValueError, match=r"cannot place weight \(1, 8, 8, 3, 3\)"):
        Plan.of(Own(weight=torch.randn(1, 8, 8, 3, 3)))  # StyleGAN2's


def test_a_parametrization_is_refused_by_name_and_its_remedy_works():
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6)))
    with pytest.raises(ValueError, match=r"cannot place 0\.parametrizations\.weight\.original") as error:
        Plan.of(model)
    assert "remove_parametrizations(layer, 'weight')" in str(error.value)
    assert kinds(model, overrides=[("0.parametrizations*", "scalar")])
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert kinds(model) == {"0.bias": "bias", "0.weight": "linear"}


@pytest.mark.parametrize(
    ("layer", "weight"),
    [
        (nn.Linear(4, 6), "weight"),
        (nn.Conv1d(4, 1, 3), "weight"),  # (1, in, k), as tokens
        (nn.LSTM(4, 6), "weight_hh_l0"),
        (nn.Embedding(4, 6), "weight"),
    ],
    ids=["linear", "kernel", "gates", "table"],
)
def test_a_norm_by_hooks_is_refused_by_name_and_its_remedy_works(layer, weight):
    model = nn.Sequential(copy.deepcopy(layer))
    usual = kinds(model)
    nn.utils.spectral_norm(model[0], weight)
    with pytest.raises(ValueError, match=f"cannot place 0.{weight}_orig ") as error:
        Plan.of(model)
    assert "spectral_norm computes the layer's weight from it" in str(error.value)
    assert f"torch.nn.utils.remove_spectral_norm(layer, '{weight}')" in str(error.value)
    assert "'linear'" not in str(error.value)
    nn.utils.remove_spectral_norm(model[0], weight)
    assert kinds(model) == usual


@pytest.mark.parametrize("layer", [nn.Linear(4, 6), nn.Conv2d(4, 6, 3)], ids=["linear", "kernel"])
def test_what_is_pruned_is_refused_by_name_and_its_remedy_works(layer):
    model = nn.Sequential(copy.deepcopy(layer))
    usual = kinds(model)
    prune.random_unstructured(model[0], "weight", 0.5)
    with pytest.raises(ValueError, match=r"cannot place 0\.weight_orig .*utils\.prune\.remove\(layer, 'weight'\)"):
        Plan.of(model)
    prune.remove(model[0], "weight")
    assert kinds(model) == usual
