"""Saving and resuming: bit for bit, in the dtypes that were saved, and only under the same plan."""

import copy
import dataclasses
import io
import pickle

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot import Plan, SteepestDescent, recipes

RECIPES = [
    recipes.beyond_mup(),
    recipes.moga_row(1.5),
    recipes.muon(),
    recipes.lion(),
    recipes.sign_sgd(),
    recipes.hyperball(),
]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


class Model(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1, groups=2)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 11)
        Plan.of(self).initialise_(self)
        self.to(dtype)


def build(recipe, dtype, **options):
    model = Model(dtype)
    return model, SteepestDescent(model, Plan.of(model, recipe, **options), lr=0.01)


def train(model, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def through(value, way):
    if way == "memory":
        return copy.deepcopy(value)
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def equal(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def assert_same_state(a, b):
    for ours, theirs in zip(a.state_dict()["state"].values(), b.state_dict()["state"].values(), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert value.dtype == theirs[name].dtype, name
            assert torch.equal(value, theirs[name]), name


@DTYPES
@pytest.mark.parametrize("way", ["memory", "weights_only file"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_resuming_from_a_state_dict_is_bit_for_bit(recipe, way, dtype):
    whole, optimizer = build(recipe, dtype)
    train(whole, optimizer, range(3))
    saved_model, saved = through(whole.state_dict(), way), through(optimizer.state_dict(), way)
    train(whole, optimizer, range(3, 6))
    part, resumed = build(recipe, dtype)
    part.load_state_dict(saved_model)
    resumed.load_state_dict(saved)
    assert not equal(whole, part)
    train(part, resumed, range(3, 6))
    assert equal(whole, part)
    assert_same_state(optimizer, resumed)


@DTYPES
@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_copies_go_on_alike_and_apart(recipe, way, dtype):
    model, optimizer = build(recipe, dtype, stabiliser=sf.PostClip(1.0))
    train(model, optimizer, range(2))
    twin, other = way((model, optimizer))
    before = copy.deepcopy(model)
    train(twin, other, range(2, 4))
    assert equal(model, before)
    assert not equal(model, twin)
    train(model, optimizer, range(2, 4))
    assert equal(model, twin)
    assert_same_state(optimizer, other)
    assert other.stability() == optimizer.stability()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_state_of_bfloat16_parameters_stays_float32_after_loading(recipe):
    """torch's own load_state_dict casts it to the parameter's dtype."""
    model, optimizer = build(recipe, torch.bfloat16)
    train(model, optimizer, range(2))
    fresh = build(recipe, torch.bfloat16)[1]
    fresh.load_state_dict(optimizer.state_dict())
    assert {state["skipped"].dtype for state in fresh.state.values()} == {torch.int32}
    floats = {t.dtype for state in fresh.state.values() for name, t in state.items() if name != "skipped"}
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


def test_counts_of_skipped_steps_survive():
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


def test_fresh_state_can_be_saved_and_loaded():
    model, optimizer = build(recipes.beyond_mup(), torch.float32)
    optimizer.load_state_dict(build(recipes.beyond_mup(), torch.float32)[1].state_dict())
    train(model, optimizer, range(2))
    twin, other = build(recipes.beyond_mup(), torch.float32)
    train(twin, other, range(2))
    assert equal(model, twin)


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
    target = Model()
    other = SteepestDescent(target, Plan.of(target, **options), lr=0.5)
    with pytest.raises(ValueError, match=r"parameter group \d.*another plan") as error:
        other.load_state_dict(optimizer.state_dict())
    assert "recipe and overrides" in str(error.value)
    assert not other.state
    assert {g["lr"] for g in other.param_groups} == {0.5}


def test_a_checkpoint_of_the_first_format_is_refused_with_the_remedy():
    model, optimizer = build(recipes.beyond_mup(), torch.float32)
    train(model, optimizer, range(1))
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group["format"], group["plan"] = 1, "0123456789abcdef"
    with pytest.raises(ValueError, match=r"format 2 but 1: continue it with the version of surefoot that saved it, or"):
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
    with pytest.raises(ValueError, match="not SteepestDescent's format"):
        optimizer.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())


def test_a_checkpoint_with_other_groups_is_refused_as_torch_does():
    optimizer = build(recipes.beyond_mup(), torch.float32)[1]
    single = SteepestDescent(nn.Embedding(11, 8), Plan.of(nn.Embedding(11, 8), head=()), lr=0.1)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(single.state_dict())


def test_a_renamed_model_may_load_the_checkpoint():
    model, optimizer = build(recipes.beyond_mup(), torch.float32)
    train(model, optimizer, range(2))
    wrapped = nn.ModuleDict({"module": Model()})
    other = SteepestDescent(wrapped, lr=0.01)
    wrapped["module"].load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    train(model, optimizer, range(2, 4))
    train(wrapped, other, range(2, 4))
    assert equal(model, wrapped)


def test_an_added_group_survives():
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
    assert equal(model, twin)
    assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"] < 0.01
