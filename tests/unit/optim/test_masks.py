"""What a step leaves alone, bit for bit: rates of zero; zero, missing or non-finite gradients; absent rows, experts."""

import math

import pytest
import torch
from optim_helpers import RECIPES, ROLES, STABILISERS, all_recipes, backward, noise, one, small, stepped
from torch import nn

import surefoot as sf
from combinations import combinations
from comparisons import bits, same_bits, weights
from surefoot import Plan, SteepestDescent


def test_missing_gradient_leaves_weight_and_state():
    model = small()
    optimizer = SteepestDescent(model, lr=0.1)
    backward(model, 0)
    model.up.weight.grad = None
    before = weights(model)
    optimizer.step()
    after = weights(model)
    assert torch.equal(before["up.weight"], after["up.weight"])
    assert not torch.equal(before["down.weight"], after["down.weight"])
    assert not optimizer.state.get(model.up.weight)


@all_recipes
@pytest.mark.parametrize("zero", [0.0, torch.tensor(0.0)], ids=["float", "tensor"])
def test_zero_learning_rate_is_a_bit_exact_no_op(recipe, zero):
    model = small()
    optimizer = SteepestDescent(model, Plan.of(model, recipe), lr=zero)
    before = weights(model)
    for step in range(2):
        backward(model, step)
        optimizer.step()
    assert same_bits(before, weights(model))


@pytest.mark.parametrize("role", ROLES)
def test_the_sign_of_zero_survives_a_step_of_zero(role):
    minus = torch.full(ROLES[role], -0.0)
    for lr, size in ((0.0, 1.0), (0.1, math.nan)):
        assert torch.equal(bits(stepped(role, minus, noise(*ROLES[role]) * size, lr=lr)), bits(minus))


@combinations(
    lambda stabiliser, dtype: dtype == torch.float32 or isinstance(stabiliser, sf.PostClip),
    stabiliser=STABILISERS,
    dtype=[torch.float32, torch.bfloat16],
)
def test_zero_learning_rate_leaves_weights_outside_the_ball(stabiliser, dtype):
    model = small().to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(30)
    optimizer = SteepestDescent(model, Plan.of(model, stabiliser=stabiliser), lr=0.0)
    before = weights(model)
    backward(model, 0)
    optimizer.step()
    assert same_bits(before, weights(model))
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    optimizer.step()
    assert not torch.equal(before["up.weight"], model.up.weight)  # so it was the zero rate


@all_recipes
def test_zero_gradient_at_the_first_step_is_no_update(recipe):
    model = small()
    plan = Plan.of(model, recipe)
    optimizer = SteepestDescent(model, plan, lr=0.1)
    before = weights(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    after = weights(model)
    adams = {n: plan[n].role.stabiliser for n in plan if isinstance(plan[n].role.momentum, sf.Adam | sf.RowAdam)}
    decayed = {n for n in adams if isinstance(adams[n], sf.DecoupledWeightDecay)}  # AdamW's, without a gradient, too
    assert all(torch.equal(before[n], after[n]) != (n in decayed) for n in before)


@all_recipes
def test_the_step_by_which_distributed_checkpoint_makes_state_changes_nothing(recipe):
    """torch.distributed.checkpoint fills an empty optimizer by a step with lr = 0 and zero gradients."""
    model = small()
    with torch.no_grad():
        model.up.weight.mul_(30)
    optimizer = SteepestDescent(model, Plan.of(model, recipe, stabiliser=sf.PostClip(1.0)), lr=0.0)
    before = weights(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert same_bits(before, weights(model))
    assert all(torch.equal(p, before[n]) and optimizer.state[p] for n, p in model.named_parameters())


@combinations(recipe=RECIPES, bad=[math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_touches_its_parameter_only(recipe, bad):
    plain, hit = small(), small()
    optimizers = [SteepestDescent(m, Plan.of(m, recipe), lr=0.01) for m in (plain, hit)]
    victims = ("up.weight", "table.weight", "norm.weight", "conv.weight", "attention.in_proj_weight")
    for step in range(3):
        for model, optimizer in zip((plain, hit), optimizers, strict=True):
            for seed, p in enumerate(model.parameters()):
                p.grad = noise(*p.shape, seed=100 * step + seed)
            if model is hit and step == 1:
                before = weights(hit)
                state = {n: {k: v.clone() for k, v in optimizer.state[p].items()} for n, p in hit.named_parameters()}
                for name in victims:
                    hit.get_parameter(name).grad.view(-1)[-1] = bad
            optimizer.step()
        if step == 1:
            after, free = weights(hit), weights(plain)
            for name, p in hit.named_parameters():
                expected = before[name] if name in victims else free[name]
                assert torch.equal(bits(after[name]), bits(expected)), name
                if name in victims:
                    assert int(state[name].pop("skipped")) == 0
                    assert all(torch.equal(bits(v), bits(optimizers[1].state[p][k])) for k, v in state[name].items())
    assert optimizers[0].skipped() == {}
    assert optimizers[1].skipped() == dict.fromkeys(victims, 1)
    assert all(p.isfinite().all() for p in hit.parameters())
    assert not torch.equal(before["up.weight"], hit.up.weight)  # it moves again


def test_a_bad_gradient_on_the_first_step():
    w, optimizer = one("linear", noise(4, 4))
    w.grad = torch.full((4, 4), math.nan)
    before = w.detach().clone()
    optimizer.step()
    assert torch.equal(before, w.detach())
    assert not optimizer.state[w]["momentum"].any()
    w.grad = noise(4, 4, seed=1)
    optimizer.step()
    assert torch.equal(w.detach(), stepped("linear", before, w.grad))
    assert optimizer.skipped() == {"group0.0": 1}


def test_like_parameters_do_not_share_a_bad_gradient():
    ws = [nn.Parameter(noise(4, 4, seed=s)) for s in range(3)]
    optimizer = SteepestDescent([{"params": ws, "role": "linear"}], lr=0.1)
    before = [w.detach().clone() for w in ws]
    for seed, w in enumerate(ws):
        w.grad = noise(4, 4, seed=10 + seed)
    ws[1].grad[0, 0] = math.nan
    optimizer.step()
    assert [torch.equal(a, b) for a, b in zip(before, ws, strict=True)] == [False, True, False]
    assert optimizer.skipped() == {"group0.1": 1}


@pytest.mark.parametrize("role", ["embedding", "head"])
def test_absent_rows_keep_weight_and_momentum(role):
    w, optimizer = one(role, noise(6, 4))
    w.grad = noise(6, 4, seed=1)
    optimizer.step()
    rows, momentum = w.detach().clone(), optimizer.state[w]["momentum"].clone()
    for step in range(3):
        w.grad = torch.zeros(6, 4)
        w.grad[:2] = noise(2, 4, seed=step)
        optimizer.step()
    assert w.isfinite().all()
    assert torch.equal(bits(rows[2:]), bits(w[2:]))
    assert torch.equal(bits(momentum[2:]), bits(optimizer.state[w]["momentum"][2:]))
    assert not torch.isclose(rows[:2], w[:2]).all(-1).any()


def test_absent_rows_of_a_model():
    model = small()
    optimizer = SteepestDescent(model, Plan.of(model, sf.recipes.beyond_mup()), lr=0.1)
    before = weights(model)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    assert torch.equal(before["table.weight"][3:], model.table.weight[3:])
    assert not (before["table.weight"][:3] == model.table.weight[:3]).any()


def test_absent_experts_keep_weight_and_momentum():
    w, optimizer = one("experts", noise(3, 4, 4))
    w.grad = noise(3, 4, 4, seed=1)
    optimizer.step()
    before, momentum = w.detach().clone(), optimizer.state[w]["momentum"].clone()
    w.grad = noise(3, 4, 4, seed=2)
    w.grad[1] = 0
    optimizer.step()
    assert [torch.equal(a, b) for a, b in zip(before, w, strict=True)] == [False, True, False]
    assert torch.equal(momentum[1], optimizer.state[w]["momentum"][1])


def test_an_experts_norm_is_its_own():
    g = noise(3, 4, 5)
    together = stepped("experts", torch.zeros(3, 4, 5), g * torch.tensor([1.0, 1e3, 1e-3])[:, None, None])
    for i in range(3):
        assert torch.allclose(together[i], stepped("linear", torch.zeros(4, 5), g[i]), atol=1e-6)


def test_absent_rows_are_clipped_all_the_same():
    role = sf.Role("embedding", sf.RowRMS(), stabiliser=sf.PostClip(0.5))
    value = 3 * noise(6, 4)
    g = torch.zeros(6, 4)
    g[0] = 1
    rms = stepped(role, value, g).square().mean(-1).sqrt()
    assert (value.square().mean(-1).sqrt() > 0.5).all()
    assert (rms <= 0.5 + 1e-6).all()


@pytest.mark.parametrize("steps", [0, 1])
def test_a_group_that_is_taken_out_and_added_again_keeps_its_rule(steps):
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False))
    optimizer = SteepestDescent(model, Plan.of(model, head="2"), lr=0.1)
    for _ in range(steps):
        model(torch.arange(16)).square().sum().backward()
        optimizer.step()
    group = next(group for group in optimizer.param_groups if group["role"] == "embedding")
    plan = group["plan"]
    optimizer.param_groups.remove(group)
    optimizer.add_param_group(group)
    assert optimizer.param_groups[-1]["plan"] == plan
    model(torch.arange(16)).square().sum().backward()
    optimizer.step()
    assert "exp_avg" in optimizer.state[model[0].weight]


def test_a_group_that_comes_again_with_another_role_or_more_parameters_has_that_role():
    new, model = nn.Parameter(torch.eye(8)), nn.Linear(8, 8, bias=False)
    for change in ({"role": "head"}, {"params": [("weight", model.weight), ("new", new)]}):
        optimizer = SteepestDescent(model, Plan.of(model), lr=0.1)
        group = optimizer.param_groups.pop()
        optimizer.add_param_group({**group, **change})
        want = change.get("role", "linear")
        assert [optimizer._known[p][1].role.name for p in optimizer.param_groups[-1]["params"]] == [want] * len(
            optimizer.param_groups[-1]["params"]
        )
