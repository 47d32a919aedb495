"""A look-ahead along the mean of the steps, against the published loop of two sets of weights; directions in turn."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot import recipes


def normal(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of_a_matrix(geometry, w, lr, **group):
    """A parameter that starts as w, and its optimizer without momentum."""
    role = replace(recipes.beyond_mup().role("linear"), geometry=geometry, momentum=sf.Momentum(0.0), **group)
    p = nn.Parameter(w.clone())
    return p, sf.SteepestDescent([{"params": [p], "role": role}], lr=lr)


def test_it_is_the_published_loop_while_the_rate_stays():
    """`x <- A(x + a m)`, `m <- b m + (1 - b)(x_new - x)`; A a step of spectral descent on a quadratic."""
    ahead, memory, lr, target, start = 0.4, 0.8, 0.05, normal((5, 4), 1), normal((5, 4), 2)
    norm = sf.Spectral("svd")
    p, optimizer = of_a_matrix(sf.contrib.MeanLookahead(norm, ahead, memory), start, lr)
    x, mean = start.clone(), torch.zeros_like(start)
    for _ in range(30):
        looked = x + ahead * mean
        torch.testing.assert_close(p.detach(), looked, rtol=0, atol=1e-12)
        p.grad = (p.detach() - target) * torch.arange(1, 5)
        stepped = looked - lr * norm.direction((looked - target) * torch.arange(1, 5))
        mean, x = memory * mean + (1 - memory) * (stepped - x), stepped
        optimizer.step()
    assert mean.norm() > 0.1 * lr


def test_no_step_is_longer_than_its_bound_and_steps_that_agree_approach_it():
    norm, m = sf.Spectral("svd"), normal((1, 5, 4))
    looking = sf.contrib.MeanLookahead(norm, 0.6, 0.9)
    bound = looking.direction_norm_bound(norm, (5, 4))
    assert bound == pytest.approx(1 / 0.4, rel=2e-3)
    memory, lengths = looking.init_memory(m), []
    for t in range(300):
        d, memory = looking.take(m, m if t < 200 else normal((1, 5, 4), t), 1.0, memory)
        lengths.append(float(norm.norm(d)))
    assert max(lengths) <= bound
    assert max(lengths) >= 0.998 * bound
    assert min(lengths[250:]) < 0.7 * bound


def test_without_a_share_it_is_the_direction():
    norm, m = sf.Spectral("svd"), normal((2, 5, 4))
    d, _ = sf.contrib.MeanLookahead(norm, 0.0).take(m, m, 1.0, {"drift": torch.ones_like(m)})
    assert torch.equal(d, norm.direction(m))


def test_a_bound_on_the_weights_holds():
    """Whatever is looked ahead at, the stabiliser has the last word."""
    p, optimizer = of_a_matrix(sf.contrib.MeanLookahead(ahead=0.9), normal((5, 4)), 0.5, stabiliser=sf.PostClip(1.0))
    for t in range(20):
        p.grad = normal((5, 4), 3) + 0.1 * normal((5, 4), t)
        optimizer.step()
        assert float(sf.Spectral().norm(p.detach())) <= 1.0 + 1e-6


def test_directions_that_are_changed_in_turn():
    """The inner one first, with what each remembers; bounds multiply, and the norm stays the innermost one's."""
    norm, w = sf.Spectral("svd"), normal((1, 5, 4), 9)
    rows = sf.NormalisedRows(norm, 0.5)
    nested = sf.contrib.MeanLookahead(sf.contrib.UpdateFloor(sf.contrib.RadialBrake(rows, 0.25), 0.5), 0.3, 0.5)
    assert nested.plain == norm
    together, memory, drift = nested.init_memory(w), rows.init_memory(w), torch.zeros_like(w)
    assert set(together) == {"row_mean", "drift"}
    for t in range(4):
        m = normal((1, 5, 4), t)
        d, together = nested.take(w, m, 1.0, together)
        even, memory = rows.take(w, m, 1.0, memory)
        outward = -(even * w).sum().clamp_max(0)
        braked = even + 0.75 * outward / w.square().sum() * w
        wanted = braked * max(1.0, 0.5 * float(norm.norm(w)) / float(norm.norm(braked)))
        drift = 0.5 * drift + 0.5 * (wanted + 0.3 * drift)
        torch.testing.assert_close(d, wanted + 0.3 * drift, rtol=1e-9, atol=1e-9)
    bounds = [x.direction_norm_bound(norm, (5, 4)) for x in (sf.contrib.MeanLookahead(rows, 0.3), rows)]
    assert bounds[0] == pytest.approx(bounds[1] / 0.7, rel=1e-4)


@pytest.mark.parametrize("fractions", [(1.0, 0.5), (0.5, 1.0), (-0.1, 0.5)])
def test_fractions_that_mean_nothing_are_refused(fractions):
    with pytest.raises(ValueError, match="must lie in"):
        sf.contrib.MeanLookahead(sf.Spectral(), *fractions)
