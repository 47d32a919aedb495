"""Tangents of rows and columns: none where a gradient is along the weight, whatever the rounding."""

import pytest
import torch

import surefoot as sf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 8, 1), (2, 4, 300), (1, 700, 3)], ids=str)
def test_a_gradient_along_the_weight_moves_nothing(shape, dtype):
    oblique, generator = sf.Oblique(), torch.Generator().manual_seed(1)
    for _ in range(20):
        w = torch.randn(shape, generator=generator, dtype=dtype)
        memory = oblique.init_memory(w)
        for _ in range(2):  # its columns, then its rows
            d, memory = oblique.take(w, 0.37 * w, 1.0, memory)
            assert not d.any()


@pytest.mark.parametrize("side", [-1, -2])
def test_what_is_small_beside_the_gradient_and_no_rounding_is_a_direction(side):
    w = torch.randn(1, 6, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    t = torch.randn(1, 6, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    t -= (t * w).sum(side, keepdim=True) / w.square().sum(side, keepdim=True) * w
    memory = {"turn": torch.tensor([0.0 if side == -2 else 1.0])}
    d, _ = sf.Oblique().take(w, w + 1e-9 * t, 1.0, memory)
    want = 0.2 * w.shape[side] ** 0.5 * t / t.norm(dim=side, keepdim=True)
    torch.testing.assert_close(d, want, rtol=1e-5, atol=1e-5)
