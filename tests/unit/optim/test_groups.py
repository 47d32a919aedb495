"""Construction by model, plan or groups: the groups that result, what is refused, and groups added later."""

import math

import pytest
import torch
from optim_helpers import backward, noise, one, small, stepped
from torch import nn

import surefoot as sf
from comparisons import same_bits, weights
from surefoot import Plan, SteepestDescent
from surefoot.roles import NATURAL


def test_the_three_ways_to_build_it_are_the_same():
    results = []
    for build in (
        lambda model: SteepestDescent(model, lr=0.1),
        lambda model: SteepestDescent(model, Plan.of(model), lr=0.1),
        lambda model: SteepestDescent(model.named_parameters(), Plan.of(model), lr=0.1),
    ):
        model = small()
        optimizer = build(model)
        backward(model, 0)
        optimizer.step()
        results.append(weights(model))
        assert isinstance(optimizer, torch.optim.Optimizer)
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])
    assert not same_bits(results[0], weights(small()))


def test_groups_by_role_with_names():
    groups = SteepestDescent(small(), lr=0.1).param_groups
    assert {g["role"]: len(g["params"]) for g in groups} == {
        "embedding": 1,
        "conv": 1,
        "bias": 6,
        "linear": 4,
        "gain": 1,
        "scalar": 1,
        "head": 1,
    }
    assert sorted(n for g in groups for n in g["param_names"]) == sorted(n for n, _ in small().named_parameters())


def test_root_linear_is_role_linear():
    assert [g["role"] for g in SteepestDescent(nn.Linear(3, 2, bias=False), lr=0.1).param_groups] == ["linear"]


def test_a_named_role_has_natural_scale_and_no_bound():
    w, optimizer = one("head", torch.ones(3, 4), lr=1.0)
    w.grad = noise(3, 4)
    optimizer.step()
    assert torch.allclose((1 - w).detach(), sf.HeadRMS().direction(w.grad), atol=1e-6)  # and not 16 times that


def test_a_role_object_in_a_group():
    own = sf.Role("mine", sf.MaxNorm(), view=NATURAL["gain"].view, lr_scale=sf.Constant(3.0))
    w, optimizer = one(own, torch.zeros(2, 2))
    w.grad = torch.tensor([[1.0, -2.0], [3.0, -4.0]])
    optimizer.step()
    assert torch.allclose(w.detach(), torch.tensor([[-0.3, 0.3], [-0.3, 0.3]]))
    assert optimizer.param_groups[0]["role"] == "mine"


def test_options_of_a_group_override_the_defaults():
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    groups = [{"params": [a], "role": "gain", "lr": 0.5}, {"params": [b], "role": "gain", "maximize": True}]
    optimizer = SteepestDescent(groups, lr=0.25)
    a.grad = b.grad = torch.ones(3)
    optimizer.step()
    assert a.tolist() == [-0.5] * 3
    assert b.tolist() == [0.25] * 3


def test_frozen_parameters_are_in_their_groups_as_torchs_are_without_state_or_step():
    model = small()
    model.up.weight.requires_grad_(False)
    optimizer, before = SteepestDescent(model, lr=0.1), model.up.weight.clone()
    groups = {n: g["role"] for g in optimizer.param_groups for n in g["param_names"]}
    assert groups["up.weight"] == "linear"
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    assert torch.equal(model.up.weight, before)
    assert model.up.weight not in optimizer.state
    assert optimizer.stability()["up.weight"]["update_upper"] == 0.0


def test_subclass_may_override_add_param_group():
    class Tagged(SteepestDescent):
        def add_param_group(self, param_group):
            super().add_param_group({**param_group, "tag": len(self.param_groups)})

    optimizer = Tagged(nn.Linear(3, 2), lr=0.1)
    assert [g["tag"] for g in optimizer.param_groups] == [0, 1]


def refused_by_sgd(build):
    try:
        torch.optim.SGD(build(), lr=0.1)
    except Exception as error:
        return error
    raise AssertionError("SGD accepts it")


@pytest.mark.parametrize(
    "build",
    [list, lambda: torch.zeros(3), lambda: [3], lambda: nn.Parameter(torch.zeros(2))],
    ids=["empty", "Tensor", "number", "Parameter"],
)
def test_list_errors_are_torchs_own(build):
    theirs = refused_by_sgd(build)
    with pytest.raises(type(theirs)) as ours:
        SteepestDescent(build(), lr=0.1)
    assert type(ours.value) is type(theirs)
    assert str(ours.value) == str(theirs)


@pytest.mark.parametrize(
    "change",
    [lambda p: {"params": [p * 2]}, lambda p: {"params": {p}}, lambda p: {"params": [p, 3]}],
    ids=["non-leaf", "set", "number"],
)
def test_group_errors_are_torchs_own(change):
    p = nn.Parameter(torch.ones(2, 2))
    theirs = refused_by_sgd(lambda: [change(p)])
    with pytest.raises(type(theirs)) as ours:
        SteepestDescent([{**change(p), "role": "linear"}], lr=0.1)
    assert type(ours.value) is type(theirs)
    assert str(ours.value) == str(theirs)


def test_duplicates_warn_within_a_group_and_raise_across_groups():
    p = nn.Parameter(torch.ones(2, 2))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        SteepestDescent([{"params": [p, p], "role": "linear"}], lr=0.1)
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        SteepestDescent([{"params": [p], "role": "linear"}, {"params": [p], "role": "linear"}], lr=0.1)


@pytest.mark.parametrize(
    "build",
    [
        lambda model: model.parameters(),
        lambda model: list(model.parameters()),
        lambda model: model.named_parameters(),
        lambda model: [{"params": list(model.parameters())}],
    ],
    ids=["generator", "list", "named", "group"],
)
def test_parameters_without_a_role_raise_with_the_remedy(build):
    with pytest.raises(ValueError, match="needs a role") as error:
        SteepestDescent(build(nn.Linear(2, 2)), lr=0.1)
    assert "'role': 'linear'" in str(error.value)
    assert "SteepestDescent(model, lr=...)" in str(error.value)


@pytest.mark.parametrize("shape", [(7,), (2, 3, 4), ()], ids=str)
@pytest.mark.parametrize("role", ["linear", "embedding", "head"])
def test_matrix_roles_take_two_dimensions_only(role, shape):
    with pytest.raises(ValueError, match=role) as error:
        one(role, torch.zeros(shape))
    assert str(shape) in str(error.value)


@pytest.mark.parametrize("shape", [(), (0,), (3, 4)], ids=str)
@pytest.mark.parametrize("role", ["bias", "gain", "scalar"])
def test_vector_roles_take_any_shape_as_one_vector(role, shape):
    w = stepped(role, torch.ones(shape), torch.full(shape, 2.0))
    assert w.shape == shape
    assert torch.allclose(w, torch.full(shape, 0.9))


def test_a_vector_role_has_one_norm_over_all_entries():
    g = noise(3, 4)
    assert torch.allclose(stepped("bias", torch.zeros(3, 4), g, lr=1.0), -g / g.square().mean().sqrt(), atol=1e-6)


def test_unknown_role_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'lineal'.*linear, embedding, head"):
        one("lineal", torch.zeros(2, 2))


@pytest.mark.parametrize(
    "build",
    [
        lambda: SteepestDescent(nn.Linear(2, 2, dtype=torch.complex64), lr=0.1),
        lambda: one("linear", torch.zeros(2, 2, dtype=torch.complex64)),
        lambda: SteepestDescent([nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))], lr=0.1),
    ],
    ids=["model", "group", "list"],
)
def test_complex_parameters_raise(build):
    with pytest.raises(ValueError, match="complex"):
        build()


@pytest.mark.parametrize("lr", [-1.0, math.nan, math.inf])
def test_impossible_learning_rate_raises(lr):
    with pytest.raises(ValueError, match="learning rate"):
        SteepestDescent(nn.Linear(2, 2), lr=lr)


def test_a_recipe_is_no_plan():
    with pytest.raises(ValueError, match=r"plan must be a Plan, such as Plan\.of\(model, recipe\), not Recipe"):
        SteepestDescent(nn.Linear(2, 2), sf.recipes.muon(), lr=0.1)


@pytest.mark.parametrize("named", [True, False])
def test_a_parameter_appended_to_a_group_is_refused_with_the_remedy(named):
    model = nn.Linear(2, 2)
    groups = model if named else [{"params": [model.weight], "role": "linear"}]
    optimizer = SteepestDescent(groups, lr=0.1)
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(2, 2)))
    with pytest.raises(ValueError, match=r"a group holds a parameter of shape \(2, 2\) unknown.*add_param_group"):
        optimizer.step()


def test_parameters_that_the_plan_lacks_raise():
    plan = Plan.of(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"'0\.weight'"):
        SteepestDescent(nn.Sequential(nn.Linear(2, 2)), plan, lr=0.1)
    with pytest.raises(ValueError, match=r"weight has shape \(3, 2\).*\(2, 2\)"):
        SteepestDescent(nn.Linear(2, 3), plan, lr=0.1)
    with pytest.raises(ValueError, match="named_parameters"):
        SteepestDescent(nn.Linear(2, 2).parameters(), plan, lr=0.1)


@pytest.mark.parametrize("named", [True, False])
def test_added_group_is_stepped(named):
    optimizer = SteepestDescent(nn.Linear(3, 2), lr=0.1)
    late = nn.Parameter(torch.zeros(4))
    optimizer.add_param_group({"params": [("late", late) if named else late], "role": "gain", "lr": 0.5})
    late.grad = torch.ones(4)
    optimizer.step()
    assert late.tolist() == [-0.5] * 4


@pytest.mark.parametrize("role", [None, "linear", "lineal"])
def test_refused_group_leaves_the_optimizer_as_it_was(role):
    w, optimizer = one("gain", torch.zeros(4))
    group = {"params": [nn.Parameter(torch.zeros(4))]} | ({"role": role} if role else {})
    with pytest.raises(ValueError, match="role"):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    w.grad = torch.ones(4)
    optimizer.step()
    assert torch.allclose(w.detach(), torch.full((4,), -0.1))


@pytest.mark.parametrize("setting", [{"weight_decay": 0.5}, {"betas": (0.9, 0.95)}, {"momentum": 0.9}])
def test_settings_of_other_optimizers_in_a_group_are_refused(setting):
    group = {"params": [nn.Parameter(torch.zeros(4))], "role": "gain", **setting}
    with pytest.raises(TypeError, match=f"takes no {next(iter(setting))}: decay follows from run="):
        SteepestDescent([group], lr=0.1)
    _, optimizer = one("gain", torch.zeros(4))
    with pytest.raises(TypeError, match="takes no"):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


def test_a_plan_from_before_weights_were_tied_is_refused():
    model = nn.ModuleDict({"e": nn.Embedding(50, 16), "h": nn.Linear(16, 50, bias=False)})
    plan = Plan.of(model)
    model["h"].weight = model["e"].weight
    with pytest.raises(ValueError, match=r"h\.weight was tied after the plan was made: tie weights first"):
        SteepestDescent(model, plan, lr=0.1)
    assert [group["role"] for group in SteepestDescent(model, lr=0.1).param_groups] == ["head"]


def test_a_parameter_that_leaves_its_group_leaves_the_report():
    model = nn.Sequential(nn.Linear(4, 4, False), nn.Linear(4, 4, False))
    optimizer = SteepestDescent(model, Plan.of(model, head=()), lr=0.1)
    del optimizer.param_groups[0]["params"][0]
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert set(optimizer.stability()) == {"1.weight"}


def test_add_param_group_does_not_write_to_its_argument():
    group = {"params": [nn.Parameter(torch.zeros(4))], "role": NATURAL["gain"]}
    one("gain", torch.zeros(4))[1].add_param_group(group)
    assert group["role"] is NATURAL["gain"]


def test_groups_with_parameters_of_one_name_have_lines_of_their_own():
    layers = [nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)]
    groups = [{"params": list(layer.named_parameters()), "role": "linear"} for layer in layers]
    optimizer = SteepestDescent(groups, lr=0.1)
    for layer, value in zip(layers, (1.0, torch.nan), strict=True):
        layer.weight.grad = torch.full((2, 3), value)
    optimizer.step()
    assert optimizer.skipped() == {"group1.weight": 1}
    assert set(optimizer.stability()) == {"weight", "group1.weight"}
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.skipped() == {"group1.weight": 1}
