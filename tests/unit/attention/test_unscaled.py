"""The scale of attention's products, where it is above `1/sqrt(d_head)`: the plan makes up for it."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from surefoot import Plan, SteepestDescent, recipes
from surefoot.attention.qk_pairs import find_pairs
from surefoot.discovery.heads import scale_of
from surefoot.layers import attention_scale

D, HEAD = 32, 8
RECIPES = ["steady", "steady_bounded", "muon", "scion"]


class Attention(nn.Module):
    def __init__(self, scaling=None, **norms):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(D, D) for _ in range(3))
        self.head_dim = HEAD
        if scaling:
            self.scaling = scaling
        for name, norm in norms.items():
            setattr(self, name, norm)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        return F.scaled_dot_product_attention(q, k, v, scale=getattr(self, "scaling", None)).transpose(1, 2).flatten(2)


def of_class(path, **attributes):
    """A module of a class that seems to be elsewhere."""
    module, _, name = path.rpartition(".")
    made = type(name, (nn.Module,), {"__module__": module})()
    for key, value in attributes.items():
        setattr(made, key, value)
    return made


def losses(scaling, recipe):
    torch.manual_seed(0)
    model, x, y = Attention(scaling), torch.randn(4, 6, D), torch.randn(4, 6, D)
    plan = Plan.of(model, getattr(recipes, recipe)(), head=())
    plan.initialise_(model, 0)
    optimizer, found = SteepestDescent(model, plan, lr=0.002), []
    for _ in range(12):
        found.append(loss := (model(x) - y).square().mean())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.stack(found).detach(), plan


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("scaling", [1.0, 8.0])
def test_a_larger_scale_changes_no_loss(recipe, scaling):
    found, plan = losses(scaling, recipe)
    expected, usual = losses(None, recipe)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
    assert found[-1] < found[0]
    constant = (scaling * HEAD**0.5) ** 0.5
    for name, placed in plan.placements.items():
        changed = name.startswith(("q_proj", "k_proj"))
        times = pytest.approx([x / (constant if changed else 1) for x in usual[name].lr_scales])
        assert list(placed.lr_scales) == times, name
        assert ("products of heads of 8 are multiplied by" in placed.why) == changed


ROOT = HEAD**0.25
GPT_NEO = "transformers.models.gpt_neo.modeling_gpt_neo.GPTNeoSelfAttention"


def units(path, **attributes):
    """What divides the rates of queries, keys and values, and the plan."""
    layers = {name: nn.Linear(D, D, bias=False) for name in ("q_proj", "k_proj", "v_proj")}
    model = of_class(path, **{**layers, "head_dim": HEAD, **attributes})
    plan = Plan.of(model, head=())
    return [
        usual / plan[f"{x}_proj.weight"].lr_scales[0] for x, usual in zip("qkv", (4 / ROOT, 4 / ROOT, 1), strict=True)
    ]


@pytest.mark.parametrize(
    ("path", "attributes", "scale"),
    [
        (GPT_NEO, {}, 1),
        ("transformers.models.esm.modeling_esm.EsmSelfAttention", {"scaling": 1.0}, HEAD**-0.5),
        ("transformers.models.evolla.modeling_evolla.EvollaSaProtSelfAttention", {"scaling": 1.0}, HEAD**-0.5),
        ("transformers.models.privacy.OpenAIPrivacyFilterAttention", {"scaling": HEAD**-0.25}, HEAD**-0.5),
        ("transformers.models.prism.VideoPrismMultiheadAttentionPoolingHead", {"scaling": 0.5}, HEAD**-0.5),
        ("transformers.models.t5.modeling_t5.T5Attention", {"key_value_proj_dim": HEAD}, 1),
        ("transformers.models.longt5.modeling_longt5.LongT5LocalAttention", {}, 1),
        ("own.T5Attention", {"key_value_proj_dim": HEAD}, None),
        ("own.Attention", {"scaling": HEAD**-0.5}, HEAD**-0.5),
        ("own.Attention", {"scaling": 1}, 1),
        ("own.Attention", {"scaling": 1 / HEAD}, 1 / HEAD),
        ("own.Attention", {"scaling": -1.0}, -1),
        ("own.Attention", {"heads": SimpleNamespace(dim=HEAD, scale=attention_scale(HEAD, 2))}, 2**0.5 / HEAD),
        *(
            ("own.Attention", {"scaling": x}, None)
            for x in (True, "dynamic", math.inf, math.nan, 10**400, torch.ones(()))
        ),
    ],
)
def test_what_a_module_says_of_its_scale(path, attributes, scale):
    found = scale_of(of_class(path, head_dim=HEAD, **attributes))
    assert found == (scale if scale is None else pytest.approx(scale))
    constant = max(1, (scale or 0) * HEAD**0.5) ** 0.5
    assert units(path, **attributes) == pytest.approx([constant, constant, 1])


def shared(first, second):
    """Two layers of one weight."""
    layers = {name: nn.Linear(D, D, bias=False) for name in ("q_proj", "k_proj", "v_proj")}
    layers[second].weight = layers[first].weight
    return layers


def low_rank():
    return nn.Sequential(nn.Linear(D, 4, bias=False), nn.Linear(4, D, bias=False))


@pytest.mark.parametrize(
    ("attributes", "names"),
    [
        ({"q_norm": None}, {"q_proj", "k_proj"}),
        ({"q_norm": nn.Identity()}, {"q_proj", "k_proj"}),
        ({"qk_norm": False}, {"q_proj", "k_proj"}),
        ({"head_dim": None}, set()),
        ({"q_norm": nn.LayerNorm(HEAD), "k_norm": nn.LayerNorm(HEAD)}, set()),
        ({"q_proj": low_rank()}, set()),
        ({"c_attn": nn.Linear(D, 3 * D), "n_head": 4, "q_proj": None, "k_proj": None, "v_proj": None}, set()),
        (
            {"to_q": nn.Linear(D, D), "to_kv": nn.Linear(D, 2 * D), "q_proj": None, "k_proj": None, "v_proj": None},
            set(),
        ),
        (shared("q_proj", "k_proj"), {"q_proj"}),
        (shared("q_proj", "v_proj"), set()),
        (shared("k_proj", "v_proj"), set()),
    ],
)
def test_only_linear_layers_of_queries_and_keys_without_norms_or_values_change(attributes, names):
    layers = {name: nn.Linear(D, D) for name in ("q_proj", "k_proj", "v_proj")}
    model = of_class("own.Attention", **{**layers, "head_dim": HEAD, "scaling": 1.0, **attributes})
    model.out_proj = nn.Linear(D, D)
    plan = Plan.of(model, head=())
    assert {name.partition(".")[0] for name in plan if "products of heads" in plan[name].why} == names


def test_lengths_of_weight_norm_are_divided_as_the_weight_is():
    model, usual = Attention(1.0), Attention()
    for each in (model, usual):
        nn.utils.parametrizations.weight_norm(each.q_proj)
    now, then = Plan.of(model, head=()), Plan.of(usual, head=())
    name = "q_proj.parametrizations.weight.original0"
    assert now[name].lr_scales[0] == pytest.approx(then[name].lr_scales[0] / ROOT)


def test_a_scale_that_is_given_wins_where_no_class_says_it():
    model = of_class("own.T5Attention", q=nn.Linear(D, D), k=nn.Linear(D, D), head_dim=HEAD, key_value_proj_dim=HEAD)
    (pair,) = find_pairs(model, 0.3).values()
    assert pair.scale == 0.3
    model.__class__.__module__ = "transformers.models.t5.modeling_t5"
    (pair,) = find_pairs(model, 0.3).values()
    assert pair.scale == 1
