"""The running bound: outside writes, permutations among them, and a costly norm of a user's own."""

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.stabilise.running_bound import fingerprint

RADIUS = 1.5


def test_a_write_that_the_host_cannot_see_is_found_on_the_device(accelerator):
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
    write(w[0, 0])
    assert not torch.equal(fingerprint([w]), before)


def test_a_fingerprint_on_an_accelerator_does_not_depend_on_the_batch(accelerator):
    """A false alarm there would scale the weight down; sums of integers have no order."""
    w = torch.randn(5, 1, 33, 19, generator=torch.Generator().manual_seed(0))
    assert torch.equal(fingerprint([w])[2:3], fingerprint([w[2:3]]))


def test_a_permuted_weight_is_noticed_by_the_optimizer(device):
    """Norm and sum, for instance, could not tell a permutation."""
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
    """`costly = True` is all that a geometry of one's own says."""
    projections = []

    class Nuclear(sf.Geometry):
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

        def direction_norm_bound(self, norm):
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
