"""What other code does to parameters, groups and state that are the optimizer's."""

import copy

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot import Plan, SteepestDescent


def test_a_parameter_that_was_frozen_and_has_no_role_is_trained_once_it_is_added():
    model = nn.Module()
    model.layer, model.odd = nn.Linear(2, 2), nn.Parameter(torch.ones(2, 2, 2), requires_grad=False)
    optimizer = SteepestDescent(model, lr=0.1)
    model.odd.requires_grad_(True).grad = torch.ones(2, 2, 2)
    with pytest.raises(ValueError, match=r"odd has a gradient but no role.* add_param_group"):
        optimizer.step()
    optimizer.add_param_group({"params": [("odd", model.odd)], "role": "bias"})
    optimizer.step()
    assert not model.odd.detach().eq(1).any()


def test_groups_of_an_optimizer_with_another_plan_do_not_lose_its_bound():
    """As a wrapper does that builds its optimizer from another's groups."""
    model = nn.Linear(4, 4, bias=False)
    bounded = SteepestDescent(model, Plan.of(model, stabiliser=sf.PostClip(0.5), head=()), lr=0.1)
    with pytest.raises(ValueError, match="role 'linear' is of an optimizer with another plan"):
        SteepestDescent(bounded.param_groups, lr=0.1)
    (group,) = bounded.param_groups
    alone = SteepestDescent([{key: x for key, x in group.items() if key != "plan"}], lr=0.1)
    assert SteepestDescent(alone.param_groups, lr=0.1).param_groups[0]["plan"] == alone.param_groups[0]["plan"]


def test_a_group_that_is_split_keeps_its_bound():
    first, second = (nn.Linear(4, 4, bias=False) for _ in range(2))
    model = nn.Sequential(first, second)
    optimizer = SteepestDescent(model, Plan.of(model, stabiliser=sf.PostClip(0.5), head=()), lr=0.1)
    group = optimizer.param_groups.pop()
    for i, p in enumerate((first.weight, second.weight)):
        optimizer.add_param_group({**group, "params": [p], "param_names": [group["param_names"][i]]})
    assert [optimizer._known[p.weight][1].promise for p in model] == ["norm <= 0.5 at every step, certified"] * 2


def test_what_others_make_of_a_state_dict_or_put_into_the_state_is_theirs():
    params = [nn.Parameter(torch.eye(4)) for _ in range(2)]
    optimizer = SteepestDescent([{"params": params, "role": "linear"}], lr=0.1)
    for p in params:
        p.grad = torch.ones(4, 4)
    optimizer.step()
    live = [*optimizer.state.values()]
    optimizer.state["count"] = 3
    with optimizer.register_state_dict_post_hook(lambda _, saved: {"wrapped": saved}):
        saved = optimizer.state_dict()["wrapped"]
    calls = []

    def again(own, _):
        calls.append(own)
        if len(calls) == 1:
            own.state_dict()

    with optimizer.register_state_dict_post_hook(again):
        optimizer.load_state_dict(optimizer.state_dict())
    assert saved["state"].pop("count") == copy.deepcopy(optimizer).state["count"] == optimizer.state["count"] == 3
    assert saved["state"].keys() == {0, 1}
    stacked = [x for state in live if isinstance(state, dict) for x in state.values()]
    assert any(x.untyped_storage().nbytes() > x.nbytes for x in stacked)
    assert all(x.untyped_storage().nbytes() == x.nbytes for state in saved["state"].values() for x in state.values())
