"""Attention by 1/d_head in models that have 1/sqrt(d_head), and steps that need none of it."""

import math

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.cli.audit import warnings


class Attention(nn.Module):
    def __init__(self, dim, scaling=None):
        super().__init__()
        self.head_dim, self.scaling = dim, dim**-0.5 if scaling is None else scaling


def test_the_base_keeps_its_scale_and_others_are_inverse_in_the_head_dimension():
    for dim, scale in ((16, 16**-0.5), (64, 4 / 64), (4, 1.0)):
        model = nn.ModuleDict({"a": Attention(dim), "b": nn.Linear(2, 2)})
        assert sf.scale_attention_(model, base_head_dim=16) == ["a"]
        assert model["a"].scaling == pytest.approx(scale)


def test_other_scales_are_left_alone_and_nothing_to_change_is_an_error():
    model = nn.ModuleDict({"own": Attention(64, 0.3), "usual": Attention(64)})
    assert sf.scale_attention_(model, 16) == ["usual"]
    assert model["own"].scaling == 0.3
    with pytest.raises(ValueError, match=r"scale the queries by sqrt\(16 / d_head\)"):
        sf.scale_attention_(model, 16)
    with pytest.raises(ValueError, match="base_head_dim must be at least 1"):
        sf.scale_attention_(model, 0)


@pytest.mark.parametrize("head_dim", [4, 16, 64, 256])
def test_a_step_of_queries_and_keys_moves_a_logit_as_far_for_heads_of_every_size(head_dim):
    """Both learn the same direction of the inputs, which moves a logit most: by `r^2 eta^2 sqrt(d_head)`."""
    model = Attention(head_dim)
    model.q_proj, model.k_proj = (nn.Linear(32, head_dim, bias=False) for _ in range(2))
    optimizer = sf.SteepestDescent(model, sf.Plan.of(model, head=()), lr=0.5)
    x = torch.ones(32)
    for layer in (model.q_proj, model.k_proj):
        nn.init.zeros_(layer.weight)
        layer.weight.grad = -torch.outer(torch.ones(head_dim), x)
    optimizer.step()
    logit = model.q_proj(x) @ model.k_proj(x) * model.scaling
    assert logit.item() == pytest.approx(4.0, rel=0.05)


@pytest.mark.integration
@pytest.mark.parametrize("name", ["GPT2", "Llama", "OPT", "Qwen3", "Mixtral"])
def test_the_logits_of_real_models_change_by_the_factor(name):
    hf = pytest.importorskip("transformers")
    sizes = {"GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 4}}.get(
        name, {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    )
    model = getattr(hf, f"{name}Model")(getattr(hf, f"{name}Config")(vocab_size=50, **sizes))
    changed = sf.scale_attention_(model, base_head_dim=4)
    assert len(changed) == 2
    assert all(model.get_submodule(each).scaling == math.sqrt(4) / 16 for each in changed)


def test_an_audit_names_the_scale_under_recipes_whose_steps_do_not_fall_with_the_size_of_heads():
    model = nn.ModuleDict({"attention": Attention(16), "up": nn.Linear(16, 16)})
    told = [warnings(model, sf.Plan.of(model, recipe, head=())) for recipe in (sf.recipes.steady(), sf.recipes.muon())]
    assert [sum("scale_attention_" in line for line in lines) for lines in told] == [0, 1]
