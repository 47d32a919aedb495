"""What a step can change: bounds on directions in any norm, on a clip's way back, on every scheme's next step."""

import functools
import math

import numpy as np
import pytest
import torch

import surefoot as sf
from combinations import combinations
from surefoot import recipes
from surefoot.experiment.data.sources import load
from surefoot.experiment.training import run as training_run
from surefoot.experiment.training.config import TrainConfig
from surefoot.geometry import RMS, Frobenius, HeadRMS, MaxNorm, MeanOperator, RowMean, RowRMS, Spectral
from surefoot.geometry.base import ChangeBounds
from surefoot.geometry.change_bounds import Sizes, clipped_change
from surefoot.momentum import Adam

from .roles import ALIKE, PULLS, ROLES, SCHEMES, Run

MATRICES = (
    Spectral(),
    Spectral("newton_schulz"),
    RowRMS(),
    RowMean(1.5),
    RowMean(3.0),
    RowMean(math.inf),
    HeadRMS(),
    MeanOperator(1.0, math.inf),
    MeanOperator(1.5, math.inf),
    MeanOperator(3.0, math.inf),
    MeanOperator(1.0, 1.0),
    MeanOperator(1.0, 2.0),
    MeanOperator(1.0, 3.0),
    Frobenius(),
)
VECTORS = (MaxNorm(), RMS())
SHAPES = ((6, 4), (4, 24), (32, 8), (1, 5), (5, 1))


def gradients(shape):
    """Dense, heavy-tailed, of one entry, of rank one, of equal entries."""
    for seed in range(4):
        g = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        yield from (g, g**9, g.sign())
        if len(shape) > 1:
            yield g[:, :1] * g[:1]
            yield torch.zeros(shape).index_fill_(1, torch.tensor(0), 1.0)
            yield torch.zeros(shape).index_put_((torch.tensor(0), torch.tensor(0)), torch.tensor(1.0))
    yield torch.ones(shape)


PAIRS = [(step, weight) for family in (MATRICES, VECTORS) for step in family for weight in family]


@functools.cache
def directions(step, shape):
    return [step.direction(g).double() for g in gradients(shape)]


@pytest.mark.parametrize(("step", "weight"), PAIRS, ids=repr)
def test_no_direction_is_longer_than_its_bound_in_any_norm(step, weight):
    for shape in SHAPES if step.ndim > 1 else ((7,), (1,)):
        bound = ChangeBounds.of(step).direction_norm_bound(weight, shape)
        assert 0 < bound < math.inf
        longest = max(float(weight.norm(d)) for d in directions(step, shape))
        assert longest <= bound
        if step == weight and "newton" not in repr(step):
            assert longest >= 0.98 * bound, "loose in its own norm"


@pytest.mark.parametrize(
    ("step", "weight", "share"),
    [
        (MeanOperator(3.0, math.inf), Spectral(), 0.99),  # d_in ** (1/6), by equal rows
        (MeanOperator(1.0, math.inf), HeadRMS(), 0.99),
        (MeanOperator(1.5, math.inf), Spectral(), 0.99),
        (RowMean(1.5), RowRMS(), 0.7),
        (Spectral(), RowRMS(), 0.3),
    ],
    ids=repr,
)
def test_the_bound_is_reached_by_some_direction(step, weight, share):
    longest = max(float(weight.norm(d)) for d in directions(step, (24, 64)))
    assert longest >= share * ChangeBounds.of(step).direction_norm_bound(weight, (24, 64))


def test_steps_of_unknown_norm_have_no_bound():
    class Own(Spectral):
        def direction(self, g):
            return 3 * super().direction(g)

    for step in (Own(), sf.Identity()):
        assert ChangeBounds.of(step).direction_norm_bound(Spectral(), (4, 4)) == math.inf


def test_sizes_follow_from_each_other():
    w = np.random.default_rng(0).standard_normal((5, 9))
    exact = {
        "entry": np.abs(w).max(),
        "row": np.linalg.norm(w, axis=1).max(),
        "column": np.linalg.norm(w, axis=0).max(),
        "whole": np.linalg.norm(w),
        "spectral": np.linalg.norm(w, 2),
    }
    for name, value in exact.items():
        known = Sizes(**{name: value}).within((5, 9))
        assert all(getattr(known, other) >= exact[other] * (1 - 1e-12) for other in exact)
        assert math.isfinite(sum(getattr(known, other) for other in exact))


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.0, 0.9), (0.5, 0.26)])
def test_adams_smoothed_gradient_is_below_its_bound_and_reaches_it(betas):
    """The worst gradients grow by b1 / b2 from step to step, by Cauchy-Schwarz."""
    adam, highest = Adam(*betas, eps=0.0), 0.0
    steps = round(8 / min(1 - betas[1], 1 - betas[0] ** 2 / betas[1]))
    growth = torch.tensor([betas[1] / betas[0] if betas[0] else 9.0, 1.0, 3.0], dtype=torch.float64)
    state = adam.init_state(torch.zeros_like(growth))
    for t in range(steps):
        state, m = adam(state, growth ** max(t - steps, -300), 1.0)
        highest = max(highest, float(m.abs().max()))
    assert 0.98 * adam.largest <= highest <= adam.largest * (1 + 1e-9)
    assert Adam(0.9, 0.8).largest == math.inf


def clipped(w, s):
    u, values, v = np.linalg.svd(w, full_matrices=False)
    return u * np.minimum(values, s)[:, None] @ v


def spectral(w):
    return np.linalg.norm(w, 2, axis=(1, 2))[:, None, None]


@pytest.mark.parametrize("excess", [0.0, 0.3, 1.0, 5.0, 15.0])
def test_a_clips_change_is_below_the_formula_and_close_to_it(excess):
    """Ascent over weights and steps of three shapes: nothing above the formula, something near it."""
    rng, worst = np.random.default_rng(1), 0.0
    bound = float(clipped_change(torch.tensor(excess, dtype=torch.float64), 1.0))
    for shape in ((14, 2, 2), (13, 3, 2), (13, 2, 4)):
        best, w, x = 0.0, rng.standard_normal(shape), rng.standard_normal(shape)
        size, half = 1.0, np.arange(len(w))[:, None, None] % 2 == 0
        for _ in range(300):
            w2, x2 = (a + size * rng.standard_normal(shape) for a in (w, x))
            scale = (20 + excess) / spectral(w2)
            w2 *= np.where(half, scale, np.minimum(1, scale))
            x2 /= spectral(x2)
            change = spectral(clipped(w2 + x2, 20.0) - w2)
            w, x = (np.where(change > best, new, old) for new, old in ((w2, w), (x2, x)))
            best, size = np.maximum(best, change), max(0.02, size * 0.99)
        worst = max(worst, best.max())
    assert (0.9 if excess > 1 else 0.6) * bound <= worst <= bound * (1 + 1e-9), worst / bound


SPHERES = (
    sf.Normalise(),
    sf.Normalise(2.0),
    sf.SpectralSphere(2.0),
    sf.Stiefel(1.0),
    sf.RowSphere(),
    sf.RowSphere(1.0),
    sf.ColumnSphere(),
    sf.ColumnSphere(1.0),
)
WORST_BY_CONSTRUCTION = (sf.Hyperball(), sf.Normalise(norm=Frobenius()), sf.contrib.CautiousDecay(0.5))
"""Whose worst gradients no pull is: `test_worst_change.py` finds them."""
LOOSE = (sf.StreamingPostClip, sf.StreamingPreDecay, sf.DecayedPostClip)
EXACT = (sf.PostClip(2.0, 1), sf.Rescale(2.0), *SPHERES)


def changes(recipe, scheme, kind, gradients, steps):
    """The reported bound and the true change of a step, each and later every fifth; the bound over the step's norm."""
    run = Run(recipe, scheme, kind, gradients)
    block, norm = run.placement.blocks[0], run.role.weight_geometry.norm
    reach = run.lr * run.role.lr_scale(block) * run.role.step_norm_bound(block)
    path = run.steps(steps)
    for step in range(steps):
        if looked := step < 25 or step % 5 == 0:
            bound = run.optimizer.stability()["weight"]["update_upper"]
        before, after = next(path)
        if looked:
            yield bound, float(norm((after - before).reshape(block)).max()), bound / reach


@combinations(
    lambda role, scheme: (
        ((role[1], role[0].name) == ("linear", "beyond_mup") and scheme not in ALIKE)
        or (role[0].name, scheme) == ("steady", sf.WeightDecay(0.5))
    ),
    role=ROLES,
    scheme=SCHEMES,
)
def test_no_step_changes_a_weight_by_more_than_was_reported(role, scheme):
    recipe, kind = role
    natural, largest, furthest = (recipe.name, kind) == ("beyond_mup", "linear"), 0.0, 0.0
    for gradients in PULLS:
        steps = {"constant": 80 if natural else 40, "in and out": 25}.get(gradients, 12)  # it turns round at 20
        for step, (bound, change, in_steps) in enumerate(changes(recipe, scheme, kind, gradients, steps)):
            assert change <= 1.01 * bound < math.inf
            largest, furthest = max(largest, bound), max(furthest, change)
            if natural and scheme in EXACT and step > 0:
                assert in_steps <= 2.1
            if natural and scheme == sf.WeightDecay(0.5):
                assert in_steps <= 1 + 0.5 * 2.1
    if natural and scheme not in (*EXACT, *WORST_BY_CONSTRUCTION):
        # what a few vectors clip depends on rounding: 1.64 of it on one kind of CPU, below 1.6 on another
        loose = 1.1 if scheme == sf.PostClip(2.0) else 1.8 if isinstance(scheme, LOOSE) else 1.6
        assert largest <= loose * furthest


@combinations(gradients=PULLS, scheme=[sf.PostClip(2.0), sf.PostClip(2.0, 1), sf.Rescale(2.0)])
def test_on_an_accelerator_the_bound_holds_too(accelerator, gradients, scheme):
    for bound, change, _ in changes(recipes.beyond_mup(), scheme, "linear", gradients, 25):
        assert change <= 1.01 * bound < math.inf


@combinations(
    lambda stabiliser, method: method == "beyond_mup" or (method, stabiliser) == ("steady", "free:"),
    stabiliser=[
        "free:",
        "weight_decay:0.5",
        "post_clip:1.2",
        "post_clip:1.2:1",
        "rescale:1.2",
        "pre_decay:0.7",
        "streaming_post_clip:1.2",
        "streaming_pre_decay:0.7",
        "normalise:1.2",
        "spectral_sphere:1.2",
        "row_sphere",
        "column_sphere:1",
        "stiefel:1",
        "hyperball",
    ],
    method=["steady", "beyond_mup", "moga_row", "muon", "lion"],
)
def test_in_real_training_too(stabiliser, method):
    """The reference GPT on the integer language, every parameter at every step, at a rate that reaches the bounds."""
    lr = {"muon": 2.0**-6, "lion": 2.0**-8}.get(method, 0.125)
    settings = {"stabiliser": stabiliser} if stabiliser != "free:" else {}
    config = TrainConfig(width=32, lr=lr, steps=6, batch_size=4, context=16, method=method, **settings)
    training = training_run.Run(config, load("markov:32"))
    plan = training.method.plan(training.model)
    for _ in range(config.steps):
        bounds = training.optimizer.stability()
        before = {name: p.detach().clone() for name, p in training.model.named_parameters()}
        training.advance()
        for name, p in training.model.named_parameters():
            role = plan[name].role
            moved = role.view.split(p.detach().double() - before[name].double())
            change = max(float(role.weight_geometry.norm(block).max()) for block in moved)
            assert change <= 1.01 * bounds[name]["update_upper"], (name, training.step)
