"""Plans relative to pretrained weights."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.views import Fused, Interleaved, PerHead, Projections, Transposed


def pretrained():
    torch.manual_seed(0)
    layers = (nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8, bias=False), nn.Linear(8, 12, bias=False))
    model = nn.Sequential(nn.Embedding(12, 8), *layers)
    with torch.no_grad():
        model[1].weight *= 30
        model[1].bias.zero_()
        model[3].weight *= 5
    return model


def norms(model):
    plan = sf.Plan.of(model)
    return {
        name: float(plan[name].role.weight_geometry.norm(plan[name].role.view.split(p.detach().double())[0]).max())
        for name, p in model.named_parameters()
    }


def tune(model, plan, lr, steps=60):
    optimizer = sf.SteepestDescent(model, plan, lr=lr)
    highest = dict.fromkeys(plan, 0.0)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = -p.detach() + 0.1 * torch.randn(p.shape, generator=generator)  # outward
        optimizer.step()
        highest = {name: max(highest[name], norm) for name, norm in norms(model).items()}
    return highest, optimizer


def test_no_weight_grows_by_more_than_a_fifth():
    model = pretrained()
    start = norms(model)
    plan = sf.Plan.of(model, sf.recipes.beyond_mup(), stabiliser=sf.PostClip(1.2)).relative_to(model)
    highest, _ = tune(model, plan, lr=0.5)
    for name in plan:
        bound = 1.2 * (start[name] or 1.0)  # a zero bias has its natural unit
        assert highest[name] <= bound * 1.002, name
        assert highest[name] >= 0.9 * bound or name == "1.weight", name
    assert highest["1.weight"] > start["1.weight"]


def test_natural_units_would_cut_pretrained_weights_down():
    model = pretrained()
    before = norms(model)["1.weight"]
    tune(model, sf.Plan.of(model, stabiliser=sf.PostClip(1.2)), lr=1e-4, steps=1)
    assert norms(model)["1.weight"] <= 1.21 < before


def test_a_step_of_rate_zero_changes_nothing():
    model = pretrained()
    plan = sf.Plan.of(model, stabiliser=sf.PostClip(1.0)).relative_to(model)
    before = copy.deepcopy(model.state_dict())
    tune(model, plan, lr=0.0, steps=1)
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())


def test_the_hash_depends_on_the_norms_and_the_same_weights_resume():
    model = pretrained()
    plan = sf.Plan.of(model, stabiliser=sf.PostClip(1.2))
    relative = plan.relative_to(model)
    assert relative.hash == plan.relative_to(pretrained()).hash != plan.hash
    _, optimizer = tune(model, relative, lr=0.1, steps=3)
    other = pretrained()
    again = sf.SteepestDescent(other, plan.relative_to(other), lr=0.1)
    again.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="another plan"):
        sf.SteepestDescent(model, plan.relative_to(model), lr=0.1).load_state_dict(optimizer.state_dict())


def test_what_has_no_norm_is_refused():
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="weight is on the meta device"):
        sf.Plan.of(model).relative_to(model)
    model = nn.Linear(3, 3)
    model.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="weight is not finite"):
        sf.Plan.of(model).relative_to(model)
    with pytest.raises(ValueError, match="has shape"):
        sf.Plan.of(model).relative_to(nn.Linear(4, 3))


def test_lora_parameters_are_linear_and_b_starts_at_zero():
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(16, 16).requires_grad_(False)
            self.a, self.b = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
            nn.init.zeros_(self.b.weight)

        def forward(self, x):
            return self.base(x) + self.b(self.a(x))

    torch.manual_seed(0)
    model = Adapted()
    plan = sf.Plan.of(model, stabiliser=sf.PostClip(1.5)).relative_to(model)
    assert {name: placement.role.name for name, placement in plan.placements.items()} == {
        "base.weight": "linear",
        "base.bias": "bias",
        "a.weight": "linear",
        "b.weight": "linear",
    }
    optimizer = sf.SteepestDescent(model, plan, lr=0.05)
    x, frozen = torch.randn(32, 16), model.base.weight.clone()
    goal = x @ torch.randn(16, 16) / 4
    losses = []
    for _ in range(80):
        loss = (model(x) - goal).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert torch.equal(model.base.weight, frozen)
    assert 0 < norms(nn.Sequential(model.b))["0.weight"] <= 1.5 * 1.001


def decoder():
    torch.manual_seed(0)
    body = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    return nn.Sequential(nn.Embedding(24, 16), body, nn.Linear(16, 24, bias=False))


def fill(model, step):
    for i, p in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(100 * step + i)
        p.grad = torch.randn(p.shape, generator=generator) if p.requires_grad else None


@pytest.mark.parametrize("recipe", ["steady", "beyond_mup", "moonlight", "steady_soap"])
def test_progressive_unfreezing_trains_as_if_gradients_had_only_come_later(recipe):
    """Every four steps one layer more, from the head down; torch's optimizers do the same."""
    model, other = decoder(), decoder()
    layers = [model[2], model[1], model[0]]
    model.requires_grad_(False)
    model[2].requires_grad_(True)
    ours = sf.SteepestDescent(model, sf.Plan.of(model, getattr(sf.recipes, recipe)()), lr=0.02)
    theirs = sf.SteepestDescent(other, sf.Plan.of(other, getattr(sf.recipes, recipe)()), lr=0.02)
    for step in range(12):
        layers[step // 4].requires_grad_(True)
        fill(model, step)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            q.grad = None if p.grad is None else p.grad.clone()
        ours.step()
        theirs.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert not torch.equal(model[0].weight, decoder()[0].weight)


@pytest.mark.parametrize("saved_frozen", [True, False])
def test_a_state_saved_before_unfreezing_loads_after_it_and_the_other_way_round(saved_frozen):
    first, second = decoder(), decoder()
    for model, frozen in ((first, saved_frozen), (second, not saved_frozen)):
        model[1][1].requires_grad_(not frozen)
    saving, loading = sf.SteepestDescent(first, lr=0.02), sf.SteepestDescent(second, lr=0.02)
    for step in range(3):
        fill(first, step)
        saving.step()
    second.load_state_dict(first.state_dict())
    loading.load_state_dict(saving.state_dict())
    for model, optimizer in ((first, saving), (second, loading)):
        model.requires_grad_(True)
        for step in range(3, 6):
            fill(model, step)
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))


class Packed(nn.Module):
    """A layer with a matrix of its own that no rule places, and numbers that are no weights."""

    def __init__(self):
        super().__init__()
        self.mixing = nn.Parameter(torch.eye(5, 7), requires_grad=False)
        self.codes = nn.Parameter(torch.zeros(3, 3, dtype=torch.int8), requires_grad=False)
        self.linear = nn.Linear(7, 5)


def test_a_frozen_parameter_without_a_rule_is_left_out_until_it_has_a_gradient_then_named():
    model = nn.ModuleDict({"packed": Packed()})
    assert list(sf.Plan.of(model)) == ["packed.linear.weight", "packed.linear.bias"]
    optimizer = sf.SteepestDescent(model, lr=0.02)
    fill(model, 0)
    optimizer.step()
    model["packed"].mixing.requires_grad_(True)
    fill(model, 1)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"packed\.mixing has a gradient .*=\[\('packed\.mixing', 'linear'\)\]"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    plan = sf.Plan.of(model, overrides=[("packed.mixing", "linear")])
    sf.SteepestDescent(model, plan, lr=0.02).step()


def test_initial_values_leave_frozen_parameters_and_low_rank_training_may_become_full():
    model = decoder()
    model[1][1].requires_grad_(False)
    kept = model[1][1].weight.clone()
    plan = sf.Plan.of(model)
    plan.initialise_(model, seed=1)
    assert torch.equal(model[1][1].weight, kept)
    assert "frozen; weight of Linear(16, 32)" in str(plan)


THIRDS = ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11])
FUSED = {
    "sizes": (Projections((6, 2, 4)), ([0, 1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11]), (6, 2, 4)),
    "equal": (Fused(3), THIRDS, (4, 4, 4)),
    "transposed": (Transposed(Fused(3)), THIRDS, (4, 4, 4)),
    "interleaved": (Interleaved(2, 3), ([0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]), (4, 4, 4)),
    "heads": (PerHead(2, Fused(3)), THIRDS, (2, 2, 2)),
    "heads, values whole": (PerHead(2, Fused(3), values=False), THIRDS, (2, 2, 4)),
}


@pytest.mark.parametrize(("view", "rows", "heads"), FUSED.values(), ids=FUSED.keys())
def test_fused_projections_have_a_unit_each(view, rows, heads):
    """As separate ones: none grows by more than a fifth. What is told of the values alone stays theirs."""
    weight = torch.randn((12, 12), generator=torch.Generator().manual_seed(0))
    for own, factor in zip(rows, (30.0, 1.0, 0.1), strict=True):
        weight[own] *= factor
    bounds = [
        1.2 * max(float(sf.Spectral().norm(x)) for x in weight[own].split(head))
        for own, head in zip(rows, heads, strict=True)
    ]
    model = nn.Linear(12, 12, bias=False)
    model.weight.data.copy_(weight.T if isinstance(view, Transposed) else weight)
    role = replace(sf.recipes.beyond_mup().role("linear"), view=view, stabiliser=sf.PostClip(1.2))
    placement = sf.Placement(role, "given", (12, 12), parts=("query", "key", "value"))
    if len(placement.blocks) > 1:
        values = replace(role, lr_scale=sf.Constant(0.5))
        placement = replace(placement, by_block=(*[role] * (len(placement.blocks) - 1), values))
    plan = sf.Plan("own", {"weight": placement}).relative_to(model)
    found = plan["weight"]
    assert [scheme.bound for scheme in found.stabilisers] == pytest.approx(bounds, rel=1e-3)
    assert found.lr_scales == (1.0, 1.0, 0.5 if placement.by_block else 1.0)
    assert [row["name"] for row in plan.rows()] == ["weight[query]", "weight[key]", "weight[value]"]
    assert plan.relative_to(model).hash == plan.hash


def test_a_frozen_base_in_eight_bits_has_norms_and_bounds():
    class Eight(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.weight.float(), self.bias)

    base = Eight(4, 4)
    base.weight = nn.Parameter(base.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    model = nn.Sequential(base, nn.Linear(4, 4))
    plan = sf.Plan.of(model, stabiliser=sf.PostClip(1.2), head=())
    assert [*plan.relative_to(model)] == [*plan]
    assert "forward" in sf.measure(model, torch.ones(2, 4), plan=plan)["0"]
