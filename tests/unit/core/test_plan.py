"""The plan: every parameter once, recipes and stabilisers, overrides, the table, and the hash."""

import dataclasses
import math

import pytest
import torch
from plan_helpers import Bare, Language, roles, tied
from torch import nn

import surefoot as sf
from surefoot import Plan, recipes
from surefoot.views import Fused, Matrix


def test_shared_parameter_is_listed_once_with_all_its_names():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    plan = Plan.of(model)
    assert list(plan) == ["0.weight", "0.bias", "2.bias"]
    assert "shared by 0.weight, 2.weight" in plan["0.weight"].why


def two_roles():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model[1].weight = model[0].bias
    return model


def test_two_roles_for_one_parameter_raise():
    with pytest.raises(ValueError, match=r"two roles \(0.bias: bias, 1.weight: gain\).*override"):
        Plan.of(two_roles())


def test_two_roles_are_settled_by_an_override():
    assert roles(two_roles(), overrides=[("0.bias", "gain")])["0.bias"] == "gain"


def test_two_parameters_over_one_memory_are_refused():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.data)
    with pytest.raises(ValueError, match=r"0\.weight and 1\.weight are two parameters sharing memory"):
        Plan.of(model)


def test_parts_of_one_flat_buffer_are_separate_parameters():
    flat = torch.zeros(32)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[0].weight, model[1].weight = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[16:].view(4, 4))
    assert len(Plan.of(model)) == 2


def test_every_parameter_exactly_once_in_the_models_order_and_frozen_ones_say_so():
    model = nn.Sequential(nn.Embedding(9, 4), nn.TransformerEncoderLayer(4, 2, 8), nn.Conv1d(4, 4, 3), nn.Linear(4, 9))
    model[1].linear1.weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    plan = Plan.of(model)
    assert list(plan) == [name for name, p in model.named_parameters()]
    assert [name for name in plan if plan[name].why.startswith("frozen; ")] == ["1.linear1.weight", "2.bias"]
    assert all(plan[name].why for name in plan)
    trained = Plan.of(model.requires_grad_(True))
    assert trained.hash == plan.hash


def test_a_name_that_the_plan_lacks_raises():
    with pytest.raises(ValueError, match="'nothing'"):
        Plan.of(nn.Linear(2, 2))["nothing"]


def test_the_recipe_changes_the_increment_and_not_the_layout():
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Conv2d(4, 4, 3, groups=2))
    default, row = Plan.of(model, recipes.beyond_mup()), Plan.of(model, recipes.moga_row(1.5))
    assert isinstance(row["0.in_proj_weight"].role.geometry, sf.MeanOperator)
    assert isinstance(row["1.weight"].role.geometry, sf.MeanOperator)
    assert [default[n].blocks[0] for n in default] == [row[n].blocks[0] for n in row]
    assert Plan.of(model).recipe == "steady"
    assert row.recipe == "moga_row(1.5)"


def test_a_stabiliser_goes_to_every_role_in_its_own_unit():
    plan = Plan.of(Language(), stabiliser=sf.PostClip(2.0))
    logs = math.log(50)
    assert {name: plan[name].stabilisers[0] for name in plan} == {
        name: sf.PostClip(2.0 * logs if name == "out.weight" else 2.0) for name in plan
    }
    for given, scaled in (
        (sf.WeightDecay(0.5), sf.WeightDecay(0.5 / logs)),
        (sf.PreDecay(0.5), sf.PreDecay(0.5 / logs)),
        (sf.Rescale(2), sf.Rescale(2 * logs)),
        (sf.Normalise(2), sf.Normalise(2 * logs)),
        (sf.Free(), sf.Free()),
    ):
        assert Plan.of(Language(), stabiliser=given)["out.weight"].stabilisers == (scaled,)


def test_tied_head_has_the_heads_unit():
    assert Plan.of(tied(), stabiliser=sf.PostClip(1.0))["table.weight"].stabilisers[0] == sf.PostClip(math.log(50))


def test_override_by_pattern_module_and_function():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(6, 6, bias=False))
    own = sf.Role("mine", sf.RowRMS())
    overrides = [
        ("0.w*", "embedding"),
        (model[1], lambda role: dataclasses.replace(role, stabiliser=sf.PostClip(3.0))),
        (lambda name, p: tuple(p.shape) == (6, 4), own),
        (lambda name, p: name == "3.weight", "head"),
    ]
    plan = Plan.of(model, overrides=overrides)
    assert [plan[n].role.name for n in plan] == ["embedding", "bias", "linear", "bias", "mine", "bias", "head"]
    assert plan["2.weight"].role is own
    assert "override '0.w*'" in plan["0.weight"].why
    assert plan["1.weight"].stabilisers[0] == plan["1.bias"].stabilisers[0] == sf.PostClip(3.0)
    assert "override" in plan["1.weight"].why
    assert "override" not in plan["0.bias"].why


def test_override_by_a_function_of_the_discovered_role():
    def doubled(role):
        return dataclasses.replace(role, lr_scale=sf.Constant(2.0))

    plan = Plan.of(nn.MultiheadAttention(8, 2), recipes.beyond_mup(), overrides=[("in_proj_weight", doubled)])
    assert plan["in_proj_weight"].role.lr_scale == sf.Constant(2.0)
    assert plan["in_proj_weight"].role.view == Fused(3)  # the rest of the discovered role is unchanged


def test_override_pattern_matches_whole_names_only():
    model = nn.ModuleDict({"proj": nn.Linear(4, 4), "proj_out": nn.Linear(4, 4)})
    changed = roles(model, overrides=[("proj.weight", "embedding")])
    assert changed["proj.weight"] == "embedding"
    assert changed["proj_out.weight"] == "linear"
    with pytest.raises(ValueError, match="'proj'"):
        Plan.of(model, overrides=[("proj", "embedding")])


@pytest.mark.parametrize(
    ("where", "label"),
    [("nothing.*", "'nothing.*'"), (nn.Linear(2, 2), "'Linear'"), (lambda name, p: False, "lambda")],
    ids=["pattern", "module", "function"],
)
def test_override_that_matches_nothing_raises(where, label):
    with pytest.raises(ValueError, match="matches no parameter") as error:
        Plan.of(nn.Linear(4, 4), overrides=[(where, "linear")])
    assert label in str(error.value)


def test_a_frozen_parameter_may_have_an_override():
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    placement = Plan.of(model, overrides=[("bias", "gain")])["bias"]
    assert (placement.role.name, placement.why) == ("gain", "frozen; override 'bias'")


def test_two_overrides_for_one_parameter_raise():
    with pytest.raises(ValueError, match=r"weight has two overrides.*'weight'.*'w\*'"):
        Plan.of(nn.Linear(4, 4), overrides=[("weight", "embedding"), ("w*", "head")])


def test_override_with_a_role_that_does_not_fit_raises():
    with pytest.raises(ValueError, match=r"bias cannot be linear.*\(4,\)"):
        Plan.of(nn.Linear(4, 4), overrides=[("bias", "linear")])
    with pytest.raises(ValueError, match=r"unknown role 'liner'.*linear, embedding"):
        Plan.of(nn.Linear(4, 4), overrides=[("weight", "liner")])


@pytest.mark.parametrize(("layer", "lacking"), [(nn.Conv1d(4, 8, 3), "linear"), (nn.LayerNorm(4), "gain")])
def test_a_role_that_the_recipe_has_no_row_for_is_named(layer, lacking):
    recipe = sf.recipes.steady()
    rest = {name: role for name, role in recipe.table.items() if name not in (lacking, "conv")}
    with pytest.raises(ValueError, match=f"the recipe has no role '{lacking}': give it a row"):
        Plan.of(layer, sf.Recipe("own", rest))


@pytest.mark.parametrize(
    ("role", "shape", "block", "geometry"),
    [
        ("experts", (3, 4, 5), (3, 4, 5), sf.Spectral()),
        ("router", (3, 5), (1, 3, 5), sf.HeadRMS()),
        ("positions", (16, 5), (1, 16, 5), sf.RowRMS()),
    ],
)
def test_derived_roles(role, shape, block, geometry):
    model = Bare(*shape)
    plan = Plan.of(model, overrides=[("layer_scale", role)])
    assert plan["layer_scale"].blocks[0] == block
    assert plan["layer_scale"].role.weight_geometry == geometry
    before = model.layer_scale.detach().clone()
    plan.initialise_(model)
    assert torch.equal(before, model.layer_scale) == (role == "positions")  # positions stay as built


def test_the_printed_table():
    text = str(Plan.of(Language(), recipes.beyond_mup(), stabiliser=sf.PostClip(2.0)))
    lines = text.splitlines()
    assert lines[0].split() == ["name", "shape", "role", "norm", "init", "lr", "scale", "promise", "why"]
    assert len(lines) == 6 + 5  # rows; heading, two rules, smoothness, total
    assert lines[-2] == "Spectral: layers compose at every width, smoothness grows as width**0.5"
    head = next(line for line in lines if line.startswith("out.weight"))
    assert head.split()[:4] == ["out.weight", "50x8", "head", "HeadRMS"]
    assert "  16  " in head
    assert f"norm <= {2 * math.log(50):.4g} at every step, certified" in head
    assert head.endswith("LM head: Linear(d, V) beside Embedding(V, d)")
    hidden = next(line for line in lines if line.startswith("hidden.weight"))
    assert hidden.split()[:4] == ["hidden.weight", "8x8", "linear", "Spectral"]
    assert lines[-1].startswith("6 parameters, 888 entries, recipe beyond_mup, plan ")
    assert all(line == line.rstrip() for line in lines)


def norms(*counts):
    """Lists of norms, of so many each."""
    return nn.ModuleList(nn.ModuleList(nn.LayerNorm(4, bias=False) for _ in range(count)) for count in counts)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (nn.ModuleDict({"b": norms(2, 2, 2), "c": norms(3)[0]}), ["b.0-2.0-1.weight", "c.0-2.weight"]),
        (norms(2, 1), ["0.0.weight", "0.1.weight", "1.0.weight"]),
        (nn.ModuleList(nn.LayerNorm(8 if i == 2 else 4, bias=False) for i in range(5)), ["0,1,3,4.weight", "2.weight"]),
    ],
    ids=["all", "not every combination", "gap"],
)
def test_repeated_blocks_are_one_line_of_the_printed_table(model, names):
    plan = Plan.of(model)
    assert [line.split()[0] for line in str(plan).splitlines()[2 : 2 + len(names)]] == names
    assert len(plan.rows()) == len(plan) == len([*model.parameters()])


def test_the_table_of_an_empty_plan():
    assert str(Plan.of(nn.ReLU())) == "plan steady: no parameters that a rule places"


def test_rows_are_strings():
    for row in Plan.of(Language()).rows():
        assert {"name", "shape", "role", "norm", "init", "lr scale", "promise", "why"} <= set(row)
        assert all(isinstance(value, str) and value for value in row.values())


def test_hash_depends_on_roles_shapes_and_order_and_not_on_names():
    a = nn.ModuleDict({"a": nn.Linear(4, 8), "b": nn.Linear(8, 4)})
    renamed = nn.ModuleDict({"x": nn.Linear(4, 8), "y": nn.Linear(8, 4)})
    swapped = nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(4, 8)})
    plan = Plan.of(a)
    assert plan.hash == Plan.of(renamed).hash == Plan.of(a).hash
    others = [
        Plan.of(swapped),
        Plan.of(a, recipes.muon()),
        Plan.of(a, recipes.moga_row(1.5)),
        Plan.of(a, stabiliser=sf.PostClip(2.0)),
        Plan.of(a, stabiliser=sf.PostClip(3.0)),
        Plan.of(a, overrides=[("a.weight", "embedding")]),
        Plan.of(nn.ModuleDict({"a": nn.Linear(4, 8), "b": nn.Linear(8, 5)})),
    ]
    assert len({plan.hash, *(other.hash for other in others)}) == 1 + len(others)


def test_the_view_of_a_role_is_a_plain_value():
    assert Plan.of(nn.Linear(4, 4))["weight"].role.view == Matrix()


def test_the_promise_names_the_weights_norm_where_steps_are_of_another():
    rows = {
        row["name"]: row["promise"]
        for row in Plan.of(Language(), sf.recipes.moga_row(), stabiliser=sf.PostClip(2)).rows()
    }
    assert rows["hidden.weight"] == f"Spectral {sf.PostClip(2.0).promise}"
    assert rows["out.weight"].startswith("norm <= ")  # its steps are of its own norm


def test_the_table_shows_what_differs_from_the_defaults():
    model = nn.ModuleDict({"up": nn.ConvTranspose1d(4, 6, 3, stride=3), "mix": nn.MultiheadAttention(8, 2)})
    rows = {
        row["name"]: row for row in Plan.of(model, recipes.moga_row(1.5), overrides=[("up.weight", own_role)]).rows()
    }
    assert rows["mix.in_proj_weight"]["layout"] == "Fused(parts=3)"
    assert rows["mix.in_proj_weight"]["norm"] == "MeanOperator(p=1.5, q=inf)"
    assert (rows["up.weight"]["layout"], rows["up.weight"]["norm"]) == ("Rows", "Spectral(method='qdwh')")


own_role = sf.Role("own", sf.Spectral("qdwh"), view=sf.views.Rows())
