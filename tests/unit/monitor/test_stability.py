"""`optimizer.stability()`: true bounds, numbers by block, and no effect on the training."""

import copy
import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import surefoot as sf
from combinations import combinations
from surefoot.momentum import Adam
from surefoot.monitor.weights import MAIN, worst
from surefoot.optim.measuring import of_weights

SIDES = ("lower", "upper")


class Net(nn.Module):
    """A layer of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 12)
        self.norm = nn.LayerNorm(12)
        self.mix = nn.Conv1d(12, 8, 3, groups=2)
        self.experts = nn.Parameter(torch.zeros(3, 20, 8))
        self.up = nn.Linear(20, 40)
        self.out = nn.Linear(40, 11, bias=False)

    def forward(self, tokens):
        x = self.mix(self.norm(self.table(tokens)).mT).mT
        x = torch.einsum("bsd,eod->bso", x, self.experts)
        return self.out(self.up(x).relu())


def build(stabiliser, dtype=torch.float32):
    model = Net().to(dtype)
    plan = sf.Plan.of(model, stabiliser=stabiliser, overrides=[("experts", "experts")], head="out")
    plan.initialise_(model, seed=1)
    return model, plan, sf.SteepestDescent(model, plan, lr=0.1)


def train(model, optimizer, steps):
    for step in steps:
        tokens = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens[:, :7].flatten()).backward()
        optimizer.step()


def truth(p, placement):
    """The norm of each block, in float64 by an SVD where it is spectral."""
    return placement.role.weight_geometry.norm(placement.role.view.split(p.detach().double())[0])


STABILISERS = [
    sf.Free(),
    sf.WeightDecay(0.5),
    sf.PostClip(2.0),
    sf.PostClip(1.2, period=1),
    sf.PreDecay(0.5),
    sf.StreamingPostClip(2.0, 3),
    sf.Normalise(1.5),
]


@combinations(
    lambda stabiliser, dtype: dtype == torch.float32 or stabiliser == sf.PostClip(2.0),
    stabiliser=STABILISERS,
    dtype=[torch.float32, torch.bfloat16],
)
def test_the_bounds_enclose_the_norm_at_every_step(stabiliser, dtype):
    model, plan, optimizer = build(stabiliser, dtype)
    for step in range(6):
        report = optimizer.stability()
        for name, p in model.named_parameters():
            norm = float(truth(p, plan[name]).max())
            assert report[name]["forward_lower"] <= norm * (1 + 1e-5) + 1e-7, name
            assert report[name]["forward_upper"] >= norm * (1 - 1e-6), name
            assert report[name]["forward_lower"] >= 0.97 * norm, name
        train(model, optimizer, [step])


def test_under_post_clip_the_upper_bound_is_the_running_one():
    model, plan, optimizer = build(sf.PostClip(2.0))
    train(model, optimizer, range(40))
    for name, numbers in optimizer.stability().items():
        placement = plan[name.partition("[")[0]]
        assert numbers["forward_upper"] <= 2.0 * placement.role.radius_unit(placement.blocks[0]) * 1.001, name


def test_a_write_from_outside_is_reported():
    model, _, optimizer = build(sf.PostClip(2.0))
    train(model, optimizer, range(3))
    model.up.weight.data.mul_(100)
    numbers = optimizer.stability()["up.weight"]
    assert numbers["forward_upper"] >= numbers["forward_lower"] > 50


def test_every_block_is_reported():
    model, plan, optimizer = build(sf.Free())
    with torch.no_grad():
        model.experts[1] *= 3
    report = optimizer.stability()
    norms = truth(model.experts, plan["experts"])
    for i, norm in enumerate(norms.tolist()):
        assert report[f"experts[{i}]"]["forward_lower"] == pytest.approx(norm, rel=0.03)
    assert report["experts"]["forward_lower"] == report["experts[1]"]["forward_lower"]
    assert {"mix.weight[0]", "mix.weight[1]"} <= report.keys()
    assert "up.weight[0]" not in report


def test_the_share_of_its_bound_that_a_norm_has_and_the_worst_of_all():
    model, plan, optimizer = build(sf.PostClip(1.2))
    with torch.no_grad():
        model.experts[1] *= 3
    report = optimizer.stability()
    for name, numbers in report.items():
        (bound,) = {stabiliser.bound for stabiliser in plan[name.partition("[")[0]].stabilisers}
        assert numbers["of_bound"] == pytest.approx(numbers["forward_lower"] / bound)
    line = worst(report)
    assert line["stability/of_bound"] == report["experts[1]"]["of_bound"] > 1
    assert line["stability/update_upper"] == max(numbers["update_upper"] for numbers in report.values())
    assert line.keys() == {f"stability/{name}" for name in MAIN}
    assert worst(build(sf.Free())[2].stability())["stability/of_bound"] == 0.0


@pytest.mark.parametrize("name", ["up.weight", "table.weight", "out.weight", "mix.weight"])
def test_the_bound_of_a_share_is_that_of_the_plan(name):
    """Also under decay, where it depends on how long a step can be."""
    model = Net()
    plan = sf.Plan.of(model, overrides=[("experts", "experts")], head="out")
    numbers = sf.SteepestDescent(model, plan, lr=0.1).stability()[name]
    bound = float(re.search(r"max\(initial, ([\d.]+)\)", plan[name].promise)[1])
    assert numbers["of_bound"] == pytest.approx(numbers["forward_lower"] / bound, rel=1e-3)


def test_a_bound_beside_decay_is_what_a_plan_promises_and_a_share_is_of():
    """And not what the decay alone would lead to."""
    model = Net()
    plan = sf.Plan.of(model, sf.recipes.steady_bounded(), overrides=[("experts", "experts")], head="out")
    report = sf.SteepestDescent(model, plan, lr=0.1).stability()
    for name, placement in plan.placements.items():
        (bound,) = {stabiliser.bound for stabiliser in placement.stabilisers}
        assert placement.promise.startswith(f"norm <= {bound:.4g} at every step")
        assert report[name]["of_bound"] == pytest.approx(report[name]["forward_lower"] / bound)


def test_dependency_and_update_follow_the_definitions():
    model, plan, optimizer = build(sf.Free())
    report = optimizer.stability()
    table = model.table.weight.detach().double()
    apart = max(float((a - b).square().mean().sqrt()) for a in table for b in table)
    assert report["table.weight"]["dependency_lower"] <= apart <= report["table.weight"]["dependency_upper"]
    assert report["table.weight"]["dependency_lower"] > 0.5 * apart
    for name in ("up.weight", "out.weight", "norm.weight"):
        for side in SIDES:
            assert report[name][f"dependency_{side}"] == report[name][f"forward_{side}"]
    assert report["up.bias"]["dependency_upper"] == 0
    before = copy.deepcopy(model)
    train(model, optimizer, [0])
    with torch.no_grad():
        for (name, p), q in zip(model.named_parameters(), before.parameters(), strict=True):
            moved = float(truth(p - q, plan[name]).max())
            assert report[name]["update_lower"] <= moved <= report[name]["update_upper"] * 1.001, name
            assert moved > 0.5 * report[name]["update_upper"], name


@pytest.mark.parametrize("stabiliser", [sf.Free(), sf.WeightDecay(0.5), sf.PostClip(1.2)], ids=repr)
def test_what_a_step_changed_is_measured_and_below_what_was_reported(stabiliser):
    model, plan, optimizer = build(stabiliser)
    for step in range(5):
        bound = optimizer.stability()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        train(model, optimizer, [step])
        for name, numbers in optimizer.stability(before).items():
            if name in before:
                true = float(truth(model.get_parameter(name) - before[name], plan[name]).max())
                assert 0.95 * true <= numbers["update_measured"] <= true * (1 + 1e-5)
                assert true <= 1.01 * bound[name]["update_upper"]
            assert ("update_measured" in numbers) == (name in before)


@pytest.mark.parametrize("stabiliser", STABILISERS, ids=repr)
def test_a_report_changes_nothing(stabiliser):
    reported, silent = build(stabiliser), build(stabiliser)
    for step in range(5):
        reported[2].stability()
        for model, _, optimizer in (reported, silent):
            train(model, optimizer, [step])
    for p, q in zip(reported[0].parameters(), silent[0].parameters(), strict=True):
        assert torch.equal(p, q)
    assert reported[2].state_dict().keys() == silent[2].state_dict().keys()
    for mine, theirs in zip(reported[2].state.values(), silent[2].state.values(), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_weights_before_go_by_plain_names_and_must_be_the_parameters():
    model = torch.compile(nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)), backend="eager")
    optimizer = sf.SteepestDescent(model, lr=0.1)
    found = optimizer.stability({name: torch.zeros_like(x) for name, x in model._orig_mod.state_dict().items()})
    assert all("update_measured" in numbers for numbers in found.values())
    with pytest.raises(ValueError, match="no parameter of this optimizer, only wrong"):
        optimizer.stability({"wrong": torch.ones(4, 4)})
    with pytest.raises(
        ValueError, match=r"before has _orig_mod.0.weight with shape \(4,\), the parameter has \(4, 4\)"
    ):
        optimizer.stability({"0.weight": torch.ones(4)})


def test_reports_of_what_has_no_entries_or_took_no_step():
    model = nn.Linear(2, 3, bias=False)
    model.weight = nn.Parameter(torch.zeros(3, 0))
    optimizer = sf.SteepestDescent(model, sf.Plan.of(model, stabiliser=sf.PostClip(2.0)), lr=0.1)
    assert not optimizer.state[model.weight]  # an empty entry, by looking
    assert optimizer.skipped() == {}
    before = optimizer.stability()
    model.weight.grad = torch.zeros(3, 0)
    optimizer.step()
    assert optimizer.stability() == before == {"weight": dict.fromkeys(before["weight"], 0.0)}


def test_a_stack_of_no_matrices_has_no_number_at_all():
    model = nn.Linear(2, 3)
    model.experts = nn.Parameter(torch.empty(0, 3, 2))
    plan, before = sf.Plan.of(model, overrides=[("experts", "experts")]), dict(model.named_parameters())
    assert sf.SteepestDescent(model, plan, lr=0.1).stability(before)["experts"] == {}
    assert of_weights(model, plan, before)["experts"] == {}


def test_the_weights_of_any_optimizer_have_the_numbers_that_a_plan_gives_them():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    before = copy.deepcopy(dict(model.named_parameters()))
    optimizer = sf.SteepestDescent(model, lr=0.1)
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    numbers, own = of_weights(model, sf.Plan.of(model), before), optimizer.stability(before)
    for name in before:
        kept = [key for key in own[name] if key not in ("update_lower", "update_upper")]
        assert {key: numbers[name][key] for key in kept} == pytest.approx({key: own[name][key] for key in kept})
        assert numbers[name]["update_measured"] > 0 == numbers[name]["update_upper"]


def test_parts_that_keep_adamw_have_a_bound_on_their_update_unless_their_betas_have_none():
    model = Net()
    plan = sf.Plan.of(model, sf.recipes.muon(), overrides=[("experts", "experts")], head="out")
    report = sf.SteepestDescent(model, plan, lr=0.1).stability()
    assert all(0 < report[name]["update_upper"] < math.inf for name in plan)
    betas = replace(plan["out.weight"].role, momentum=Adam(0.9, 0.8))
    optimizer = sf.SteepestDescent([{"params": [model.out.weight], "role": betas}], lr=0.1)
    assert optimizer.stability()["group0.0"]["update_upper"] == math.inf


@pytest.mark.parametrize("stabiliser", [sf.Free(), sf.PostClip(2.0)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_has_no_norm_and_the_others_have_theirs(stabiliser, value):
    model, _, optimizer = build(stabiliser)
    train(model, optimizer, range(2))
    before = optimizer.stability()
    with torch.no_grad():
        model.up.weight[0, 0] = value
    assert optimizer.stability({"up.weight": torch.zeros(40, 20)})["up.weight"]["update_measured"] == math.inf
    after = optimizer.stability()
    assert after["up.weight"]["forward_lower"] == after["up.weight"]["forward_upper"] == math.inf
    assert after["table.weight"] == pytest.approx(before["table.weight"])


@pytest.mark.parametrize("stabiliser", [sf.Free(), sf.PostClip(1.0)], ids=repr)
def test_the_default_device_of_torch_does_not_matter(stabiliser):
    """`torch.set_default_device("cuda")` and a generator of the CPU do not go together, nor numbers of both."""
    (model, _, optimizer), (same, _, other) = build(stabiliser), build(stabiliser)
    for p, q in zip(model.parameters(), same.parameters(), strict=True):
        p.grad = q.grad = torch.randn_like(p)
    other.step()
    with torch.device("meta"):  # stands for an accelerator
        optimizer.step()
        elsewhere = optimizer.stability()
    assert all(map(torch.equal, model.parameters(), same.parameters()))
    assert elsewhere == other.stability()
