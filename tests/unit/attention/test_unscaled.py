"""The scale of attention's products, where it is above `1/sqrt(d_head)`: the plan makes up for it."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from surefoot import Plan, SteepestDescent, recipes
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


@pytest.mark.parametrize(
    ("path", "attributes", "constant"),
    [
        ("transformers.models.gpt_neo.modeling_gpt_neo.GPTNeoSelfAttention", {}, HEAD**0.25),
        ("transformers.models.esm.modeling_esm.EsmSelfAttention", {"scaling": 1.0, "attention_head_size": HEAD}, 1),
        ("own.T5Attention", {"key_value_proj_dim": HEAD}, HEAD**0.25),
        ("own.Attention", {"scaling": HEAD**-0.5}, 1),
        ("own.Attention", {"scaling": 1}, HEAD**0.25),
        ("own.Attention", {"scaling": 0.0}, 1),
        ("own.Attention", {"scaling": "dynamic"}, 1),
        ("own.Attention", {"heads": SimpleNamespace(dim=HEAD, scale=attention_scale(HEAD, 2))}, 1),
        ("own.Attention", {"scaling": 1 / HEAD}, 1),
        ("own.Attention", {"scaling": 1.0, "q_norm": nn.LayerNorm(HEAD), "k_norm": nn.LayerNorm(HEAD)}, 1),
        ("own.Attention", {"scaling": 1.0, "q_norm": None}, HEAD**0.25),
    ],
)
def test_what_a_module_says_of_its_scale(path, attributes, constant):
    layers = {name: nn.Linear(D, D, bias=False) for name in ("q_proj", "k_proj", "v_proj")}
    model = of_class(path, **layers, **{"head_dim": HEAD, **attributes})
    plan = Plan.of(model, head=())
    assert [plan[f"{x}_proj.weight"].lr_scales[0] for x in "qkv"] == pytest.approx([*(2 / constant,) * 2, 1])


def test_a_layer_that_fuses_queries_with_others_keeps_its_units():
    model = of_class(
        "own.Attention", c_attn=nn.Linear(D, 3 * D), head_dim=HEAD, n_head=4, scaling=1.0, c_proj=nn.Linear(D, D)
    )
    plan = Plan.of(model, head=())
    assert all("products" not in plan[name].why for name in plan)
