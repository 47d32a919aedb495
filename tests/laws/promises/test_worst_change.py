"""What a step is said to change at most is what some gradient does change: the worst one, by construction or ascent."""

import torch

import surefoot as sf
from combinations import combinations
from comparisons import advanced
from surefoot import recipes

from .roles import PULLS, Run

FROBENIUS = sf.Normalise(norm=sf.Frobenius())


def test_what_streaming_decay_reports_is_what_a_gradient_could_do():
    """Its bound is for every gradient: from states in which the one at hand does little, another reaches it."""
    scheme = sf.StreamingPreDecay(0.5)
    for gradients in PULLS:
        run = Run(recipes.beyond_mup(), scheme, "linear", gradients)
        geometry, shape = run.role.geometry, run.placement.blocks[0]
        for _ in run.steps(25):  # the gradients turn round at 20
            state = run.optimizer.state[run.p]
            cache = {name: x.clone() for name, x in state.items() if name not in ("momentum", "skipped")}
            w = run.p.detach().reshape(shape)
            moved, _ = advanced(scheme, w, w, run.lr, geometry, cache=cache)
            change = float(geometry.norm(moved - w).max())
            bound = run.optimizer.stability()["weight"]["update_upper"]
            assert change <= 1.01 * bound
            assert bound <= 1.1 * change


def test_what_hyperball_reports_is_what_a_gradient_of_rank_one_does():
    for gradients in PULLS:
        run = Run(recipes.beyond_mup(), sf.Hyperball(), "linear", gradients)
        geometry, shape = run.role.geometry, run.placement.blocks[0]
        for _ in run.steps(10):
            w = run.p.detach().reshape(shape)
            u, _, vh = torch.linalg.svd(w, full_matrices=False)
            moved, _ = advanced(sf.Hyperball(), w, u[..., -1:] @ vh[..., -1:, :], run.lr, geometry)
            bound = run.optimizer.stability()["weight"]["update_upper"]
            assert 0.99 * bound <= float(geometry.norm(moved - w).max()) <= 1.001 * bound


def reached(scheme, w, d, eta):
    """What the step by d, of either sign, changes."""
    norm, given = sf.Spectral(), sf.geometry.Identity()
    return max(float(norm.norm(advanced(scheme, w, x, eta, given, norm)[0] - w).max()) for x in (d, -d))


@combinations(pull=PULLS, recipe=[recipes.beyond_mup(), sf.contrib.frobenius_sphere()])
def test_what_a_frobenius_sphere_reports_is_what_a_gradient_could_do(pull, recipe):
    """Ascent over d and the pair a, b of the worst change, to first order: `d = msign(s w / R^2 - a b^T)`."""
    run = Run(recipe, FROBENIUS, "linear", pull)
    shape = run.placement.blocks[0]
    for step, _ in enumerate(run.steps(27)):
        if step % 13 == 0:
            w = run.p.detach().reshape(shape)
            unit, worst = run.role.geometry.unit(w.shape), 0.0
            for k in range(3):
                u, _, vh = torch.linalg.svd(w)
                a, b = u[..., 0] + k * u[..., k] / 2, vh[..., 0, :] + k * vh[..., -1, :] / 2
                for _ in range(30):
                    a, b = (x / x.norm() for x in (a, b))
                    s = (a[..., None] * w * b[..., None, :]).sum()
                    u, _, vh = torch.linalg.svd(s / w.square().sum() * w - a[..., None] * b[..., None, :], False)
                    d = u @ vh
                    worst = max(worst, reached(FROBENIUS, w, unit * d, run.lr))
                    u, _, vh = torch.linalg.svd(-d + (w * d).sum() / w.square().sum() * w)
                    a, b = u[..., 0], vh[..., 0, :]
            bound = run.optimizer.stability()["weight"]["update_upper"]
            assert worst <= bound * (1 + 1e-6)
            assert bound <= 1.1 * worst


def test_what_cautious_decay_reports_is_what_a_gradient_of_rank_one_does():
    """Which agrees with the weight in sign where the leading vectors of `|w|`, with signs of w's own, do."""
    scheme = sf.contrib.CautiousDecay(0.5)
    for gradients in PULLS:
        run = Run(recipes.beyond_mup(), scheme, "linear", gradients)
        shape = run.placement.blocks[0]
        for _ in run.steps(40):
            w = run.p.detach().reshape(shape)
            a, b = (x[..., 0] for x in (torch.linalg.svd(w.abs())[0], torch.linalg.svd(w.abs())[2].mT))
            p, q = (x[..., 0] for x in (torch.linalg.svd(w)[0], torch.linalg.svd(w)[2].mT))
            d = (a.abs() * p.sign())[..., None] * (b.abs() * q.sign())[..., None, :]
            worst = reached(scheme, w, run.role.geometry.unit(w.shape) * d, run.lr)
        bound = run.optimizer.stability()["weight"]["update_upper"]
        assert worst <= bound * (1 + 1e-6)
        assert bound <= 1.1 * worst
