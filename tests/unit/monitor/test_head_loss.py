"""Bounds on the loss behind an LM head enclose what inputs of RMS 1 reach."""

import math

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.monitor.head_loss import loss_bound


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
    for exact in (False, True):
        low, high = loss_bound(weight, exact)
        assert low <= reached * (1 + 1e-6) <= high * (1 + 2e-6)
    centred, tight = loss_bound(weight)[1], loss_bound(weight, exact=True)[1]
    plain = math.log(7) + 2 * float(sf.HeadRMS().norm(weight))
    assert tight <= centred * (1 + 1e-9)
    assert centred <= 2 * tight
    assert mean == 0 or centred < plain


def test_rows_are_compared_in_chunks(monkeypatch):
    weight = torch.randn(50, 6, generator=torch.Generator().manual_seed(1))
    whole = loss_bound(weight, exact=True)
    monkeypatch.setattr("surefoot.monitor.head_loss.CHUNK", 7)
    assert loss_bound(weight, exact=True) == pytest.approx(whole)


def test_the_optimizer_reports_them():
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11, bias=False))
    optimizer = sf.SteepestDescent(model, lr=0.1)
    report = optimizer.stability()
    head = report["1.weight"]
    assert (head["loss_forward_lower"], head["loss_forward_upper"]) == loss_bound(model[1].weight)
    assert head["loss_dependency_upper"] == 4 * head["forward_upper"]
    assert head["loss_update_upper"] == 2 * head["update_upper"]
    assert not any(key.startswith("loss") for key in report["0.weight"])
