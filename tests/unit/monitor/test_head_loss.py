"""Bounds on the loss behind an LM head enclose what inputs of RMS at most 1 reach, and see no shift of all rows."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.geometry import HeadRMS
from surefoot.monitor.layer_bounds import loss_bound, spread


def largest_loss(weight):
    """By gradient ascent over inputs of RMS 1, from every pair of rows: nearly the largest."""
    w, d = weight.double(), weight.shape[1]
    pairs = [(i, j) for i in range(len(w)) for j in range(len(w)) if i != j]
    x = torch.stack([w[j] - w[i] for i, j in pairs])
    labels = torch.tensor([i for i, _ in pairs])
    for _ in range(200):
        x = x / x.norm(dim=1, keepdim=True) * math.sqrt(d)
        loss, x = torch.log_softmax(x @ w.T, 1)[torch.arange(len(x)), labels].neg(), x.detach().requires_grad_()
        logits = x @ w.T
        (logits.logsumexp(1) - logits[torch.arange(len(x)), labels]).sum().backward()
        x = (x + 0.5 * x.grad * math.sqrt(d) / x.grad.norm(dim=1, keepdim=True)).detach()
    return float(loss.max())


@pytest.mark.parametrize("scale", [0.01, 1.0, 20.0])
@pytest.mark.parametrize("mean", [0.0, 3.0])
def test_the_bounds_enclose_the_largest_loss(scale, mean):
    weight = (torch.randn(7, 5, generator=torch.Generator().manual_seed(0)) + mean) * scale / 5
    reached = largest_loss(weight)
    farthest = math.sqrt(5) * float(torch.pdist(weight.double()).max())
    lowest, tight = max(math.log(7), farthest), math.log(7) + farthest  # of all pairs of rows, at a cost of V^2
    low, centred = loss_bound(weight)
    for below, above in ((low, centred), (lowest, tight)):
        assert below <= reached * (1 + 1e-6) <= above * (1 + 2e-6)
    assert low <= lowest * (1 + 1e-9)
    plain = math.log(7) + 2 * float(sf.HeadRMS().norm(weight))
    assert tight <= centred * (1 + 1e-9)
    assert centred <= 2 * tight
    assert mean == 0 or centred < plain


def test_the_optimizer_reports_them():
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11, bias=False))
    optimizer = sf.SteepestDescent(model, lr=0.1)
    report = optimizer.stability()
    head = report["1.weight"]
    assert (head["loss_forward_lower"], head["loss_forward_upper"]) == loss_bound(model[1].weight)
    assert head["loss_dependency_upper"] == 4 * float(spread(model[1].weight)) <= 4.001 * head["forward_upper"]
    assert head["loss_update_upper"] <= 2 * head["update_upper"]
    assert not any(key.startswith("loss") for key in report["0.weight"])


def losses(w: Tensor, x: Tensor) -> Tensor:
    """The loss of every input at every label, `(n, V)`."""
    return -torch.log_softmax(x @ w.T, 1)


def climbed(value, w: Tensor, steps: int = 60) -> float:
    """The largest value by ascent over inputs of RMS at most 1, from the differences of rows and from noise."""
    d = w.shape[1]
    x = torch.cat([(w[:, None] - w).reshape(-1, d), torch.randn(8, d, generator=seeded(), dtype=w.dtype)])
    best = -math.inf
    for _ in range(steps):
        x = (x * (math.sqrt(d) / x.norm(dim=1, keepdim=True).clamp_min(math.sqrt(d)))).detach().requires_grad_()
        values = value(x)
        best = max(best, float(values.detach().max()))
        (gradient,) = torch.autograd.grad(values.amax(1).sum(), x)
        x = x.detach() + math.sqrt(d) * gradient / gradient.norm(dim=1, keepdim=True).clamp_min(1e-12)
    return best


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


HEADS = {
    "normal": lambda w: w,
    "one row far from all others": lambda w: torch.cat([w[:1] * 50, w[1:]]),
    "two opposite rows": lambda w: torch.stack([w[0], -w[0]]),
    "all rows but one the same": lambda w: torch.cat([-w[:1], w[1:2].expand(6, -1)]),
    "all rows the same": lambda w: w[:1].expand(5, -1),
    "one class": lambda w: w[:1],
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("shift", [0.0, 10.0, 1e4])
def test_no_input_and_label_reach_more_than_the_dependency_and_update_bounds(name, shift):
    """In float64, by ascent over inputs and all labels: the definitions, and independent of the code."""
    w, step = (torch.randn(7, 4, generator=seeded(seed), dtype=torch.float64) for seed in (1, 2))
    w, step = HEADS[name](w), HEADS[name](step) * 0.3
    common = shift * torch.randn(4, generator=seeded(3), dtype=torch.float64)
    bound, update = 4 * float(spread(w + common)), 2 * float(spread(step + common))
    assert bound <= 8 * float(HeadRMS().norm(w)) + 1e-6  # whatever the shift
    high, low = climbed(lambda x: losses(w, x), w), -climbed(lambda x: -losses(w, x), w)
    assert high - low <= bound + 1e-6
    assert high <= loss_bound(w + common)[1] + 1e-6
    moved = climbed(lambda x: (losses(w + step, x) - losses(w, x)).abs(), step)
    assert moved <= update + 1e-6
    if name in ("normal", "two opposite rows"):
        assert bound <= 6 * (high - low)
        assert update <= 6 * moved


@pytest.mark.parametrize(
    "stabiliser",
    [sf.Free(), sf.WeightDecay(0.5), sf.contrib.IndependentDecay(0.05), sf.PostClip(2.0),
     sf.DecayedPostClip(0.5, sf.Constant(), 2.0)],
)  # fmt: skip
@pytest.mark.parametrize("shift", [0.0, 10.0])
@pytest.mark.parametrize("lr", [0.001, 0.1])
def test_a_shift_of_all_rows_changes_no_bound_of_the_loss(stabiliser, shift, lr):
    model = nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 11, bias=False))
    plan = sf.Plan.of(model, stabiliser=stabiliser)
    plan.initialise_(model, seed=0)
    optimizer = sf.SteepestDescent(model, plan, lr=lr)
    at_rest = optimizer.stability()["1.weight"]
    with torch.no_grad():
        model[1].weight += shift
    before, head = copy.deepcopy(model), optimizer.stability()["1.weight"]
    loose = (
        isinstance(stabiliser, sf.PostClip | sf.DecayedPostClip) and shift
    )  # its way back does not keep what rows have in common
    names = ["loss_forward_upper", "loss_dependency_upper"] + ["loss_update_upper"] * (not loose)
    assert all(head[name] == pytest.approx(at_rest[name], rel=2e-4, abs=2e-4) for name in names)
    torch.nn.functional.cross_entropy(model(torch.arange(11)), torch.arange(11).flip(0)).backward()
    optimizer.step()
    old, new = (m[1].weight.detach().double() for m in (before, model))
    moved = climbed(lambda x: (losses(new, x) - losses(old, x)).abs(), new - old)
    assert moved <= head["loss_update_upper"] * (1 + 1e-3)
    measured = sf.measure(model, torch.arange(11), before=before, plan=plan)["1"]
    assert measured["loss_dependency_bound"] == pytest.approx(4 * float(spread(new)))
    assert moved <= measured["loss_update_bound"] <= head["loss_update_upper"] * (1 + 1e-3)
