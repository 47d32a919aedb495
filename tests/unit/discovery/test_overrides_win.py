"""An override is the last word on its parameter, whatever rule would follow, and moves no other parameter."""

from dataclasses import replace

import pytest
import torch
from discovery_helpers import Own
from torch import nn

import surefoot as sf
from surefoot import Plan
from surefoot.recipes.rules import DepthRule
from surefoot.scaling import Constant
from surefoot.views import Matrix

D, V = 16, 50


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(D, D) for _ in range(4))
        self.head_dim = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.up, self.down = Attention(), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)


class Model(nn.Module):
    """A tied table with a padding row, positions beside it, four blocks, and fused attention of one head."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(V, D, padding_idx=0), nn.Embedding(9, D, padding_idx=3)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.fused = nn.MultiheadAttention(D, 1)
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.tokens.weight


RULES = {
    "added to a tied table, with a padding row": ("places.weight", "embedding"),
    "a tied table": ("tokens.weight", "embedding"),
    "heads": ("blocks.0.attention.query.weight", "linear"),
    "residual stream": ("blocks.0.down.weight", "linear"),
    "residual stream, bias": ("blocks.0.down.bias", "bias"),
    "values beside queries": ("fused.in_proj_weight", "linear"),
    "gain, as a name of another kind": ("blocks.0.up.bias", "scalar"),
}
OWN = {n: replace(sf.recipes.steady().role(kind), name="own") for n, kind in ((1, "gain"), (2, "conv"))}


def wheres(model, name):
    """A pattern, a predicate, and the parameter's module where it has no other parameter."""
    owner = model.get_submodule(name.rpartition(".")[0])
    alone = [owner] if len(list(owner.parameters())) == 1 else []
    return [name, lambda given, p: given == name, *alone]


def others(plan, name):
    return {each: (plan[each].digest, plan[each].why) for each in plan if each != name}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("change", ["a name", "a Role", "a function"])
def test_an_override_wins_over_every_rule_and_says_so(rule, change):
    name, kind = RULES[rule]
    model, recipe = Model(), sf.recipes.steady()
    usual = Plan.of(model)
    assert usual[name].role != recipe.role(kind)
    role = replace(OWN[model.get_parameter(name).ndim], view=recipe.role(kind).view)
    given = {"a name": kind, "a Role": role, "a function": lambda found: replace(found, lr_scale=Constant(7.0))}
    expected = {
        "a name": recipe.role(kind),
        "a Role": role,
        "a function": replace(usual[name].role, lr_scale=Constant(7.0)),
    }
    for where in wheres(model, name):
        plan = Plan.of(model, overrides=[(where, given[change])])
        assert plan[name].role == expected[change]
        assert plan[name].why.startswith("override ")
        if change == "a function":
            assert plan[name].why.endswith(f", a function of what was found: {usual[name].why}")
        else:
            assert ";" not in plan[name].why
        if rule != "a tied table":
            assert others(plan, name) == others(usual, name)


@pytest.mark.parametrize(
    ("change", "follow"),
    [
        ("embedding", "embedding"),
        ("head", "tied_positions"),
        (replace(OWN[2], view=Matrix()), "embedding"),
        (lambda role: replace(role, stabiliser=sf.PostClip(2.0)), "tied_positions"),
    ],
    ids=["embedding", "head", "Role", "function"],
)
def test_what_is_added_follows_an_override_of_the_table(change, follow):
    model = Model()
    for where in wheres(model, "tokens.weight"):
        plan = Plan.of(model, overrides=[(where, change)])
        assert plan["places.weight"].role.name == follow
        both = Plan.of(model, overrides=[(where, change), ("places.weight", "positions")])
        assert both["places.weight"].role == sf.recipes.steady().role("positions")


def test_a_function_leaves_the_policy_of_a_tied_table_alone():
    model, change = Model(), lambda role: replace(role, stabiliser=sf.PostClip(2.0))
    model.output_multiplier = 1 / D
    overrides = [("tokens.weight", change)]
    assert Plan.of(model, tied="head", overrides=overrides)["tokens.weight"].role.name == "head"
    assert Plan.of(model, overrides=overrides)["tokens.weight"].role.name == "embedding"
    with pytest.raises(ValueError, match="are one matrix, tied, and tied='error'"):
        Plan.of(model, tied="error", overrides=overrides)


def test_a_number_of_branches_stands_for_the_one_that_was_found():
    model = Model()
    plan = Plan.of(model, overrides=[("blocks.0.down.weight", DepthRule().of(16))])
    role, usual = plan["blocks.0.down.weight"].role, sf.recipes.steady().role("linear")
    assert role == DepthRule().of(16)(usual)
    assert Plan.of(model)["blocks.0.down.weight"].role == DepthRule().of(4 * 8)(usual)  # beside a tied table


def test_heads_of_another_size_are_those_of_the_override():
    plan = Plan.of(Model(), overrides=[("blocks.0.attention.query.*", sf.per_head(2))])
    placed = plan["blocks.0.attention.query.weight"]
    assert placed.blocks == ((8, 2, D),)
    usual = Plan.of(Model())["blocks.0.attention.query.weight"]
    assert usual.blocks == ((4, 4, D),)
    assert placed.lr_scales[0] == placed.stabilisers[0].lr_scale(placed.blocks[0]) == pytest.approx(4 / 2**0.25)
    assert usual.lr_scales[0] == usual.stabilisers[0].lr_scale(usual.blocks[0]) == pytest.approx(4 / 4**0.25)


def test_a_named_matrix_beside_a_tied_table_is_what_it_is_called():
    table = nn.Embedding(V, D)
    head = nn.Linear(D, V, bias=False)
    head.weight = table.weight
    model = Own(body=Own(tokens=table, place=torch.randn(9, D), up=nn.Linear(D, D)), head=head)
    with pytest.raises(ValueError, match=r"'tied_positions' if these are added to rows of a table"):
        Plan.of(model)
    for name in ("positions", "tied_positions", "linear"):
        plan = Plan.of(model, overrides=[("body.place", name)])
        assert (plan["body.place"].role.name, plan["body.place"].why) == (name, "override 'body.place'")
