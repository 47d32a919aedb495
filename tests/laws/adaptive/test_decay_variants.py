"""Cautious and independent decay, written out; problems that rest; a schedule."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import surefoot as sf
from comparisons import advanced
from surefoot import contrib


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("geometry", [sf.MaxNorm(), sf.RMS()])
@pytest.mark.parametrize("eta", [0.1, 3.0])
def test_cautious_decay_is_of_the_entries_that_the_step_shrinks(geometry, eta):
    w, m = normal(4, 50), normal(4, 50, seed=1)
    d = geometry.direction(m)
    moved, _ = advanced(contrib.CautiousDecay(0.5), w, m, eta, geometry)
    for before, after, step in zip(w.flatten(), moved.flatten(), d.flatten(), strict=True):
        kept = 1 - min(1, 0.5 * eta) if before * step >= 0 else 1.0
        assert float(after) == pytest.approx(float(kept * before - eta * step), abs=1e-12)


def test_independent_decay_takes_the_same_part_at_every_rate():
    p = nn.Parameter(normal(3, 8))
    role = sf.Role("table", sf.RowRMS(), stabiliser=contrib.IndependentDecay(0.1), momentum=sf.Momentum(0.0))
    optimizer = sf.SteepestDescent([{"params": [("p", p)], "role": role}], lr=1.0)
    for lr in (1.0, 0.01, 0.0):
        before, p.grad = p.detach().clone(), normal(3, 8, seed=2)
        p.grad[1] = 0
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        g = p.grad / p.grad.square().mean(1, keepdim=True).sqrt()
        expected = 0.9 * before - lr * g if lr else before
        torch.testing.assert_close(p.detach()[[0, 2]], expected[[0, 2]], rtol=0, atol=1e-12)
        assert torch.equal(p.detach()[1], before[1])  # a row without gradient rests


def test_rates_must_make_sense():
    for scheme, rate in (
        (contrib.CautiousDecay, 0.0),
        (contrib.IndependentDecay, 0.0),
        (contrib.IndependentDecay, 1.5),
    ):
        with pytest.raises(ValueError, match=scheme.__name__):
            scheme(rate)
    assert contrib.IndependentDecay(0.5).describe("norm", float("inf")).endswith("steps of unknown norm")


class Counted(sf.Free):
    """A scheme of one's own, that returns what it keeps and nothing else."""

    def init_state(self, w, geometry, ball):
        return {"moves": w.new_zeros(w.shape[:1])}

    def move(self, w, d, eta, ball, cache=None, longest=None):
        assert cache.keys() == {"moves"}
        return w - eta * d, {"moves": cache["moves"] + 1}


def test_what_a_direction_remembers_is_no_concern_of_the_scheme():
    role = replace(sf.roles.NATURAL["linear"], geometry=sf.geometry.adaptive.NormalisedRows(), stabiliser=Counted())
    w = torch.nn.Parameter(normal(4, 6))
    optimizer = sf.SteepestDescent([{"params": [w], "role": role}], lr=0.1)
    for step in range(3):
        w.grad = normal(4, 6, seed=step)
        optimizer.step()
    assert optimizer.state[w]["moves"].tolist() == [3]
    assert float(optimizer.state[w]["row_mean"].min()) > 0
