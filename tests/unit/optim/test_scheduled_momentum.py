"""Momentum that follows the steps: the numbers of a loop in numpy, its count, and what it takes."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from optim_helpers import ROLES, noise, one

import surefoot as sf
from surefoot.roles import NATURAL

POINTS = ((2, sf.Momentum(0.5)), (4, sf.Momentum(0.9, 0.6)), (6, sf.Momentum(0.8, 0.8)))
BETAS, AHEAD = (0.5, 0.9, 0.8), (0.5, 0.6, 0.8)


def averages(gradients):
    """Momentum and look-ahead after each gradient."""
    m = 0
    for t, g in enumerate(gradients):
        beta, ahead = (np.interp(t, (2, 4, 6), values) for values in (BETAS, AHEAD))
        look = ahead * m + (1 - ahead) * g
        m = beta * m + (1 - beta) * g
        yield m, look


@pytest.mark.parametrize("role", ROLES)
def test_it_is_the_loop_whatever_the_role(role):
    rule = replace(NATURAL[role], momentum=sf.contrib.ScheduledMomentum(POINTS))
    w, optimizer = one(rule, noise(*ROLES[role]))
    gradients = [noise(*ROLES[role], seed=seed) for seed in range(9)]
    for g, (m, _) in zip(gradients, averages([g.double().numpy() for g in gradients]), strict=True):
        w.grad = g
        optimizer.step()
        torch.testing.assert_close(optimizer.state[w]["momentum"].double(), torch.as_tensor(m), rtol=0, atol=1e-6)


def test_a_step_is_along_the_look_ahead():
    role = replace(NATURAL["bias"], momentum=sf.contrib.ScheduledMomentum(POINTS))
    w, optimizer = one(role, torch.zeros(4), lr=1.0)
    gradients = [noise(4, seed=seed) for seed in range(9)]
    for g, (_, look) in zip(gradients, averages([g.double().numpy() for g in gradients]), strict=True):
        before, w.grad = w.detach().clone(), g
        optimizer.step()
        wanted = torch.from_numpy(look / np.sqrt(np.mean(look**2))).float()
        torch.testing.assert_close(before - w.detach(), wanted, rtol=0, atol=2e-6)


def test_one_point_is_momentum():
    gradients = [noise(5, 3, seed=seed) for seed in range(4)]
    ended = []
    for momentum in (sf.Momentum(0.9, 0.5), sf.contrib.ScheduledMomentum(((3, sf.Momentum(0.9, 0.5)),))):
        w, optimizer = one(replace(NATURAL["linear"], momentum=momentum), noise(5, 3, seed=9))
        for g in gradients:
            w.grad = g
            optimizer.step()
        ended.append(w.detach().clone())
    torch.testing.assert_close(*ended, rtol=0, atol=1e-6)


def test_steps_that_are_sat_out_count_and_change_nothing_else():
    w, optimizer = one(replace(NATURAL["linear"], momentum=sf.contrib.ScheduledMomentum(POINTS)), noise(5, 3))
    for g in (noise(5, 3, seed=1), torch.zeros(5, 3), torch.full((5, 3), torch.nan), None):
        before = w.detach().clone(), copy.deepcopy(optimizer.state[w])
        w.grad = g
        optimizer.step()
        if before[1] and (g is None or not g.any() or g.isnan().all()):
            assert torch.equal(w, before[0])
            assert torch.equal(optimizer.state[w]["momentum"], before[1]["momentum"])
    assert optimizer.state[w]["step"].item() == 3  # without a gradient there is no step
    assert optimizer.skipped() == {"group0.0": 1}


def test_the_bound_on_a_step_is_that_of_momentum():
    for role in NATURAL.values():
        scheduled = replace(role, momentum=sf.contrib.ScheduledMomentum(POINTS))
        shape = (1, 6, 4) if role.geometry.ndim == 2 else (1, 6)
        assert scheduled.step_norm_bound(shape) == role.step_norm_bound(shape) < 1.01


@pytest.mark.parametrize("points", [(), ((3, sf.Momentum()), (3, sf.Momentum())), ((-1, sf.Momentum()),)], ids=str)
def test_points_that_mean_nothing_are_refused(points):
    with pytest.raises(ValueError, match="ascending steps"):
        sf.contrib.ScheduledMomentum(points)
