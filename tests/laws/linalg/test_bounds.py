"""Upper bounds on sigma_max: never below the float64 truth, and as close above it as stated."""

import numpy as np
import pytest
import torch

from laws import oracle
from laws.inputs import EMPTY, exact, gaussian
from laws.linalg.spectra import SHAPES, spectra, with_spectrum
from surefoot.linalg.bounds import is_below, upper_bound

SQUARINGS = (1, 2, 6, 12)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def truth(x: torch.Tensor) -> float:
    return float(oracle.singular_values(exact(x))[0])


def allowed(m: int, n: int, squarings: int) -> float:
    """The stated factor above the truth, plus the result's own rounding."""
    k = min(m, n)
    return k**2.0 ** -(squarings + 1) * (1 + k * (75 + max(m, n) / 64) * 2.0**-24) + 2e-7


@pytest.mark.parametrize(
    ("squarings", "dtype"),
    [
        pytest.param(j, dtype, marks=() if j == 6 or dtype == torch.float32 else pytest.mark.slow, id=f"{j}-{dtype}")
        for j in SQUARINGS
        for dtype in DTYPES
    ],
)
def test_never_below_and_as_tight_as_stated(squarings, dtype):
    for m, n in (*SHAPES, (64, 64), (32, 200)):
        for name, values in spectra(m, n):
            x = torch.tensor(values / np.abs(values).max()).to(dtype)
            ratio = float(upper_bound(x, squarings)) / truth(x)
            assert ratio >= 1 - (1e-14 if dtype == torch.float64 else 0), ((m, n), name, ratio - 1)
            assert ratio <= allowed(m, n, squarings), ((m, n), name, ratio)


@pytest.mark.parametrize("scale", [1e-45, 1e-42, 1e-38, 1e-30, 1e-20, 1e-10, 1e10, 1e20, 1e30])
def test_scales(scale):
    """No squaring overflows or vanishes, down to the subnormal numbers."""
    for values in (gaussian((12, 20), 1), torch.eye(9), torch.ones(5, 7), torch.eye(4, 6) * (torch.arange(6) == 0)):
        x = (values.double() * scale).float()
        bound, top = float(upper_bound(x)), truth(x)
        assert top <= bound <= 1.06 * top + 1.5e-45


def test_flat_spectrum_at_width():
    """The worst case for rounding: all singular values equal, 256 of them; and bits that always round one way."""
    for x in (
        with_spectrum(256, 256, np.ones(256)),
        np.eye(256) * (1 + 2.0**-12 + 2.0**-23),
        np.full((256, 256), 1 / 3),
    ):
        x = torch.tensor(x).float()
        for squarings in SQUARINGS:
            ratio = float(upper_bound(x, squarings)) / truth(x)
            assert 1 <= ratio <= allowed(256, 256, squarings)


def test_every_rounding_is_allowed_for(monkeypatch):
    """Products that round down as far as float32 sums of n terms can: the bound must still be one."""
    from surefoot.linalg import bounds

    honest = bounds._gram

    def pessimist(b: torch.Tensor) -> torch.Tensor:
        worst = (64 + b.shape[-1] / 64) * 2.0**-24
        return honest(b) - worst * honest(b.abs())

    monkeypatch.setattr(bounds, "_gram", pessimist)
    for name, values in spectra(48, 96):
        x = torch.tensor(values).float()
        for squarings in SQUARINGS:
            assert float(upper_bound(x, squarings)) >= truth(x), (name, squarings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype):
    x = gaussian((3, 40, 30), 2)
    with torch.autocast("cpu", dtype):
        inside = upper_bound(x), is_below(x, 12.0)
    assert inside[0].dtype == torch.float32
    assert torch.equal(inside[0], upper_bound(x))
    assert torch.equal(inside[1], is_below(x, 12.0))


def test_batch_is_a_loop_and_input_untouched():
    x = gaussian((2, 3, 9, 14), 3)
    x[0, 1] = 0
    x[1, 2] *= 1e20
    before = x.clone()
    for y in (x, x.mT, x[:, ::2, 1:, ::3]):
        bound, below = upper_bound(y), is_below(y, 8.0)
        for index in np.ndindex(*y.shape[:-2]):
            torch.testing.assert_close(bound[index], upper_bound(y[index]), rtol=1e-6, atol=0)
            assert below[index] == is_below(y[index], 8.0)
    assert upper_bound(x)[0, 1] == 0
    assert torch.equal(x, before)


def test_empty():
    for shape in EMPTY[2]:
        assert torch.equal(upper_bound(torch.zeros(shape)), torch.zeros(shape[:-2]))
        assert torch.equal(is_below(torch.zeros(shape), 1.0), torch.ones(shape[:-2], dtype=torch.bool))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_finite_is_never_certified(bad):
    x = gaussian((2, 4, 5), 4)
    x[1, 2, 3] = bad
    assert upper_bound(x)[0].isfinite()
    assert not upper_bound(x)[1].isfinite()
    assert is_below(x, 1e3).tolist() == [True, False]
    assert is_below(x, float("inf")).tolist() == [True, False]


def test_no_squaring_is_refused():
    with pytest.raises(AssertionError):
        upper_bound(torch.eye(2), 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_below_decides(dtype):
    """True from the stated rounding above the truth on, False below it, on every spectrum and at every scale."""
    for m, n in SHAPES:
        margin = min(m, n) * (m + n + 8) * 2.0**-52 + 2e-14
        for name, values in spectra(m, n):
            for scale in (1.0, 1e-4) if dtype == torch.float16 else (1.0, 1e-30, 1e30):
                x = torch.tensor(values / np.abs(values).max() * scale).to(dtype)
                if not (top := truth(x)):
                    continue
                assert is_below(x, top * (1 + margin)), ((m, n), name, scale)
                assert not is_below(x, top * (1 - 2e-14)), ((m, n), name, scale)


def test_is_below_takes_a_limit_per_matrix():
    x = torch.eye(3).expand(2, 2, 3, 3)
    limits = torch.tensor([[0.5, 2.0], [-2.0, float("inf")]])[..., None, None]
    assert is_below(x, limits).tolist() == [[False, True], [False, True]]
    assert not is_below(torch.eye(3), float("nan"))


def test_is_below_allows_for_rounding(monkeypatch):
    """At the truth itself it is proven only if the Gram matrix is exact: with the allowance gone it would say so."""
    hits = sum(
        bool(is_below(torch.tensor(with_spectrum(9, 12, np.ones(9), seed)), 1 + sign * 1e-15))
        for seed in range(20)
        for sign in (-1, 0, 1)
    )
    assert hits == 0
