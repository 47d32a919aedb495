"""What an override may be; anything else is refused by its pattern, with the remedy."""

from dataclasses import replace

import pytest
from torch import nn

import surefoot as sf
from surefoot import Plan


@pytest.mark.parametrize(
    "change", [sf.PostClip(2.0), sf.Spectral(), 2.0, None, sf.PostClip, sf.recipes.steady()], ids=lambda x: repr(x)[:20]
)
def test_a_change_that_is_no_role_is_refused_by_its_pattern(change):
    with pytest.raises(ValueError, match=r"the override 'wei\*' cannot be .*: give a role's name, a Role, or a"):
        Plan.of(nn.Linear(4, 4), overrides=[("wei*", change)])
    with pytest.raises(ValueError, match="the override 'Linear' cannot be"):
        Plan.of(model := nn.Linear(4, 4), overrides=[(model, change)])


@pytest.mark.parametrize("returned", [None, "linear", sf.PostClip(2.0)])
def test_a_function_that_returns_no_role_is_refused_by_its_pattern(returned):
    with pytest.raises(ValueError, match=r"weight: the function of override 'weight' returned .*`lambda role: rep"):
        Plan.of(nn.Linear(4, 4), overrides=[("weight", lambda role: returned)])


@pytest.mark.parametrize(
    "overrides", [{"weight": "linear"}, {"*b": "linear"}, "linear", ("weight", "linear"), [("weight",)], [None]]
)
def test_what_is_no_list_of_pairs_is_refused(overrides):
    with pytest.raises(ValueError, match=r"overrides must be pairs \(where, change\)"):
        Plan.of(nn.Linear(4, 4), overrides=overrides)


def test_where_is_a_pattern_a_module_or_a_function():
    with pytest.raises(ValueError, match=r"not \(3, 'linear'\)$"):
        Plan.of(nn.Linear(4, 4), overrides=[(3, "linear")])


@pytest.mark.parametrize("where", ["table.weight", "out.weight", "*weight"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_pattern_matches_each_name_of_a_tied_table_also_below_a_wrapper(where, wrapped):
    model = nn.ModuleDict({"table": nn.Embedding(9, 4), "out": nn.Linear(4, 9, bias=False)})
    model["out"].weight = model["table"].weight
    plan = Plan.of(nn.ModuleDict({"module": model}) if wrapped else model, overrides=[(where, "embedding")])
    assert [placement.role.name for placement in plan.placements.values()] == ["embedding"]


def test_the_remedy_works():
    change = lambda role: replace(role, stabiliser=sf.PostClip(2.0))  # noqa: E731
    plan = Plan.of(nn.Linear(4, 4), overrides=[["weight", change]])
    assert plan["weight"].promise.startswith("norm <= 2 ")
