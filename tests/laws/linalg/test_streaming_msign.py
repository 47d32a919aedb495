"""Streaming matrix sign: exact for a converged basis, never longer than 1, warm on a matrix that turns."""

import numpy as np
import pytest
import torch

import surefoot as sf
from combinations import combinations
from laws.inputs import EMPTY, exact, gaussian, generator
from laws.linalg.spectra import SHAPES, spectra, with_spectrum
from surefoot.linalg.power_iteration import streaming_msign

DTYPES = (torch.float32, torch.float64)
ERROR = {torch.float32: 2e-3, torch.float64: 1e-9}
OVER_ONE = 1 + 1e-4


def singular(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """U, S, V of the thin SVD, largest entry of x scaled to 1."""
    u, s, vt = np.linalg.svd(x / (np.abs(x).max() or 1.0), full_matrices=False)
    return u, s, vt.T


def identity(x: torch.Tensor) -> torch.Tensor:
    """The basis before the first step."""
    k = min(x.shape[-2:])
    return torch.eye(k, dtype=x.dtype).expand(*x.shape[:-2], k, k)


def alignment(x: torch.Tensor, d: torch.Tensor) -> float:
    """`<d, x> / (|d|_2 |x|_*)` by numpy."""
    values = np.linalg.svd(exact(x), compute_uv=False)
    return float((exact(d) * exact(x)).sum() / (np.linalg.norm(exact(d), 2) * values.sum()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_with_the_singular_vectors_it_is_the_matrix_sign(dtype):
    for m, n in SHAPES:
        for name, values in spectra(m, n):
            u, s, v = singular(values)
            smaller = np.linalg.svd(values if m > n else values.T)[2].T
            for scale in (1.0, 1e-30, 1e30):
                x = torch.tensor(values / np.abs(values).max() * scale).to(dtype)
                before = x.clone()
                d, basis = streaming_msign(x, torch.tensor(smaller).to(dtype))
                label = ((m, n), name, scale)
                assert d.dtype == basis.dtype == dtype
                assert torch.equal(x, before)
                large, none = s > 1e-2 * s[0], s < 1e-14 * s[0]
                sign = u.T @ exact(d) @ v
                np.testing.assert_allclose(
                    sign[np.ix_(large, large)], np.eye(large.sum()), atol=ERROR[dtype], err_msg=label
                )
                if dtype == torch.float64:
                    np.testing.assert_allclose(exact(d) @ v[:, none], 0, atol=1e-12, err_msg=label)
                np.testing.assert_allclose(exact(basis.mT @ basis), np.eye(min(m, n)), atol=5e-6, err_msg=label)
                assert np.linalg.norm(exact(d), 2) <= OVER_ONE, label


@combinations(dtype=DTYPES, iterations=[1, 2])
def test_no_basis_makes_it_longer_than_one(dtype, iterations):
    """From the identity, from a random basis, and from the leading vectors in reverse order."""
    for m, n in SHAPES:
        k = min(m, n)
        random = np.linalg.qr(generator(3, k).standard_normal((k, k)))[0]
        for name, values in spectra(m, n):
            reverse = np.linalg.svd(values if m > n else values.T)[2].T[:, ::-1].copy()
            x = torch.tensor(values).to(dtype)
            for basis in (np.eye(k), random, reverse):
                warm = torch.tensor(basis).to(dtype)
                for _ in range(4):
                    d, warm = streaming_msign(x, warm, iterations)
                    assert np.linalg.norm(exact(d), 2) <= OVER_ONE, ((m, n), name)
                    np.testing.assert_allclose(exact(warm.mT @ warm), np.eye(k), atol=5e-6)


def test_a_matrix_that_stays_is_converged_to():
    for m, n in ((24, 24), (40, 12), (12, 40)):
        x = torch.tensor(with_spectrum(m, n, 0.8 ** np.arange(min(m, n))))
        u, _, v = singular(x.numpy())
        basis = identity(x)
        for _ in range(100):
            d, basis = streaming_msign(x, basis)
        np.testing.assert_allclose(d.numpy(), u @ v.T, atol=1e-7)


def test_rank_comes_back_after_many_steps_of_rank_one():
    x, basis = torch.ones(12, 8), torch.eye(8)
    for _ in range(50):
        d, basis = streaming_msign(x, basis)
    np.testing.assert_allclose(d.numpy(), np.ones((12, 8)) / 96**0.5, atol=1e-4)
    full = gaussian((12, 8))
    for _ in range(40):
        d, basis = streaming_msign(full, basis)
    assert alignment(full, d) > 0.999


def test_one_iteration_a_step_follows_a_matrix_that_turns():
    """A running mean of .95 of Gaussian matrices about a fixed one of singular values 1/i."""
    fixed = torch.tensor(with_spectrum(32, 48, 1 / np.arange(1.0, 33))).float()
    m, basis, warm, cold = fixed, torch.eye(32), [], []
    for step in range(60):
        m = torch.lerp(fixed + gaussian((32, 48), step) / 20, m, 0.95)
        d, basis = streaming_msign(m, basis)
        warm.append(alignment(m, d))
        cold.append(alignment(m, streaming_msign(m, torch.eye(32))[0]))
    assert min(warm[10:]) > 0.96
    assert max(cold[10:]) < 0.93


def test_scale_does_not_matter():
    x = gaussian((9, 7), dtype=torch.float64).float()
    once = streaming_msign(x, torch.eye(7))
    for power in (-100, -1, 100):
        again = streaming_msign(x * 2.0**power, torch.eye(7))
        assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_a_batch_is_its_matrices_and_a_zero_one_keeps_its_basis():
    x = gaussian((2, 3, 6, 9))
    x[1, 2] = 0
    basis = torch.linalg.qr(gaussian((2, 3, 6, 6), 1)).Q
    d, new = streaming_msign(x, basis)
    for i in range(2):
        for j in range(3):
            alone = streaming_msign(x[i, j], basis[i, j])
            torch.testing.assert_close(d[i, j], alone[0])
            torch.testing.assert_close(new[i, j], alone[1])
    assert not d[1, 2].any()
    assert torch.equal(new[1, 2], basis[1, 2])


def test_half_precision_is_computed_in_float32():
    x = gaussian((6, 4)).bfloat16()
    d, basis = streaming_msign(x, torch.eye(4))
    assert (d.dtype, basis.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(d, streaming_msign(x.float(), torch.eye(4))[0].bfloat16())


@pytest.mark.parametrize("shape", EMPTY[2], ids=str)
def test_no_entries(shape):
    k = min(shape[-2:])
    d, basis = streaming_msign(torch.zeros(shape), torch.eye(k).expand(*shape[:-2], k, k))
    assert d.shape == shape
    assert basis.shape[-2:] == (k, k)


def test_a_factor_that_does_not_exist_leaves_a_direction_below_one(monkeypatch):
    real = torch.linalg.cholesky_ex

    def fails(a):
        factor, info = real(a)
        return factor * torch.nan, info + 1

    monkeypatch.setattr(torch.linalg, "cholesky_ex", fails)
    d, _ = streaming_msign(torch.ones(6, 4), torch.eye(4))
    assert 0.1 < np.linalg.norm(exact(d), 2) <= OVER_ONE


def test_what_is_refused():
    with pytest.raises(AssertionError):
        streaming_msign(torch.eye(2), torch.eye(2), 0)
    with pytest.raises(ValueError, match=r"surefoot\.StreamingSpectral\(\)"):
        sf.msign(torch.eye(2), "streaming")
    with pytest.raises(ValueError, match=r"surefoot\.StreamingSpectral\(\)"):
        sf.Spectral("streaming")
