"""The operations under the iterations, on both sides of the sizes at which they change how they compute."""

import pytest
import torch

from laws.inputs import gaussian
from surefoot.linalg import ops
from surefoot.linalg.coefficients import HALLEY
from surefoot.linalg.ops import TORCH

SHAPES = ((1, 1), (5, 9), (63, 2000), (64, 1024), (70, 1001), (128, 129), (129, 512), (258, 259))


def relative(value: torch.Tensor, truth: torch.Tensor) -> float:
    return float((value.double() - truth).abs().max() / truth.abs().max())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_symmetric_products(shape):
    x = gaussian((3, *shape), 0)
    gram = TORCH.gram(x)
    exact = x.double() @ x.double().mT
    assert torch.equal(gram, gram.mT)
    assert relative(gram, exact) < 1e-5
    a = gram / gram.abs().max()
    b = a @ a + 2 * a
    wide = a.double(), b.double()
    assert relative(TORCH.product(a, b), wide[0] @ wide[1]) < 1e-5
    assert relative(TORCH.quadratic(a, 3.0, -0.5), 3 * wide[0] - 0.5 * wide[0] @ wide[0]) < 1e-5


@pytest.mark.parametrize("count", [1, ops.BATCH])
@pytest.mark.parametrize("rows", [1, 16, 17, 32, 33, 65, 100, 127, 128, 129, 200])
def test_inverse_of_an_ill_conditioned_matrix(rows, count):
    """Condition 1e4, from a spectrum that Gram matrices have: a few large eigenvalues, many small."""
    q, _ = torch.linalg.qr(gaussian((count, rows, rows), 1, torch.float64))
    values = 1 + 1e4 * torch.arange(1, rows + 1, dtype=torch.float64) ** -2.0
    a = (q * values @ q.mT).float()
    a = (a + a.mT) / 2
    inverse = TORCH.inverse(a)
    torch.testing.assert_close(inverse, inverse.mT)
    assert relative(inverse, torch.linalg.inv(a.double())) < 2e-3


def test_batches_of_small_matrices_are_inverted_by_halves(monkeypatch):
    """The fast path really runs, for enough matrices of few enough rows."""
    calls = []
    monkeypatch.setattr(ops, "_inverse_by_halves", lambda a: calls.append(len(a)) or a)
    for count, rows in ((ops.BATCH, 128), (ops.BATCH - 1, 128), (ops.BATCH, 129), (ops.BATCH, 32), (ops.BATCH, 33)):
        TORCH.inverse(torch.eye(rows).expand(count, -1, -1))
    assert calls == [ops.BATCH] * 2


def test_a_tall_matrix_stays_tall():
    """The direction of a tall weight has the weight's memory layout."""
    tall, a = gaussian((3, 70, 20), 0), gaussian((3, 20, 20), 1)
    product = TORCH.apply(a + a.mT, tall.mT)
    assert product.mT.is_contiguous()
    assert relative(product, (a + a.mT).double() @ tall.mT.double()) < 1e-6


def test_halleys_polynomial_is_the_best_on_what_the_step_leaves():
    """Six alternations on the image of [.004, 1]; the largest value is 1."""
    (a, b, c), closing = HALLEY
    lowest = 4e-3 * (a + b * 1.6e-5) / (1 + c * 1.6e-5)
    x = torch.linspace(lowest, 1, 200_001, dtype=torch.float64)
    y = sum(coefficient * x ** (2 * i + 1) for i, coefficient in enumerate(closing))
    slope = y.diff().sign()
    extremes = torch.cat([y[:1], y[1:-1][slope[1:] != slope[:-1]], y[-1:]])
    expected = [0.981617, 1.0] * 3
    torch.testing.assert_close(extremes, torch.tensor(expected, dtype=torch.float64), atol=1e-5, rtol=0)
