"""`max |x|` where the obvious formula fails: no entries, NaN, infinities, zeros."""

import pytest
import torch

from laws.inputs import gaussian
from surefoot.linalg.bounds import max_abs, max_abs_or_one, near_one


@pytest.mark.parametrize("dim", [0, -1, (1, 2), (-2, -1), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_it_is_the_largest_absolute_value(dim, dtype):
    x = gaussian((4, 5, 6), 0, dtype)
    assert torch.equal(max_abs(x, dim), x.abs().amax(dim, keepdim=True))


def test_nan_and_infinity_are_passed_on():
    x = torch.tensor([[1.0, float("nan")], [-float("inf"), 2.0], [-0.0, 0.0]])
    assert max_abs(x, -1).isnan().flatten().tolist() == [True, False, False]
    assert max_abs(x, -1).flatten()[1:].tolist() == [float("inf"), 0.0]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 0, 3), (2, 3, 0), (0, 2, 3)], ids=str)
@pytest.mark.parametrize("dim", [-1, -2, (-2, -1)], ids=str)
def test_no_entries(shape, dim):
    x = torch.zeros(shape)
    assert torch.equal(max_abs(x, dim), x.sum(dim, keepdim=True))


def test_a_zero_matrix_is_divided_by_one():
    x = torch.stack([gaussian((3, 4), 1), torch.zeros(3, 4)])
    assert max_abs_or_one(x).shape == (2, 1, 1)
    assert (x / max_abs_or_one(x)).abs().amax((1, 2)).tolist() == [1, 0]


@pytest.mark.parametrize("power", [-120, -60, 0, 60, 125])
def test_a_power_of_two_is_taken_out_exactly(power):
    x = gaussian((3, 5)).clamp(-1, 1)
    assert torch.equal(near_one(x, (-2, -1)), x / 2)
    found = near_one(x * 2.0**power, (-2, -1))
    assert torch.equal(found, x / 2 * 2.0 ** min(0, power + 101))
    assert torch.equal(near_one(torch.zeros(2, 3), (-1,)), torch.zeros(2, 3))
