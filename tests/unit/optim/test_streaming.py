"""Directions by streaming power iteration in the optimizer: what is kept, cut, saved, resumed and promised."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.views import Projections, Stack

LINEAR = sf.recipes.beyond_mup().role("linear")
STREAMING = replace(LINEAR, geometry=sf.StreamingSpectral())


def optimizer_of(parameters, role=STREAMING):
    """With a name for each parameter."""
    named = [(f"w{i}", p) for i, p in enumerate(parameters)]
    return sf.SteepestDescent([{"params": named, "role": role}], lr=0.1)


def pull(parameters, step):
    """Gaussian gradients about a fixed one."""
    for i, p in enumerate(parameters):
        p.grad = sum(torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * i + s)) for s in (0, step))


def basis(optimizer, p):
    return optimizer.state[p]["basis"]


def test_resuming_is_bit_for_bit(tmp_path):
    def parameters():
        return [nn.Parameter(torch.zeros(6, 4)), nn.Parameter(torch.zeros(6, 4)), nn.Parameter(torch.zeros(4, 9))]

    first = parameters()
    optimizer = optimizer_of(first)
    for step in range(8):
        if step == 4:
            torch.save((optimizer.state_dict(), first), tmp_path / "saved.pt")
        pull(first, step)
        optimizer.step()
    state, second = torch.load(tmp_path / "saved.pt", weights_only=False)
    resumed = optimizer_of(second)
    resumed.load_state_dict(state)
    for step in range(4, 8):
        pull(second, step)
        resumed.step()
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(basis(optimizer, a), basis(resumed, b))
        assert not torch.equal(basis(optimizer, a), torch.eye(4)[None])


def test_an_expert_without_gradient_keeps_its_basis():
    p = nn.Parameter(torch.zeros(3, 5, 4))
    optimizer = optimizer_of([p], replace(STREAMING, view=Stack()))
    for step in range(3):
        pull([p], step)
        optimizer.step()
    before, weight = basis(optimizer, p).clone(), p.detach().clone()
    pull([p], 3)
    p.grad[1] = 0
    optimizer.step()
    assert [torch.equal(a, b) for a, b in zip(basis(optimizer, p), before, strict=True)] == [False, True, False]
    assert torch.equal(p[1], weight[1])


def test_projections_of_unequal_sizes_step_like_parameters_of_their_own():
    sizes = (8, 2, 3)
    whole = nn.Parameter(torch.zeros(13, 5))
    parts = [nn.Parameter(torch.zeros(size, 5)) for size in sizes]
    fused, alone = optimizer_of([whole], replace(STREAMING, view=Projections(sizes))), optimizer_of(parts)
    for step in range(5):
        pull([whole], step)
        for part, g in zip(parts, whole.grad.split(sizes), strict=True):
            part.grad = g.clone()
        fused.step()
        alone.step()
    torch.testing.assert_close(whole, torch.cat(list(parts)))
    assert basis(fused, whole).shape == (3, 5, 5)
    for block, part, k in zip(basis(fused, whole), parts, (5, 2, 3), strict=True):
        torch.testing.assert_close(block[:k, :k], basis(alone, part)[0])
        assert not block[k:].any()
        assert not block[:, k:].any()


def test_the_basis_is_all_that_is_added_to_the_state():
    p = nn.Parameter(torch.zeros(6, 4))
    streaming, plain = optimizer_of([p]), optimizer_of([p], LINEAR)
    pull([p], 0)
    streaming.step()
    plain.step()
    assert set(streaming.state[p]) - set(plain.state[p]) == {"basis"}
    assert basis(streaming, p).shape == (1, 4, 4)


def test_it_nears_the_exact_direction_on_a_gradient_that_stays():
    m = torch.randn(1, 12, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for geometry in (sf.StreamingSpectral(), sf.StreamingSpectral(sf.TransposedConvSpectral("auto", 2))):
        memory = geometry.init_memory(m)
        for _ in range(300):
            d, memory = geometry.take(m, m, 1.0, memory)
        torch.testing.assert_close(d, geometry.norm_of.direction(m), atol=1e-3, rtol=0)


def test_no_step_is_longer_than_its_bound():
    """Gradients that turn, vanish, are of rank one, of extreme size: the direction's norm, and the update number."""
    for shape in ((6, 4), (4, 9), (32, 8), (1, 5)):
        p, geometry = nn.Parameter(torch.randn(shape)), sf.StreamingSpectral()
        optimizer, memory = optimizer_of([p]), geometry.init_memory(p[None])
        bound = geometry.direction_norm_bound(sf.Spectral("svd"), shape)
        assert bound <= 1.002
        for step in range(30):
            g = torch.randn(shape, generator=torch.Generator().manual_seed(step))
            g = (g, g**9, g[:, :1] * g[:1], g.sign() * 1e-30, g * 1e20)[step % 5]
            d, memory = geometry.take(p[None], g[None], 1.0, memory)
            assert float(sf.Spectral("svd").norm(d.double())) <= bound
            allowed, before = optimizer.stability()["w0"]["update_upper"], p.detach().clone()
            p.grad = g
            optimizer.step()
            assert optimizer.stability({"w0": before})["w0"]["update_measured"] <= allowed * (1 + 1e-4)


def test_what_is_refused():
    with pytest.raises(ValueError, match="of a spectral norm, not of RowRMS"):
        sf.StreamingSpectral(sf.RowRMS())
    with pytest.raises(ValueError, match="at least 1 iteration, not 0"):
        sf.StreamingSpectral(iterations=0)
