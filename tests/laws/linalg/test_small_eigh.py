"""Eigenvalues by rotations, on spectra that Gram matrices of a few rows have."""

import pytest
import torch

from laws.inputs import gaussian
from surefoot.linalg.small_eigh import jacobi


def spectrum(rows: int, kind: str) -> torch.Tensor:
    x = gaussian((7, rows, 40), rows, torch.float64)
    if kind == "graded":
        x = x * torch.logspace(0, -8, rows, dtype=torch.float64)[:, None]
    if kind == "rank 1":
        x = x[:, :1] * x[:, :, :1]
    if kind == "equal":
        x = torch.linalg.qr(x.mT).Q.mT
    return x @ x.mT


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9, 10, 17, 18])
@pytest.mark.parametrize("kind", ["gaussian", "graded", "rank 1", "equal"])
def test_the_eigenvalues_and_vectors_are_lapacks(rows, kind):
    a = spectrum(rows, kind)
    values, q = jacobi(a)
    truth = torch.linalg.eigvalsh(a)
    top = truth[:, -1:].abs()
    assert float(((values - truth).abs() / top).max()) < 1e-14
    assert float((q.mT @ q - torch.eye(rows)).abs().max()) < 1e-14
    assert float(((q * values[:, None]) @ q.mT - a).abs().div(top[..., None]).max()) < 1e-14


def test_zero():
    values, q = jacobi(torch.zeros(2, 3, 3, dtype=torch.float64))
    assert not values.any()
    torch.testing.assert_close(q @ q.mT, torch.eye(3, dtype=torch.float64).expand(2, 3, 3))
