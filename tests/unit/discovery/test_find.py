"""Parameters with several uses: aliases, adapters, tied embeddings and heads; and the code of docs/layers.md."""

import math
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from discovery_helpers import kinds, of_class
from torch import nn

import surefoot as sf
from surefoot import Plan
from surefoot.experiment.models.decoder import reference


def test_a_bare_alias_of_a_layers_parameter_is_the_layers():
    model = nn.Sequential(nn.Linear(4, 8))
    model.bias, model.weight = model[0].bias, model[0].weight
    plan = Plan.of(model)
    assert {name: plan[name].role.name for name in plan} == {"bias": "bias", "weight": "linear"}
    assert "shared by weight, 0.weight" in plan["weight"].why


class LoRA(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 6)
        self.base.requires_grad_(False)
        self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 6, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def test_low_rank_adapters_start_at_zero_and_the_frozen_base_is_left_alone():
    model = LoRA()
    frozen = {name: p.detach().clone() for name, p in model.base.named_parameters()}
    a = model.a.weight.detach().clone()
    assert kinds(model) == {"base.weight": "linear", "base.bias": "bias", "a.weight": "linear", "b.weight": "linear"}
    optimizer = sf.SteepestDescent(model, lr=0.1)
    assert not model.b.weight.any()
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    assert torch.equal(model.a.weight, a)  # its gradient passes through B = 0
    assert float(torch.linalg.matrix_norm(model.b.weight.detach(), 2)) * math.sqrt(2 / 6) == pytest.approx(0.1, 0.04)
    assert all(torch.equal(p, frozen[name]) for name, p in model.base.named_parameters())


class Tied(nn.Module):
    def __init__(self, multiplier=None):
        super().__init__()
        self.table, self.out = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        self.out.weight = self.table.weight
        if multiplier:
            self.output_multiplier = multiplier


@pytest.mark.parametrize(
    ("multiplier", "tied", "kind"),
    [
        (None, None, "head"),
        (None, "head", "head"),
        (1 / 8, None, "embedding"),
        (1 / 8, "embedding", "embedding"),
        (1 / 8, "head", "head"),
        (1.0, None, "head"),  # a switch that is off: rows of RMS 1 would make logits of size d
    ],
)
def test_the_policy_for_a_tied_matrix(multiplier, tied, kind):
    assert kinds(Tied(multiplier), tied=tied) == {"table.weight": kind}


@pytest.mark.parametrize(
    ("model", "tied", "message"),
    [
        (Tied(), "embedding", r"tied='embedding' for table\.weight, out\.weight.*1/d.*output_multiplier"),
        (Tied(), "error", r"table\.weight, out\.weight are one matrix"),
        (Tied(1.0), "embedding", r"size d = 8, .* output_multiplier, here 1\.0; otherwise"),
        (Tied(1 / 8), "error", "are one matrix"),
    ],
)
def test_a_policy_that_the_model_contradicts_is_refused(model, tied, message):
    with pytest.raises(ValueError, match=message):
        Plan.of(model, tied=tied)
    assert kinds(model, tied=tied, overrides=[("table.weight", "head")]) == {"table.weight": "head"}


def test_models_that_tie_nothing_take_any_policy_that_there_is():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    assert kinds(model, tied="error")["1.weight"] == "head"
    with pytest.raises(ValueError, match="tied='both': choose 'head', 'embedding' or 'error'"):
        Plan.of(model, tied="both")


def test_the_pages_examples_are_right():
    page = (Path(__file__).parents[3] / "docs" / "layers.md").read_text()
    scope = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(code, scope)
    assert scope["seen"]["mixed.weight"].blocks == ((8, 16, 64), (1, 64, 64))
    assert scope["heads"]["query.weight"].blocks == ((4, 16, 64),)
    assert scope["renamed"]["a.weight"].blocks == ((4, 16, 64),)
    assert scope["plan"]["qkv.weight"].blocks == ((1, 64, 64), (1, 16, 64), (1, 16, 64))
    assert scope["plan"]["qkv.bias"].blocks == ((1, 64), (1, 16), (1, 16))
    assert scope["smaller"]["tokens.weight"].lr_scales == (2 / 8,)


def test_a_lazy_layer_is_refused_until_it_has_a_shape():
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(ValueError, match=r"0\.weight has no shape before the first forward pass: call the model"):
        Plan.of(model)
    model(torch.ones(2, 3))
    assert Plan.of(model)["0.weight"].role.name == "linear"


MLP = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


@pytest.mark.parametrize("layer", [nn.TransformerEncoderLayer(8, 2, 32), MLP], ids=["encoder", "mlp"])
def test_the_first_layer_of_an_mlp_with_as_many_outputs_as_there_are_words_is_no_head(layer):
    body = {"table": nn.Embedding(32, 8), "body": nn.ModuleList([layer])}
    with pytest.raises(ValueError, match="no Linear"):
        Plan.of(nn.ModuleDict(body))
    assert kinds(nn.ModuleDict({**body, "out": nn.Linear(8, 32)}))["out.weight"] == "head"


def test_a_head_of_a_compiled_model_has_its_plain_name():
    model = nn.ModuleDict({"table": nn.Embedding(9, 4), "out": nn.Linear(4, 7)})
    assert kinds(nn.ModuleDict({"_orig_mod": model}), head="out")["_orig_mod.out.weight"] == "head"


def test_a_head_keeps_the_layout_of_its_layer():
    table, tokens = nn.Embedding(9, 4), torch.arange(6)[None]
    stored = of_class("transformers.pytorch_utils.Conv1D", weight=torch.randn(4, 9), nf=9, nx=4)
    for layer in (nn.Conv1d(4, 9, 1), nn.Conv1d(4, 9, 3, padding=1), nn.Conv2d(4, 9, 1), stored):  # WaveNet, PixelCNN
        plan = Plan.of(nn.Sequential(table, layer), head="1")
        assert (plan["1.weight"].role.name, plan["1.weight"].blocks[0][1]) == ("head", 9)
    model = nn.ModuleDict({"table": table, "out": nn.Conv1d(4, 9, 1)})
    plan = Plan.of(model, head="out", run=sf.Run(100, 6))
    plan.initialise_(model, seed=0)
    optimizer, before = sf.SteepestDescent(model, plan), model.out.weight.detach().clone()
    model.out(model.table(tokens).mT).square().mean().backward()
    optimizer.step()
    assert (model.out.weight != before).all()


@pytest.mark.parametrize("frozen", ["blocks.[0-2].*", "embedding.*", "*_norm.*", "blocks.*.attention.*"])
def test_what_trains_beside_frozen_parameters_has_the_roles_that_it_has_without(frozen):
    model = reference("tied", 16, 4, 8, 64)
    whole = sf.Plan.of(model)
    names = [name for name in whole if fnmatch(name, frozen)]
    assert names
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    part = sf.Plan.of(model)
    assert {name: part[name].digest for name in part} == {name: whole[name].digest for name in whole}
