"""The running bound of single matrices: how rarely norms are certified, what a fingerprint notices, any norm.

Twice where it matters: as on a CPU, and as on an accelerator, where nothing may be read on the host.
"""

import math

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.geometry import spectral
from surefoot.geometry.base import ChangeBounds
from surefoot.stabilise import running_bound
from surefoot.stabilise.running_bound import enforce, fingerprint

RADIUS = 1.5
proven = running_bound._proven


@pytest.mark.parametrize("radius", [100.0, RADIUS])
def test_costly_projections_are_rare(monkeypatch, radius):
    """One projection in `period` steps, whether the norm is far below the radius or at it."""
    projected = []
    monkeypatch.setattr(spectral, "mclip", lambda x, limit: projected.append(len(x)) or sf.mclip(x, limit))
    torch.manual_seed(0)
    layer = nn.Linear(16, 16, bias=False)
    plan = sf.Plan.of(layer, stabiliser=sf.PostClip(radius, 10))
    optimizer = sf.SteepestDescent(layer, plan, lr=0.01)
    for _ in range(100):
        layer.weight.grad = -layer.weight.detach().clone()
        optimizer.step()
    assert 8 <= sum(projected) <= 12


@pytest.mark.parametrize(("scheme", "period"), [(sf.PostClip(RADIUS, 10), 10), (sf.PostClip(RADIUS, 1), 1),
                                              (sf.PostClip(RADIUS), 16)], ids=repr)  # fmt: skip
def test_certificates_on_an_accelerator_are_rare(monkeypatch, accelerator, scheme, period):
    calls = []
    certificate = sf.Spectral.certificate
    monkeypatch.setattr(sf.Spectral, "certificate", lambda self, w: calls.append(1) or certificate(self, w))
    layer = nn.Linear(16, 16, bias=False)
    optimizer = sf.SteepestDescent(layer, sf.Plan.of(layer, stabiliser=scheme), lr=0.01)
    counts = []
    for _ in range(61):
        layer.weight.grad = -layer.weight.detach().clone()
        optimizer.step()
        counts.append(len(calls))
    rises = [step for step in range(1, 61) if counts[step] > counts[step - 1]]
    assert rises == list(range(period, 61, period))


def test_a_write_to_data_is_noticed_on_the_device(accelerator):
    """It changes no version, so the host cannot notice it."""
    layer = nn.Linear(16, 16, bias=False)
    optimizer = sf.SteepestDescent(layer, sf.Plan.of(layer, stabiliser=sf.PostClip(RADIUS, 4)), lr=0.01)
    norms = []
    for step in range(12):
        if step == 5:
            layer.weight.data.mul_(100)
        layer.weight.grad = -layer.weight.detach().clone()
        optimizer.step()
        norms.append(float(sf.Spectral().norm(layer.weight.detach())))
    assert max(norms) <= RADIUS * (1 + 1e-3)
    assert min(norms) > RADIUS / 16**0.5 * 0.4  # by its Frobenius norm, at most four times the other


WRITES = {
    "an entry": lambda w: w[0, 0].add_(1e-3),
    "sign": lambda w: w.neg_(),
    "rows": lambda w: w.copy_(w.flip(0)),
    "columns": lambda w: w.copy_(w.roll(1, 1)),
    "a row": lambda w: w[3].copy_(w[3].flip(0)),
    "two entries": lambda w: w[2].copy_(w[2, [0, 5, 2, 3, 4, 1, *range(6, 16)]]),
    "all entries": lambda w: w.copy_(w.flatten().roll(7).view(16, 16)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_fingerprint_notices_every_write(device, write, dtype):
    w = torch.randn(1, 1, 16, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = fingerprint([w])
    assert torch.equal(fingerprint([w.clone()]), before)
    assert torch.equal(fingerprint([w.mT.contiguous().mT]), before)  # in another memory layout
    write(w[0, 0])
    assert not torch.equal(fingerprint([w]), before)


def test_a_fingerprint_on_an_accelerator_does_not_depend_on_the_batch(accelerator):
    """A false alarm there would scale the weight down; sums of integers have no order."""
    w = torch.randn(5, 1, 33, 19, generator=torch.Generator().manual_seed(0))
    assert torch.equal(fingerprint([w])[2:3], fingerprint([w[2:3]]))


def test_a_permuted_weight_is_noticed_by_the_optimizer(device):
    """Norm and sum of a permuted weight are the same."""
    layer = nn.Linear(8, 8, bias=False)
    optimizer = sf.SteepestDescent(layer, sf.Plan.of(layer, stabiliser=sf.PostClip(RADIUS, 100)), lr=0.01)
    bounds = optimizer._bounds
    for _ in range(3):
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
    assert not bounds._changed([layer.weight], fingerprint([layer.weight.detach()[None, None]])).any()
    layer.weight.data.copy_(layer.weight.data.flip(1))
    assert bounds._changed([layer.weight], fingerprint([layer.weight.detach()[None, None]])).all()


def test_a_users_costly_norm_is_bounded_without_more_code(device):
    """Its geometry declares `costly = True` and how long its directions are."""
    projections = []

    class Nuclear(ChangeBounds):
        couples, costly = frozenset({-2, -1}), True

        def norm(self, w):
            return torch.linalg.svdvals(w).amax(-1)

        def direction(self, g):
            u, _, v = torch.linalg.svd(g, full_matrices=False)
            return u @ v

        def project(self, w, radius, cache=None):
            projections.append(len(w))
            u, s, v = torch.linalg.svd(w, full_matrices=False)
            radius = (
                torch.as_tensor(radius, dtype=w.dtype).reshape(-1, 1) if isinstance(radius, torch.Tensor) else radius
            )
            return (u * s.clamp(max=radius)[..., None, :]) @ v, cache

        def direction_norm_bound(self, norm, shape, largest=math.inf):
            return 1.001

    layer = nn.Linear(6, 9, bias=False)
    role = sf.Role("mine", Nuclear(), stabiliser=sf.PostClip(RADIUS, 10))
    optimizer = sf.SteepestDescent([{"params": [layer.weight], "role": role}], lr=0.05)
    for _ in range(60):
        layer.weight.grad = -layer.weight.detach().clone()
        optimizer.step()
        assert float(Nuclear().norm(layer.weight.detach())) <= RADIUS * (1 + 1e-3)
    assert optimizer.state[layer.weight]["upper"].shape == (1,)
    assert len(projections) <= 8


@pytest.mark.parametrize("period", [4, None])
def test_steps_of_another_norm_count_by_their_length_in_the_weights(period):
    """A Frobenius step of norm 1 is four times as long in the spectral norm, where the gradient has rank one."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 16, bias=False)
    role = sf.Role("mine", sf.Frobenius(), weight_norm=sf.Spectral(), stabiliser=sf.PostClip(RADIUS, period))
    optimizer = sf.SteepestDescent([{"params": [layer.weight], "role": role}], lr=0.05)
    for _ in range(40):
        layer.weight.grad = -torch.ones(16, 16)
        optimizer.step()
        assert float(torch.linalg.matrix_norm(layer.weight.detach(), 2)) <= RADIUS * (1 + 1e-4)


def test_after_a_step_of_unknown_norm_the_weight_is_certified_at_once(accelerator):
    """An orthogonal matrix: by its Frobenius norm, four times the other, it would be scaled down for nothing."""
    w = torch.linalg.qr(torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(0))).Q
    geometry = sf.Spectral()
    state = sf.PostClip(RADIUS).init_state(w, geometry, geometry)
    enforced, cache = enforce(w, state, geometry, RADIUS, 0.1, float("inf"), 1)
    assert torch.equal(enforced, w)
    assert 1 <= float(cache["upper"]) < 1.02


@pytest.mark.parametrize("period", [1, 4, 32, None])
@pytest.mark.parametrize("recipe", [sf.recipes.moga_row(3.0), sf.recipes.beyond_mup()], ids=lambda r: r.name)
def test_the_norm_stays_at_the_radius_for_any_period(recipe, period):
    """Also for steps of unknown norm (p = 3), and where a period's steps together exceed the radius."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 16, bias=False)
    plan = sf.Plan.of(layer, recipe, stabiliser=sf.PostClip(2.0, period))
    plan.initialise_(layer)
    optimizer = sf.SteepestDescent(layer, plan, lr=0.3)
    pull = torch.randn(16, 16)
    norms = []
    for _ in range(30):
        layer.weight.grad = pull.clone()
        optimizer.step()
        norms.append(float(sf.Spectral().norm(layer.weight.detach())))
    assert max(norms) <= 2 * (1 + 1e-3)
    assert min(norms[10:]) >= 0.99


def test_a_weight_that_nobody_wrote_to_is_not_checked_again(device, monkeypatch):
    """Tall matrices, too, whose stepped values lie transposed in memory; each check costs a factorisation."""
    checks = []
    monkeypatch.setattr(running_bound, "_proven", lambda *args: checks.append(1) or proven(*args))
    params = [nn.Parameter(torch.randn(*shape) * 0.02) for shape in ((32, 8), (32, 8), (8, 32), (16, 16))]
    role = sf.Role("linear", sf.Spectral(), stabiliser=sf.PostClip(100.0))
    optimizer = sf.SteepestDescent([{"params": params, "role": role}], lr=1e-3)
    for step in range(5):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
        if step == 0:
            checks.clear()
    assert checks == []
