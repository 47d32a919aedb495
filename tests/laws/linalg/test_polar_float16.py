"""The float16 matrix sign: its bound and its alignment on the spectra of momenta, and on adversarial ones."""

import itertools

import numpy as np
import pytest
import torch

import surefoot
from combinations import combinations
from laws.inputs import gaussian
from laws.linalg.spectra import with_spectrum
from surefoot.linalg import coefficients, polar
from surefoot.linalg.ops import TORCH, Ops


def spectra(m, n):
    """Each with the least alignment that is asked for."""
    i = torch.arange(1, m + 1, dtype=torch.float64)
    yield "gaussian", gaussian((m, n), 0), 0.96
    for name, values, least in (
        ("1/i", 1 / i, 0.96),
        ("i^-1.5", i**-1.5, 0.89),
        ("spike of 1000", torch.where(i == 1, 1000.0, 1.0), 0.85),
        ("orthogonal", torch.ones(m), 0.99),
        ("rank 8", torch.where(i <= 8, 1.0, 0.0), 0.98),
        ("geometric 1e6", 10.0 ** (-6 * i / m), 0.95),
    ):
        yield name, torch.tensor(with_spectrum(m, n, values.numpy())).float(), least


@pytest.mark.parametrize(
    "shape",
    [(64, 64), (200, 260), (64, 256), *(pytest.param(s, marks=pytest.mark.slow) for s in ((160, 400), (224, 224)))],
    ids=str,
)
@pytest.mark.parametrize(
    ("method", "shrink"),
    [("polar_express_fp16", coefficients.SHRINK), ("qdwh_2_bf16", coefficients.SHRINK_BF16)],
    ids=["polar_express_fp16", "qdwh_2_bf16"],
)
def test_the_bound_and_the_alignment(shape, method, shrink):
    names, matrices, least = zip(*spectra(*shape), strict=True)
    x = torch.stack(matrices)
    sign = surefoot.msign(x, method).double()
    top = torch.linalg.matrix_norm(sign, 2)
    alignment = (sign * x).sum((-2, -1)) / (top * torch.linalg.svdvals(x.double()).sum(-1))
    assert {name: float(t) for name, t in zip(names, top, strict=True) if t > 1 + 5e-4} == {}
    assert {name: float(t) for name, t in zip(names, top, strict=True) if t < shrink * 0.96} == {}
    assert {name: float(a) for name, a, b in zip(names, alignment, least, strict=True) if a < b} == {}


@pytest.mark.parametrize("rows", [128, 256])
def test_equal_entries_are_not_all_rounded_to_one_side(rows):
    """Without scales on its rows a constant matrix of powers of 2 comes out up to 2 % too long."""
    sign = surefoot.msign(torch.ones(rows, rows), "qdwh_2_bf16").double()
    assert float(torch.linalg.matrix_norm(sign, 2)) == pytest.approx(coefficients.SHRINK_BF16, abs=1e-3)


@combinations(
    lambda shape, seed: seed == 0 and shape[1] < 1000,
    shape=[(2, 3), (2, 8), (3, 5), (4, 6), (8, 12), (8, 64), (10, 64), (16, 24), (32, 64), (3, 1152), (8, 1152)],
    seed=range(8),
)
def test_the_bound_on_few_values_and_few_rows(shape, seed):
    """Spectra of two and three values, random singular vectors, also on a few rows of a larger matrix of zeros."""
    m, n = shape
    rng = np.random.default_rng(seed)
    matrices = []
    for few, ratio in itertools.product(range(1, m), np.geomspace(3e-3, 1, 12 if m > 4 else 40)):
        values = np.where(np.arange(m) < few, 1.0, ratio)
        values[-1] *= rng.choice([1.0, 0.3, 0.03])
        u, v = (np.linalg.qr(rng.standard_normal((size, m)))[0] for size in (m, n))
        matrices.append((u * values) @ v.T)
    x = torch.tensor(np.stack(matrices)).float()
    padded = torch.cat([x, x.new_zeros(len(x), 3, n)], 1)  # of more rows, as where most units are dead
    for y in (x, x.mT, padded):
        tops = torch.linalg.matrix_norm(surefoot.msign(y, "polar_express_fp16").double(), 2)
        assert float(tops.max()) <= 0.98, (tuple(y.shape), float(tops.max()))  # a margin for other orders of summation


@pytest.mark.parametrize("shape", [(16, 16), (16, 64)])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_scale_does_not_matter(shape, scale):
    x = gaussian((2, *shape))
    torch.testing.assert_close(
        surefoot.msign(x * scale, "polar_express_fp16"), surefoot.msign(x, "polar_express_fp16"), atol=5e-3, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_is_kept(dtype):
    assert surefoot.msign(gaussian((8, 32), dtype=dtype), "polar_express_fp16").dtype == dtype


def test_a_constant_matrix_of_many_columns_does_not_overflow():
    sign = surefoot.msign(torch.ones(2, 100_000), "polar_express_fp16")
    assert float(torch.linalg.matrix_norm(sign.double(), 2)) == pytest.approx(coefficients.SHRINK, rel=0.05)


@pytest.mark.parametrize("peak", [1e-44, 1e-38, 3e38])
def test_entries_at_the_ends_of_float32(peak):
    """The divisor that scales 1024 columns, twice the largest entry, neither overflows nor vanishes."""
    signs = gaussian((2, 40, 1024)).sign()
    sign = surefoot.msign(signs * peak, "polar_express_fp16")
    torch.testing.assert_close(sign, surefoot.msign(signs, "polar_express_fp16"), rtol=0, atol=4e-3)


def test_wide_matrices_go_by_the_gram_matrix(monkeypatch):
    """Five products with x where the steps are taken on x itself; three where they are taken on the Gram matrix."""
    for shape, applied in (((16, 23), 5), ((16, 24), 3)):
        calls = []
        monkeypatch.setattr(Ops, "apply", lambda ops, a, x: calls.append(x.shape) or torch.bmm(a, x))  # noqa: B023
        polar.polar_express_fp16(gaussian((1, *shape)) / 5, TORCH)
        assert len(calls) == applied


def test_each_step_is_the_best_quintic_on_what_the_last_one_left():
    """Undamped, it touches both ends of `[low, 2 - low]` in turn, four times: by Chebyshev none does better."""
    low, high = 3e-3, 1.0
    for a, b, c in coefficients.POLAR_EXPRESS_FP16:
        a, b, c = a * 1.01, b * 1.01**3, c * 1.01**5
        x = torch.linspace(low, high, 200_001, dtype=torch.float64)
        y = a * x + b * x**3 + c * x**5
        slope = y.diff().sign()
        extremes = torch.cat([y[:1], y[1:-1][slope[1:] != slope[:-1]], y[-1:]])
        low = float(y.min())
        high = 2 - low
        truth = torch.tensor([low, high, low, high], dtype=torch.float64)
        torch.testing.assert_close(extremes, truth, atol=1e-6, rtol=0)
    assert low > 0.995


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(6, 4), (32, 64), (20, 30)])
def test_a_sign_can_be_differentiated(shape, dtype):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    weight = torch.randn(shape, dtype=dtype)
    (g,) = torch.autograd.grad((surefoot.msign(x) * weight).sum(), x)
    (want,) = torch.autograd.grad((surefoot.msign(x, "svd") * weight).sum(), x)
    assert float((g - want).norm() / want.norm()) < 0.05
