"""The code that people copy: by a forward pass or by structure, its attention is the reference's, block for block."""

import copy
import logging
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import attention_models as copied
import pytest
import torch
from torch import nn

import surefoot as sf
from combinations import combinations
from surefoot import Plan, plan
from surefoot.experiment.models.configs import GPTConfig, LlamaConfig
from surefoot.experiment.models.decoder import Decoder
from surefoot.experiment.models.sizes import Size
from surefoot.views import Fused, Grouped, Matrix, Projections, Stack

BY_STRUCTURE = [name for name in copied.ALL if name not in ("OpenCLIP", "Megatron", "ModdedStack")]
ORDER = {"LitGPT": Projections((64, 32, 32)), "Megatron": Grouped(2, (32, 16, 16)), "ModdedStack": Stack()}
"""Layouts of what is fused; of others they are equal thirds."""
FEW = ("NanoGPT", "MinGPT", "Llama2C", "OpenCLIP", "TimmViT", *ORDER)
"""Each layout of queries, keys and values, and each way to write it."""


def reference(kv, biased):
    """The reference model with the same attention in three blocks."""
    size = Size(copied.WIDTH, depth=3, head_dim=copied.HEAD, vocab=copied.VOCAB)
    gpt = GPTConfig(size, biases="all" if biased else "none")
    return Decoder(gpt) if kv == copied.HEADS else Decoder(LlamaConfig(size, kv_heads=kv))


def blocks_of(plan, within):
    """How often there is a matrix or a vector of a role and a shape among the parameters of a module."""
    found = Counter()
    for name in plan:
        if f".{within}." in name and plan[name].role.name in ("linear", "bias"):
            for role, (count, *shape) in zip(plan[name].roles, plan[name].blocks, strict=True):
                found[replace(role, view=Matrix()), *shape] += count
    return found


def biasless(found):
    return Counter({key: count for key, count in found.items() if key[0].name != "bias"})


def same_as_the_reference(found, attention):
    wanted = blocks_of(Plan.of(reference(attention.kv, attention.biased)), "attention")
    own = blocks_of(found, "attn")
    return own == wanted if attention.kv == copied.HEADS else biasless(own) == biasless(wanted)  # a llama has no biases


@pytest.mark.parametrize("name", copied.ALL)
def test_a_forward_pass_finds_the_blocks_of_the_reference_model(name):
    model = copied.Decoder(copied.ALL[name])
    found = Plan.of(model, inputs=copied.TOKENS)
    assert same_as_the_reference(found, copied.ALL[name])
    views = {found[each].role.view.whole for each in found if ".attn." in each and len(found[each].roles) > 1}
    assert views <= {ORDER.get(name, Fused(3))}
    assert found.unsplit == ""


@pytest.mark.parametrize("name", BY_STRUCTURE)
def test_structure_and_names_are_enough_for_these(name):
    found = Plan.of(copied.Decoder(copied.ALL[name]))
    assert same_as_the_reference(found, copied.ALL[name])
    assert found.hash == Plan.of(copied.Decoder(copied.ALL[name]), inputs=copied.TOKENS).hash


def test_a_fused_bias_keeps_its_initial_values_and_equal_blocks_one_line(monkeypatch):
    monkeypatch.setattr(copied, "WIDTH", 16)  # so few inputs that biases are drawn
    monkeypatch.setattr(copied, "HEAD", 4)
    model = copied.Decoder(copied.ALL["Megatron"])
    usual, found = Plan.of(model), Plan.of(model, inputs=copied.TOKENS)
    (bias, *others) = (
        name for name in found if "attn" in name and found[name].role.name == "bias" and len(found[name].blocks) > 1
    )
    assert found[bias].role.initial == usual[bias].role.initial
    assert {found[other].why for other in others} == {found[bias].why}


@combinations(lambda name: name in FEW, name=[*copied.ALL])
def test_no_name_is_needed(name):
    """Every attribute but the tables' under a name that says nothing, and no number of heads to be found."""
    usual = Plan.of(copied.Decoder(copied.ALL[name]), inputs=copied.TOKENS)
    model, hidden = copied.Decoder(copied.ALL[name]), {}
    for block in model.h:
        for i, each in enumerate([n for n, child in block.attn.named_children() if isinstance(child, nn.Linear)]):
            hidden[each] = f"a{i}"
            block.attn._modules[f"a{i}"] = block.attn._modules.pop(each)
        old = type(block.attn)
        get = lambda self, key: nn.Module.__getattr__(self, hidden.get(key, key))  # noqa: E731
        block.attn.__class__ = type("Hidden", (old,), {"__getattr__": get})
    renamed = Plan.of(model, inputs=copied.TOKENS)
    assert renamed.hash == usual.hash
    assert not any("the name `" in renamed[each].why for each in renamed)


def test_what_structure_does_not_tell_is_said_in_one_line_with_the_remedy(caplog):
    plan.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="surefoot"):
        found, _ = (Plan.of(copied.Decoder(copied.Megatron)) for _ in range(2))
    line = (
        "attention with one norm for all heads, h.*.attn.linear_qkv.weight, h.*.attn.linear_proj.weight: "
        "find heads by a forward pass, Plan.of(model, inputs=...), or override with sf.per_head(rows)"
    )
    assert [record.message for record in caplog.records] == [line]
    assert line in str(found).splitlines()
    assert found["h.0.attn.linear_qkv.weight"].blocks == ((1, 128, 64),)
    assert "attention with" not in str(Plan.of(copied.Decoder(copied.NanoGPT)))


@pytest.mark.parametrize("name", ["OpenCLIP", "ModdedStack"])
def test_a_bare_matrix_without_inputs_is_refused_with_the_remedy(name):
    with pytest.raises(ValueError, match=r"Plan\.of\(model, inputs=\.\.\.\) sees how a matrix is multiplied"):
        Plan.of(copied.Decoder(copied.ALL[name]))


def wide(**attributes):
    layer = nn.ModuleDict({"c_attn": nn.Linear(64, 192), "c_proj": nn.Linear(64, 64)})
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


@pytest.mark.parametrize(
    ("attributes", "view"),
    [
        ({"n_head": 4}, Fused(3)),
        ({"nhead": 4, "head_size": 16}, Fused(3)),
        ({"config": SimpleNamespace(num_heads=4)}, Fused(3)),
        ({"n_head": 4, "n_kv_head": 4}, Fused(3)),
        ({}, Matrix()),
        ({"n_head": 5}, Matrix()),
        ({"n_head": 4, "n_kv_head": 2}, Matrix()),
        ({"n_head": 4, "head_dim": 8}, Matrix()),
        ({"n_head": 4, "more": nn.Linear(64, 64)}, Matrix()),
        ({"n_head": True}, Matrix()),
    ],
    ids=str,
)
def test_structure_is_claimed_where_all_numbers_fit(attributes, view):
    assert Plan.of(wide(**attributes))["c_attn.weight"].role.view.whole == view


@pytest.mark.parametrize(
    "change",
    ["linear", replace(sf.recipes.steady().role("linear"), name="own"), sf.per_head(8)],
    ids=["name", "Role", "f"],
)
def test_overrides_win_over_a_forward_pass(change):
    model = copied.Decoder(copied.NanoGPT)
    usual = Plan.of(model, inputs=copied.TOKENS)
    found = Plan.of(model, inputs=copied.TOKENS, overrides=[("h.0.attn.c_attn.weight", change)])
    placed = found["h.0.attn.c_attn.weight"]
    wanted = {"linear": sf.recipes.steady().role("linear"), sf.Role: change}.get(
        change if change == "linear" else type(change)
    )
    assert placed.role == (wanted or sf.per_head(8)(usual["h.0.attn.c_attn.weight"].role))
    assert placed.why.startswith("override ")
    assert {n: found[n].digest for n in found} | {"h.0.attn.c_attn.weight": ""} == {
        n: usual[n].digest for n in usual
    } | {"h.0.attn.c_attn.weight": ""}


def test_the_model_and_the_random_numbers_stay_as_they_are():
    class Counts(copied.Decoder):
        def forward(self, tokens, targets):
            self.cache, tokens = self.wte(tokens), tokens.add_(torch.randint(1, tokens.shape))
            self.norm(self.cache.mT)
            self.seen.add_(1)
            return super().forward(tokens, targets)

    model = Counts(copied.NanoGPT)
    model.norm, model.cache = nn.BatchNorm1d(copied.WIDTH), None
    model.register_buffer("seen", torch.zeros(()))
    before, given, generator = copy.deepcopy(model.state_dict()), copied.TOKENS.clone(), torch.get_rng_state()
    found = Plan.of(model, inputs=(copied.TOKENS, copied.TOKENS))
    assert torch.equal(torch.get_rng_state(), generator)
    assert same_as_the_reference(found, copied.NanoGPT)
    assert model.cache is None
    assert torch.equal(copied.TOKENS, given)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_model_on_the_meta_device_and_a_compiled_one():
    usual = Plan.of(copied.Decoder(copied.Megatron), inputs=copied.TOKENS)
    with torch.device("meta"):
        model = copied.Decoder(copied.Megatron)
    assert Plan.of(model, inputs=copied.TOKENS).hash == usual.hash
    assert (
        Plan.of(torch.compile(copied.Decoder(copied.Megatron), backend="eager"), inputs=copied.TOKENS).hash
        == usual.hash
    )


def test_a_pass_that_fails_says_so_and_what_to_do():
    class Depends(copied.Decoder):
        def forward(self, tokens):
            return tokens if self.wte(tokens).sum() > 0 else super().forward(tokens)

    for inputs in (copied.TOKENS, (copied.TOKENS, copied.TOKENS, 0)):
        with pytest.raises(
            ValueError, match=r"inputs=\.\.\.: a forward pass on shapes alone failed \(.*leave inputs out"
        ):
            Plan.of(Depends(copied.NanoGPT), inputs=inputs)
