"""Matrices for the laws of singular values: shapes, spectra, and the best step along rows by its dual problem."""

from collections.abc import Iterator

import numpy as np
import torch
from scipy.optimize import minimize

from laws.inputs import generator

SHAPES = ((24, 24), (40, 12), (12, 40), (33, 32), (8, 128), (96, 6), (3, 2), (2, 2), (1, 9), (9, 1), (1, 1))


def with_spectrum(m: int, n: int, values: np.ndarray, seed: int = 0) -> np.ndarray:
    """A matrix with these singular values between random orthogonal factors."""
    rng = generator(seed, m, n)
    k = min(m, n)
    u, v = (torch.linalg.qr(torch.tensor(rng.standard_normal((size, k))))[0].numpy() for size in (m, n))
    return (u * values) @ v.T


def spectra(m: int, n: int) -> Iterator[tuple[str, np.ndarray]]:
    """Named float64 matrices (m, n): the benign, the ill-conditioned, the deficient and the structured."""
    k = min(m, n)
    decay = np.arange(k) / max(k - 1, 1)
    rng = generator(1, m, n)
    yield "gaussian", rng.standard_normal((m, n))
    yield "power law 1e6", with_spectrum(m, n, np.arange(1, k + 1) ** (-6 / np.log10(max(k, 2))))
    yield "geometric 1e6", with_spectrum(m, n, 10.0 ** (-6 * decay))
    yield "rank half", with_spectrum(m, n, np.where(np.arange(k) < (k + 1) // 2, 1.0, 0.0))
    yield "rank 1", np.outer(rng.standard_normal(m), rng.standard_normal(n))
    yield "orthogonal", with_spectrum(m, n, np.ones(k))
    yield "one spike", with_spectrum(m, n, np.where(np.arange(k) == 0, 1e4, 1.0))
    yield "flat with a cliff", with_spectrum(m, n, np.where(np.arange(k) < k - k // 3, 1.0, 1e-6))
    yield "constant", np.ones((m, n))
    yield "one entry", np.eye(m, n) * (np.arange(n) == 0)
    yield "identity", np.eye(m, n)
    yield (
        "low-rank Gaussian plus noise",
        (rng.standard_normal((m, 2)) @ rng.standard_normal((2, n)) + 1e-3 * rng.standard_normal((m, n))),
    )


def nuclear(x, smoothing):
    """The sum of `sqrt(s**2 + smoothing**2)` over singular values s, and its gradient."""
    u, s, v = np.linalg.svd(x, full_matrices=False)
    smooth = np.hypot(s, smoothing)
    return smooth.sum(), u * (s / smooth) @ v


def lowest(value_and_gradient, size):
    """The least value of a convex function with kinks that is found by smoothing it less and less."""
    x = np.zeros(size)
    for smoothing in 10.0 ** np.arange(-1, -9, -1):
        options = {"maxiter": 3000, "ftol": 1e-14, "gtol": 1e-10}
        x = minimize(value_and_gradient, x, (smoothing,), jac=True, method="L-BFGS-B", options=options).x
    return value_and_gradient(x, 1e-12)[0]


def best_along_rows(m, unit):
    """`min |m + diag(x) u|_*`."""

    def value(x, smoothing):
        size, gradient = nuclear(m + x[:, None] * unit, smoothing)
        return size, (gradient * unit).sum(1)

    return lowest(value, len(m))


def unit_rows(w):
    """Rows of length 1, or 0."""
    length = w.norm(dim=-1, keepdim=True)
    return w / length.where(length > 0, 1)
