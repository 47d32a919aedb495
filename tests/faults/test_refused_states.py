"""Saved states that do not fit are refused by name, and whatever fails while one is loaded changes nothing."""

import copy
import re

import pytest
import torch
from torch import nn

import surefoot as sf
from comparisons import train


def build(recipe=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 12, bias=False))
    return model, sf.SteepestDescent(model, sf.Plan.of(model, recipe, **options), lr=0.01)


def lacks_momentum(state):
    del state["momentum"]


def no_tensor(state):
    state["momentum"] = 0.5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda state: state.update(momentum=torch.zeros(1, 1)), "'momentum' of the checkpoint has shape (1, 1)"),
        (
            lambda state: state.update(momentum=state["momentum"].mT.reshape(-1)),
            "'momentum' of the checkpoint has shape",
        ),
        (lambda state: state.update(momentum=state["momentum"].long()), "'momentum' of the checkpoint has torch.int64"),
        (
            lambda state: state.update(momentum=state["momentum"] * 1j),
            "'momentum' of the checkpoint has torch.complex64",
        ),
        (
            lambda state: state.update(skipped=torch.zeros(2, dtype=torch.int32)),
            "'skipped' of the checkpoint has shape",
        ),
        (lambda state: state.update(upper=torch.zeros(7)), "'upper' of the checkpoint has shape (7,)"),
        (lambda state: state.update(master=torch.zeros(3)), "'master' of the checkpoint has shape (3,)"),
        (lambda state: state.update(exp_avg=torch.zeros(3)), "an entry 'exp_avg'"),
        (lacks_momentum, "the checkpoint lacks 'momentum'"),
        (no_tensor, "'momentum' of the checkpoint is a float, not a tensor"),
        (
            lambda state: state.update(momentum=state["momentum"].to_sparse()),
            "'momentum' of the checkpoint has no values in memory, but is torch.sparse_coo",
        ),
        (
            lambda state: state.update(momentum=state["momentum"].to("meta")),
            "'momentum' of the checkpoint has no values in memory",
        ),
    ],
)
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "new"])
def test_an_entry_that_does_not_fit_is_refused_by_name_and_changes_nothing(change, named, trained):
    """The last parameter's is damaged, so that all others could have been loaded."""
    model, optimizer = build(sf.recipes.beyond_mup(), stabiliser=sf.PostClip(2.0))
    train(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    _, other = build(sf.recipes.beyond_mup(), stabiliser=sf.PostClip(2.0))
    if trained:
        train(_, other, range(4, 6))
    name, index = next(
        (n, i)
        for i, n in reversed([*enumerate(name for name, _ in other._known.values())])
        if "upper" in saved["state"][i]
    )
    change(saved["state"][index])
    saved["param_groups"][0]["lr"] = 7.0
    before, groups, objects = copy.deepcopy(other.state_dict()), other.param_groups, {**other.state}
    with pytest.raises(ValueError, match=re.escape(named)) as refusal:
        other.load_state_dict(saved)
    assert name in str(refusal.value)
    assert other.param_groups is groups
    assert all(other.state[p] is state for p, state in objects.items())
    assert_same_state_dict(before, other.state_dict())
    train(_, other, range(6, 8))  # and it goes on


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda saved: saved.pop("state"), "'state' of the checkpoint is not a dict"),
        (lambda saved: saved.update(param_groups=None), "'param_groups' of the checkpoint is not a list"),
        (lambda saved: saved["state"].update({0: None}), "0.weight: its state in the checkpoint is NoneType"),
        (lambda saved: saved["state"].update({0: [1]}), "0.weight: its state in the checkpoint is list"),
        *(
            (lambda saved, lr=lr: saved["param_groups"][1].update(lr=lr), "Invalid learning rate")
            for lr in (None, "x", -1, float("nan"), float("inf"), [1])
        ),
        (lambda saved: saved["param_groups"][1].update(lr=torch.ones(2)), "1-element"),
        *(
            (
                lambda saved, key=key: saved["param_groups"][1].update({key: "x"}),
                f"'{key}' of the checkpoint's parameter group 1",
            )
            for key in ("params", "plan", "maximize", "steps_on_device")
        ),
        (lambda saved: saved["param_groups"][1].pop("params"), "'params' of the checkpoint's parameter group 1"),
    ],
)
def test_what_is_no_state_dictionary_is_refused_and_changes_nothing(change, named):
    model, optimizer = build()
    train(model, optimizer, range(2))
    saved, before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict())
    change(saved)
    with pytest.raises(ValueError, match=re.escape(named)):
        optimizer.load_state_dict(saved)
    assert_same_state_dict(before, optimizer.state_dict())
    train(model, optimizer, range(2, 4))


def assert_same_state_dict(a, b):
    assert a["param_groups"] == b["param_groups"]
    for index, entries in a["state"].items():
        assert all(torch.equal(x, b["state"][index][name]) for name, x in entries.items())


def test_a_state_of_no_parameter_is_refused():
    model, optimizer = build()
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    saved["state"][99] = {"momentum": torch.zeros(2)}
    with pytest.raises(ValueError, match="parameter 99, which is in none of its groups"):
        optimizer.load_state_dict(saved)


def test_another_number_of_parameters_is_refused_by_the_name_that_one_of_both_lacks():
    optimizer, larger = build()[1], build()[1].state_dict()
    group, before = larger["param_groups"][0], copy.deepcopy(optimizer.state_dict())
    group["params"], group["param_names"] = [*group["params"], 99], [*group["param_names"], "late"]
    with pytest.raises(ValueError, match=r"the optimizer has 1; only one of them has late.*weights alone"):
        optimizer.load_state_dict(larger)
    assert_same_state_dict(optimizer.state_dict(), before)


def test_an_error_of_a_hook_leaves_nothing_half_loaded():
    model, optimizer = build()
    train(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(3, 5))
    before = copy.deepcopy(optimizer.state_dict())

    def refuse(_):
        raise RuntimeError("no")

    optimizer.register_load_state_dict_post_hook(refuse)
    with pytest.raises(RuntimeError, match="no"):
        optimizer.load_state_dict(saved)
    assert_same_state_dict(before, optimizer.state_dict())
    train(model, optimizer, range(5, 6))


def test_a_layer_of_another_width_is_refused_by_its_shape_and_not_by_its_plan():
    saved = sf.SteepestDescent(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), lr=0.1)
    for p in saved.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    saved.step()
    wide = sf.SteepestDescent(nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 3)), lr=0.1)
    with pytest.raises(
        ValueError, match=r"0\.weight in .* has shape \(8, 4\), here \(16, 4\): load the model's weights"
    ):
        wide.load_state_dict(saved.state_dict())


def test_a_checkpoint_of_another_optimizer_says_that_it_is_one():
    model, optimizer = build()
    with pytest.raises(ValueError, match="it is another optimizer's; load the model's weights alone"):
        optimizer.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())
