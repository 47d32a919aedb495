"""Learning rates: torch's schedulers, tensors as rates, and rates of zero."""

import dataclasses

import numpy as np
import pytest
import torch
from optim_helpers import STABILISERS, noise, small, stepped
from torch import nn
from torch.optim import lr_scheduler

import surefoot as sf
from comparisons import same_bits, train, weights
from surefoot import Plan, SteepestDescent

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (t + 1)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.5),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 2], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.25, 1.0, 2),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=5, cycle_momentum=False),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 5), lr_scheduler.ExponentialLR(o, 0.5)], [1]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.5)], o
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.01, anneal_epochs=2),
}


@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("name", [n for n in lr_scheduler.__all__ if n not in ("LRScheduler", "ReduceLROnPlateau")])
def test_every_scheduler_sets_the_step_size(name, tensor):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    gain, scale = model[1].weight, sf.Plan.of(model)["1.weight"].role.lr_scale((1, 4))
    optimizer = SteepestDescent(model, lr=torch.tensor(0.1) if tensor else 0.1)
    scheduler = SCHEDULERS[name](optimizer)
    rates = []
    for _ in range(4):
        rates.append({float(g["lr"]) for g in optimizer.param_groups})
        before = gain.detach().clone()
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert torch.allclose(before - gain.detach(), scale * torch.tensor(rates[-1].copy().pop()), atol=1e-6)
        scheduler.step()
    assert all(len(rate) == 1 for rate in rates)  # one number for all groups
    assert len(set.union(*rates)) > 1


def test_swa_schedule():
    optimizer = SteepestDescent(nn.LayerNorm(4), lr=0.1)
    scheduler = SCHEDULERS["SWALR"](optimizer)
    optimizer.step()
    for _ in range(2):
        scheduler.step()
    assert {g["lr"] for g in optimizer.param_groups} == {0.01}


def test_reduce_on_plateau():
    optimizer = SteepestDescent(nn.Linear(3, 2), lr=0.1)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for _ in range(3):
        optimizer.step()
        scheduler.step(1.0)
    assert {g["lr"] for g in optimizer.param_groups} == {0.025}


def test_learning_rate_as_a_tensor_takes_the_same_step():
    value, g = noise(6, 4), noise(6, 4, seed=1)
    expected = stepped("linear", value, g, g, lr=0.125)
    assert torch.equal(expected, stepped("linear", value, g, g, lr=torch.tensor(0.125)))


@pytest.mark.parametrize("stabiliser", STABILISERS, ids=repr)
def test_a_rate_may_be_a_tensor_of_one_entry(stabiliser):
    weights = []
    for lr in (0.1, torch.tensor(0.1), torch.tensor([0.1])):
        p = nn.Parameter(noise(6, 4))
        p.grad = noise(6, 4, seed=1)
        role = dataclasses.replace(sf.roles.by_name("linear"), stabiliser=stabiliser)
        SteepestDescent([{"params": [p], "role": role}], lr=lr).step()
        weights.append(p.detach())
    for w in weights[1:]:
        torch.testing.assert_close(w, weights[0])


def test_a_rate_of_two_entries_is_refused_as_by_torch():
    lr = torch.tensor([0.1, 0.2])
    with pytest.raises(ValueError, match="Tensor lr must be 1-element"):
        torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=lr)
    with pytest.raises(ValueError, match="Tensor lr must be 1-element"):
        SteepestDescent([{"params": [nn.Parameter(torch.ones(2))], "role": "bias"}], lr=lr)


@pytest.mark.parametrize("stabiliser", [sf.PostClip(0.5), sf.WeightDecay(2.0)], ids=repr)
@pytest.mark.parametrize(
    "lr",
    [torch.tensor(0.1, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)]
    + [torch.tensor(1, dtype=dtype) for dtype in (torch.int64, torch.int32, torch.uint8)]
    + [torch.tensor([0.1], dtype=torch.bfloat16), torch.tensor(0.1, requires_grad=True), np.float32(0.1)],
    ids=str,
)
def test_a_rate_of_any_dtype_steps_by_the_number_that_it_holds(lr, stabiliser):
    role = dataclasses.replace(sf.roles.by_name("linear"), stabiliser=stabiliser)
    gradients = [noise(6, 4, seed=seed) for seed in range(1, 5)]
    for dtype in (torch.float32, torch.float64):
        value, own = noise(6, 4).to(dtype), [g.to(dtype) for g in gradients]
        assert torch.equal(stepped(role, value, *own, lr=lr), stepped(role, value, *own, lr=lr.item()))


def test_each_group_has_a_tensor_of_its_own():
    """One that all shared would be lowered once a group by what goes through the groups."""
    lr = torch.tensor(0.5, dtype=torch.bfloat16)
    optimizer = SteepestDescent(nn.Linear(3, 2), lr=lr)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for loss in (1.0, 1.0):
        optimizer.step()
        schedule.step(loss)
    saved = optimizer.state_dict()
    saved["param_groups"] = [{**group, "lr": saved["param_groups"][0]["lr"]} for group in saved["param_groups"]]
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"] *= 2
    rates = [group["lr"] for group in optimizer.param_groups]
    assert [(float(rate), rate.dtype) for rate in rates] == [(0.5, lr.dtype), (0.25, lr.dtype)]
    assert (float(lr), float(optimizer.defaults["lr"])) == (0.5, 0.5)


@pytest.mark.parametrize("lr", [torch.tensor(True), torch.tensor(0.1 + 0j), torch.tensor(torch.nan)], ids=str)
def test_a_tensor_that_is_no_rate_is_refused(lr):
    with pytest.raises(ValueError, match="Invalid learning rate"):
        SteepestDescent(nn.Linear(3, 2), lr=lr)


@pytest.mark.parametrize("settings", [{"weight_decay": 0.1}, {"betas": (0.9, 0.95), "eps": 1e-8}])
def test_settings_of_another_optimizer_are_refused_with_their_place(settings):
    with pytest.raises(TypeError, match=rf"takes no {', '.join(settings)}: decay follows from run=.*stabiliser"):
        sf.SteepestDescent(torch.nn.Linear(2, 2), lr=0.1, **settings)


def test_groups_of_another_optimizer_without_roles_are_told_to_pass_the_model():
    """As transformers' Trainer makes them where it is given no model."""
    with pytest.raises(ValueError, match="pass the model instead, to have roles found"):
        SteepestDescent([{"params": [nn.Parameter(torch.ones(2, 2))], "weight_decay": 0.0}], lr=0.1)


def test_how_torchs_optimizers_are_to_loop_is_refused_with_its_own_remedy():
    with pytest.raises(TypeError, match="takes no foreach, fused: leave it out, steps are always batched"):
        SteepestDescent(nn.Linear(2, 2), lr=0.1, foreach=True, fused=True)


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ({"steps": 40, "tokens": 32}, "steps, tokens: a run's length is run=Run"),
        ({"stabiliser": sf.PostClip(2)}, r"stabiliser: pass it to the plan, .*Plan.of\(model, stabiliser="),
        ({"recipe": "muon", "head": ()}, r"head, recipe: pass it to the plan, .*Plan.of\(model, head="),
    ],
)
def test_what_a_plan_or_a_run_takes_is_refused_with_where_it_belongs(arguments, remedy):
    with pytest.raises(TypeError, match=f"takes no {remedy}"):
        SteepestDescent(nn.Linear(2, 2), lr=0.1, **arguments)


@pytest.mark.parametrize("lr", [torch.nan, torch.inf, -0.1, torch.tensor(torch.nan)])
@pytest.mark.parametrize("recipe", [sf.recipes.steady, sf.recipes.beyond_mup, sf.recipes.steady_bounded])
def test_a_rate_that_became_none_is_refused_before_anything_has_moved(lr, recipe):
    layer = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = SteepestDescent(layer, Plan.of(layer, recipe()), lr=0.1)
    layer(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    before = [p.detach().clone() for p in layer.parameters()]
    optimizer.param_groups[-1]["lr"] = lr
    with pytest.raises(ValueError, match=r"Invalid learning rate.*past its end"):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(layer.parameters(), before, strict=True))


def test_a_schedule_that_ends_below_zero_by_rounding_moves_nothing():
    layer = nn.Linear(3, 3)
    optimizer = SteepestDescent(layer, lr=0.1)
    layer(torch.ones(2, 3)).sum().backward()
    before = layer.weight.detach().clone()
    for group in optimizer.param_groups:
        group["lr"] = -1e-18
    optimizer.step()
    assert torch.equal(layer.weight, before)


def test_a_group_that_is_split_for_rates_of_its_own_resumes_again_and_again():
    """Rates by layer: a group's parameters go into two, whose lists a loop writes itself."""

    def build():
        model = small()
        optimizer = SteepestDescent(model, lr=0.1)
        group = next(group for group in optimizer.param_groups if group["role"] == "linear")
        later = {**group, "lr": 0.05, **{key: group[key][1:] for key in ("params", "param_names")}}
        optimizer.param_groups.append(later)
        group.update({key: group[key][:1] for key in ("params", "param_names")})
        return model, optimizer

    whole, optimizer = build()
    train(whole, optimizer, range(3))
    model, resumed = build()
    for step in range(3):
        train(model, resumed, range(step, step + 1))
        saved = model.state_dict(), resumed.state_dict()
        model, resumed = build()
        model.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
    assert same_bits(weights(whole), weights(model))
    assert resumed.param_groups[-1]["lr"] == 0.05
