"""Saving and resuming: bit for bit, in the dtypes that were saved, and only under the same plan."""

import copy
import dataclasses
import io
import pickle

import pytest
import torch
from optim_helpers import small
from torch import nn

import surefoot as sf
from combinations import combinations
from comparisons import same_bits, train, weights
from surefoot import Plan, SteepestDescent, recipes

RECIPES = [
    recipes.steady(),
    recipes.steady_soap(),
    recipes.beyond_mup(),
    recipes.moga_row(1.5),
    recipes.muon(),
    recipes.lion(),
    recipes.sign_sgd(),
    recipes.hyperball(),
]
DTYPES = [torch.float32, torch.bfloat16]


def build(recipe, dtype, **options):
    model = small().to(dtype)
    return model, SteepestDescent(model, Plan.of(model, recipe, **options), lr=0.01)


def through(value, way):
    if way == "memory":
        return copy.deepcopy(value)
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(a, b):
    return same_bits(weights(a), weights(b))


def assert_same_state(a, b):
    for ours, theirs in zip(a.state_dict()["state"].values(), b.state_dict()["state"].values(), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert value.dtype == theirs[name].dtype, name
            assert torch.equal(value, theirs[name]), name


@combinations(pairs=True, recipe=RECIPES, way=["memory", "weights_only file"], dtype=DTYPES)
def test_resuming_from_a_state_dict_is_bit_for_bit(recipe, way, dtype):
    whole, optimizer = build(recipe, dtype)
    train(whole, optimizer, range(3))
    saved_model, saved = through(whole.state_dict(), way), through(optimizer.state_dict(), way)
    train(whole, optimizer, range(3, 6))
    part, resumed = build(recipe, dtype)
    part.load_state_dict(saved_model)
    resumed.load_state_dict(saved)
    assert not same(whole, part)
    train(part, resumed, range(3, 6))
    assert same(whole, part)
    assert_same_state(optimizer, resumed)


@combinations(pairs=True, recipe=RECIPES, way=["deepcopy", "pickle"], dtype=DTYPES)
def test_copies_take_the_same_steps_and_share_no_memory(recipe, way, dtype):
    model, optimizer = build(recipe, dtype, stabiliser=sf.PostClip(1.0))
    train(model, optimizer, range(2))
    both = (model, optimizer)
    twin, other = copy.deepcopy(both) if way == "deepcopy" else pickle.loads(pickle.dumps(both))
    before = copy.deepcopy(model)
    train(twin, other, range(2, 4))
    assert same(model, before)
    assert not same(model, twin)
    train(model, optimizer, range(2, 4))
    assert same(model, twin)
    assert_same_state(optimizer, other)
    assert other.stability() == optimizer.stability()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_state_of_bfloat16_parameters_stays_float32_after_loading(recipe):
    """torch's own load_state_dict casts it to the parameter's dtype."""
    model, optimizer = build(recipe, torch.bfloat16)
    train(model, optimizer, range(2))
    loaded = build(recipe, torch.bfloat16)[1]
    loaded.load_state_dict(optimizer.state_dict())
    assert {state["skipped"].dtype for state in loaded.state.values()} == {torch.int32}
    floats = {t.dtype for state in loaded.state.values() for name, t in state.items() if name != "skipped"}
    assert floats <= {torch.float32}
    assert floats or recipe.name == "sign_sgd"


def test_loaded_state_is_a_copy():
    model, optimizer = build(recipes.beyond_mup(), torch.float32)
    train(model, optimizer, range(1))
    state = optimizer.state_dict()
    before = copy.deepcopy(state)
    twin, other = build(recipes.beyond_mup(), torch.float32)
    other.load_state_dict(state)
    train(twin, other, range(1, 3))
    for name, entry in before["state"].items():
        assert all(torch.equal(value, state["state"][name][key]) for key, value in entry.items())


def test_counts_of_skipped_steps_are_saved_and_loaded():
    model, optimizer = build(recipes.beyond_mup(), torch.float32)
    train(model, optimizer, range(1))
    model.up.weight.grad.fill_(float("nan"))
    optimizer.step()
    other = build(recipes.beyond_mup(), torch.float32)[1]
    other.load_state_dict(optimizer.state_dict())
    assert other.skipped() == {"up.weight": 1}


def test_learning_rate_and_groups_are_loaded():
    optimizer = build(recipes.beyond_mup(), torch.float32)[1]
    for group in optimizer.param_groups:
        group["lr"] = 0.125
    other = build(recipes.beyond_mup(), torch.float32)[1]
    other.load_state_dict(optimizer.state_dict())
    assert {g["lr"] for g in other.param_groups} == {0.125}
    assert [g["role"] for g in other.param_groups] == [g["role"] for g in optimizer.param_groups]


def test_an_empty_state_can_be_saved_and_loaded():
    model, optimizer = build(recipes.beyond_mup(), torch.float32)
    optimizer.load_state_dict(build(recipes.beyond_mup(), torch.float32)[1].state_dict())
    train(model, optimizer, range(2))
    twin, other = build(recipes.beyond_mup(), torch.float32)
    train(twin, other, range(2))
    assert same(model, twin)


def scaled(role):
    return dataclasses.replace(role, lr_scale=sf.Constant(2.0))


@pytest.mark.parametrize(
    "options",
    [
        {"recipe": recipes.moga_row()},
        {"recipe": recipes.muon()},
        {"stabiliser": sf.PostClip(2.0)},
        {"overrides": [("up.weight", scaled)]},
    ],
    ids=["moga", "muon", "stabiliser", "override"],
)
def test_a_checkpoint_of_another_plan_is_refused_and_nothing_changes(options):
    model, optimizer = build(recipes.beyond_mup(), torch.float32)
    train(model, optimizer, range(1))
    target = small()
    other = SteepestDescent(target, Plan.of(target, **options), lr=0.5)
    with pytest.raises(ValueError, match=r"parameter group \d.*another plan") as error:
        other.load_state_dict(optimizer.state_dict())
    assert "recipe, overrides" in str(error.value)
    assert not other.state
    assert {g["lr"] for g in other.param_groups} == {0.5}


def test_a_checkpoint_of_the_first_format_is_refused_with_the_remedy():
    model, optimizer = build(recipes.beyond_mup(), torch.float32)
    train(model, optimizer, range(1))
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group["format"], group["plan"] = 1, "0123456789abcdef"
    with pytest.raises(ValueError, match=r"format 1, not SteepestDescent's 3: resume with the version of"):
        optimizer.load_state_dict(saved)


def test_a_group_entry_that_a_checkpoint_lacks_has_its_default():
    """As in torch's optimizers: an entry may be newer than the checkpoint."""
    model, optimizer = build(recipes.beyond_mup(), torch.float32)
    train(model, optimizer, range(1))
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["maximize"]
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(1))
    assert {group["maximize"] for group in optimizer.param_groups} == {False}


def test_a_checkpoint_of_another_optimizer_is_refused():
    model, optimizer = build(recipes.beyond_mup(), torch.float32)
    with pytest.raises(ValueError, match="format None, not SteepestDescent's 3"):
        optimizer.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())


def test_a_checkpoint_with_other_groups_is_refused_as_torch_does():
    two, one = (SteepestDescent(nn.Linear(4, 3, bias=bias), lr=0.1) for bias in (True, False))
    with pytest.raises(ValueError, match="different number of parameter groups"):
        two.load_state_dict(one.state_dict())


def test_a_renamed_model_may_load_the_checkpoint():
    model, optimizer = build(recipes.beyond_mup(), torch.float32)
    train(model, optimizer, range(2))
    wrapped = nn.ModuleDict({"module": small()})
    other = SteepestDescent(wrapped, Plan.of(wrapped, recipes.beyond_mup()), lr=0.01)
    wrapped["module"].load_state_dict(model.state_dict())
    names = [group["param_names"] for group in other.param_groups]
    other.load_state_dict(optimizer.state_dict())
    assert [group["param_names"] for group in other.param_groups] == names  # its own, whatever the checkpoint's are
    train(model, optimizer, range(2, 4))
    train(wrapped, other, range(2, 4))
    assert same(model, wrapped["module"])


def test_hooks_of_loading_decide_what_is_loaded():
    """torch's pattern for `param_names`: a pre-hook brings state into the order of this optimizer's parameters."""

    def two_layers(turn):
        model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
        named = list(model.named_parameters())[::turn]
        return model, SteepestDescent([{"params": named, "role": "linear"}], lr=0.1)

    def ids(saved):
        group = saved["param_groups"][0]
        return dict(zip(group["param_names"], group["params"], strict=True))

    def by_name(optimizer, saved):
        ours = ids(optimizer.state_dict())
        return {**saved, "state": {i: saved["state"][ids(saved)[name]] for name, i in ours.items()}}

    model, optimizer = two_layers(1)
    train(model, optimizer, range(1))
    twin, other = two_layers(-1)
    other.register_load_state_dict_pre_hook(by_name)
    other.register_load_state_dict_post_hook(lambda o: o.state[twin[1].weight]["momentum"].zero_())
    other.load_state_dict(optimizer.state_dict())
    assert torch.equal(other.state[twin[0].weight]["momentum"], optimizer.state[model[0].weight]["momentum"])
    assert not other.state[twin[1].weight]["momentum"].any()
    other.register_load_state_dict_pre_hook(lambda _, saved: torch.optim.SGD(twin.parameters()).state_dict())
    with pytest.raises(ValueError, match="format None, not SteepestDescent's 3"):
        other.load_state_dict(optimizer.state_dict())


def test_an_added_group_is_saved_and_loaded():
    def extended():
        model, late = nn.Linear(3, 2), nn.Parameter(torch.zeros(4))
        torch.manual_seed(0)
        nn.init.normal_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = SteepestDescent([{"params": list(model.parameters())[:1], "role": "linear"}], lr=0.1)
        optimizer.add_param_group({"params": [late], "role": "gain"})
        return [model.weight, late], optimizer

    def go(params, optimizer, steps):
        for step in steps:
            for seed, p in enumerate(params):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + seed))
            optimizer.step()

    params, optimizer = extended()
    go(params, optimizer, range(2))
    others, resumed = extended()
    resumed.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        for p, q in zip(params, others, strict=True):
            q.copy_(p)
    go(params, optimizer, range(2, 4))
    go(others, resumed, range(2, 4))
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))


def test_a_scheduler_resumes_with_the_optimizer():
    def start():
        model, optimizer = build(recipes.beyond_mup(), torch.float32)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def go(model, optimizer, scheduler, steps):
        for step in steps:
            train(model, optimizer, [step])
            scheduler.step()

    model, optimizer, scheduler = start()
    go(model, optimizer, scheduler, range(3))
    twin, other, schedule = start()
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(through(optimizer.state_dict(), "file"))
    schedule.load_state_dict(scheduler.state_dict())
    go(model, optimizer, scheduler, range(3, 6))
    go(twin, other, schedule, range(3, 6))
    assert same(model, twin)
    assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"] < 0.01
