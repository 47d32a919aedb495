"""Power iteration: Ritz values are lower bounds, how soon directions are detected, and the weaker law of its clip."""

import numpy as np
import pytest
import torch

from laws import oracle
from laws.inputs import exact, gaussian, generator
from laws.linalg.spectra import SHAPES, spectra, with_spectrum
from surefoot.linalg.power_iteration import clip_leading, power_iteration, random_vectors

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
RITZ_BY_DEFAULT = ((1, torch.float32), (5, torch.bfloat16), (50, torch.float64))


def top(x: torch.Tensor) -> float:
    return float(oracle.singular_values(exact(x))[0])


def assert_triples(x: torch.Tensor, v: torch.Tensor, s: torch.Tensor, label: object = "") -> None:
    """v orthonormal, x v orthogonal of norms s, s sorted and below the singular values."""
    a, columns, values = exact(x), exact(v), exact(s)
    size = max(float(np.abs(a).max()), 1e-300)
    a, values = a / size, values / size
    scale = oracle.singular_values(a)[0]
    np.testing.assert_allclose(columns.T @ columns, np.eye(v.shape[-1]), atol=5e-6, err_msg=str(label))
    images = a @ columns
    np.testing.assert_allclose(images.T @ images, np.diag(values**2), atol=1e-5 * scale**2, err_msg=str(label))
    assert (np.diff(values) <= 0).all(), label
    truth = np.resize(oracle.singular_values(a), len(values)) * (np.arange(len(values)) < min(a.shape))
    assert (values <= truth + 2e-6 * scale).all(), (label, values - truth)


@pytest.mark.parametrize(
    ("k", "dtype"),
    [
        pytest.param(k, dtype, marks=() if (k, dtype) in RITZ_BY_DEFAULT else pytest.mark.slow, id=f"{k}-{dtype}")
        for k in (1, 2, 5, 50)
        for dtype in DTYPES
    ],
)
def test_ritz_triples(k, dtype):
    """On every spectrum and scale, for k above the rank and the sizes too, after one step and after several."""
    for m, n in SHAPES:
        for name, values in spectra(m, n):
            for scale in (1.0, 1e-30, 1e30):
                x = torch.tensor(values / np.abs(values).max() * scale).to(dtype)
                v = random_vectors(x, k)
                assert v.shape == (n, min(k, n))
                for iterations in (1, 3):
                    v, s = power_iteration(x, v, iterations)
                    assert v.dtype == s.dtype == torch.promote_types(dtype, torch.float32)
                    assert_triples(x, v, s, ((m, n), name, scale, iterations))


def test_converges_to_the_leading_triples():
    for m, n in ((24, 24), (40, 12), (12, 40)):
        x = torch.tensor(with_spectrum(m, n, 0.7 ** np.arange(min(m, n)))).float()
        v, s = power_iteration(x, random_vectors(x, 3), iterations=20)
        _, values, vt = np.linalg.svd(exact(x))
        np.testing.assert_allclose(exact(s), values[:3], rtol=1e-5)
        np.testing.assert_allclose(np.abs(vt[:3] @ exact(v)), np.eye(3), atol=1e-3)


def test_one_iteration_a_step_follows_a_drifting_matrix():
    """One iteration a step from the previous vectors follows a slow change; from random vectors it does not."""
    x = torch.tensor(with_spectrum(32, 48, np.linspace(1, 0.5, 32))).float()
    v = random_vectors(x, 4)
    for step in range(60):
        x = x + 0.01 * gaussian((32, 48), step) / 12
        v, s = power_iteration(x, v)
        if step >= 20:
            assert float(s[0]) >= 0.995 * top(x)
    assert float(power_iteration(x, random_vectors(x, 4))[1][0]) < 0.98 * top(x)


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize(("factor", "steps"), [(10.0, 1), (3.0, 2), (2.0, 3), (1.5, 4)])
def test_a_planted_direction_orthogonal_to_v_is_detected(k, factor, steps):
    """A rank-1 term of `factor` times sigma_max, exactly orthogonal to the previous vectors, spread over all rows."""
    for seed in range(5):
        x = gaussian((96, 96), seed, torch.float64) / (2 * 96**0.5)
        v = power_iteration(x, random_vectors(x, k), iterations=100)[0]
        b = gaussian((96,), 100 + seed, torch.float64)
        b -= v @ (v.mT @ b)
        b /= b.norm()
        a = gaussian((96,), 200 + seed).sign().double() / 96**0.5
        x = x - torch.outer(x @ b, b) + factor * torch.outer(a, b)
        assert float((x.mT @ (x @ v)).mT.matmul(b).abs().max()) < 3 * factor * 0.2  # xᵀ x v has almost no part along b
        for _ in range(steps):
            v, s = power_iteration(x, v)
        assert float(s[0]) >= 0.98 * top(x), (seed, float(s[0]) / top(x))


@pytest.mark.parametrize("rows", [1, 2, 30])
def test_a_direction_outside_the_krylov_space_of_v_is_detected(rows):
    """v consists of exact singular vectors; the new term is orthogonal on both sides, in a few rows or in many."""
    x = torch.zeros(40, 50)
    x[:3, :3] = torch.eye(3) * 4
    v = power_iteration(x, random_vectors(x, 3))[0]
    assert power_iteration(x, v)[1].tolist() == pytest.approx([4, 4, 4])
    x[3 : 3 + rows, 20] = 5 / rows**0.5
    v, s = power_iteration(x, v)
    assert float(s[0]) == pytest.approx(5, rel=1e-5)
    assert abs(float(v[20, 0])) == pytest.approx(1, rel=1e-4)


def test_a_direction_beside_a_much_larger_one_is_detected():
    """Every row is full of a direction 1e4 times larger, which is in v; v's other column is a smaller one."""
    rows, right = torch.arange(40), torch.linalg.qr(gaussian((50, 50), 14)).Q
    ones, pairs, odd = (torch.where(rows % period < period / 2, 1.0, -1.0) / 40**0.5 for period in (80, 4, 2))
    x = 1e4 * torch.outer(ones, right[0]) + torch.outer(pairs, right[1])
    v = power_iteration(x, random_vectors(x, 2), iterations=4)[0]
    v, s = power_iteration(x + 5 * torch.outer(odd, right[20]), v)
    assert s.tolist() == pytest.approx([1e4, 5], rel=1e-2)


def test_zero_matrix_zero_vectors_and_empty():
    zero = torch.zeros(2, 5, 4)
    v, s = power_iteration(zero, random_vectors(zero, 2))
    assert not s.any()
    assert_triples(zero[0], v[0], s[0])
    assert torch.equal(clip_leading(zero, v, s, 0.0), zero)
    x = gaussian((2, 5, 4), 1)
    v, s = power_iteration(x, torch.zeros(2, 4, 3))
    for index in range(2):
        assert_triples(x[index], v[index], s[index])
    for shape in ((0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 4), (3, 0)):
        empty = torch.zeros(shape)
        v, s = power_iteration(empty, random_vectors(empty, 2))
        assert v.shape == (*shape[:-2], shape[-1], min(2, shape[-1]))
        assert s.shape == (*shape[:-2], min(2, shape[-1]))
        assert not s.any()
        assert clip_leading(empty, v, s, 1.0).shape == shape


def test_batch_is_a_loop():
    x = gaussian((2, 3, 20, 14), 3)
    x[0, 1] = 0
    x[1, 2] *= 1e25
    v, s = power_iteration(x, random_vectors(x, 4), iterations=30)
    clipped = clip_leading(x, v, s, 5.0)
    for index in np.ndindex(2, 3):
        _, alone = power_iteration(x[index], random_vectors(x[index], 4), iterations=30)
        torch.testing.assert_close(s[index], alone, rtol=1e-4, atol=1e-5)
        assert_triples(x[index], v[index], s[index])
        torch.testing.assert_close(
            clipped[index], clip_leading(x[index], v[index], s[index], 5.0), rtol=1e-4, atol=1e-4
        )


def test_same_input_same_bits():
    """Deterministic: a resumed run continues bit for bit, also if its v is loaded in another memory layout."""
    x = gaussian((3, 16, 24), 4)
    v = random_vectors(x, 3)
    torch.testing.assert_close(v.mT @ v, torch.eye(3).expand(3, 3, 3))
    assert torch.equal(v, random_vectors(x.double(), 3).float())
    assert not torch.equal(v, random_vectors(x, 3, seed=1))
    first, second = power_iteration(x, v), power_iteration(x.clone(), v.mT.contiguous().mT)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    torch.rand(5)
    assert torch.equal(random_vectors(x, 3), v)


def test_autocast_changes_nothing_and_arguments_stay():
    x, half = gaussian((20, 30), 5), gaussian((20, 30), 5).bfloat16()
    v = random_vectors(x, 3)
    before = x.clone(), v.clone()
    with torch.autocast("cpu", torch.bfloat16):
        inside = power_iteration(x, v)
        clipped = clip_leading(x, *inside, 2.0)
    outside = power_iteration(x, v)
    assert torch.equal(inside[0], outside[0])
    assert torch.equal(inside[1], outside[1])
    assert torch.equal(clipped, clip_leading(x, *outside, 2.0))
    assert torch.equal(x, before[0])
    assert torch.equal(v, before[1])
    assert torch.equal(power_iteration(half, v)[1], power_iteration(half.float(), v)[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_clip_is_exact_on_the_span_of_v(dtype):
    """Equal to the SVD's clip where every direction above t is in v; the rest is unchanged."""
    for m, n in ((24, 16), (16, 24)):
        for scale in (1.0, 1e-25, 1e25):
            x = torch.tensor(with_spectrum(m, n, np.r_[5, 4, 3, np.full(13, 0.5)]) * scale).to(dtype)
            v, s = power_iteration(x, random_vectors(x, 4), iterations=20)
            for t in (3.5, 1.0, 0.0):
                limit = torch.full((1, 1), t * scale) if t else t
                clipped = clip_leading(x, v, s, limit)
                assert clipped.dtype == dtype
                if t:
                    truth = oracle.clip_spectrum(exact(x), t * scale)
                    atol = (4e-2 if dtype == torch.bfloat16 else 1e-5) * scale
                    np.testing.assert_allclose(exact(clipped), truth, atol=atol)
                else:
                    assert oracle.singular_values(exact(clipped))[4] <= 0.52 * scale


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_clip_below_the_threshold_is_bit_exact(dtype):
    """Also beside a matrix that is clipped, and for negative zeros, one matrix and one vector included."""
    x = gaussian((2, 12, 9), 6, dtype)
    x[0, 3:6] = -0.0
    x[1] *= 10
    v, s = power_iteration(x, random_vectors(x, 2))
    limits = torch.stack([s[0, 0], torch.full_like(s[0, 0], 3)])[:, None, None]
    clipped = clip_leading(x, v, s, limits)
    assert torch.equal(clipped[0], x[0])
    assert torch.equal(clipped[0].signbit(), x[0].signbit())
    assert not torch.equal(clipped[1], x[1])
    alone = clip_leading(x[0], *power_iteration(x[0], random_vectors(x[0], 1)), 100.0)
    assert torch.equal(alone.signbit(), x[0].signbit())
    same = clip_leading(x, v, s, float("inf"))
    assert torch.equal(same, x)
    assert same.data_ptr() != x.data_ptr()


def settled(k: int, rank: int, iterations: int = 1) -> float:
    """The largest norm from the first clip on: a persistent pull of this rank by 0.05 a step, clipped at 5."""
    rng = generator(11, rank)
    a, b = (np.linalg.qr(rng.standard_normal((64, rank)))[0] for _ in range(2))
    pull = torch.tensor(0.05 * a @ b.T).float()
    w = gaussian((64, 64), 12) / 16
    v = random_vectors(w, k)
    peak = 0.0
    for step in range(300):
        w = w + pull
        v, s = power_iteration(w, v, iterations)
        w = clip_leading(w, v, s, 5.0)
        if step % 5 == 0:
            peak = max(peak, top(w))
    return peak


@pytest.mark.parametrize(("k", "rank"), [(1, 1), (8, 8), (16, 8)])
def test_holds_the_radius_against_a_pull_of_rank_k(k, rank):
    assert 4.99 <= settled(k, rank) <= 5.0 * (1 + 1e-2)


@pytest.mark.parametrize(("k", "rank", "low", "high"), [(1, 8, 5.5, 8.0), (4, 8, 5.2, 6.5), (8, 64, 6.0, 8.0)])
def test_misses_it_against_a_pull_of_higher_rank(k, rank, low, high):
    """The weaker law: the norm settles above the radius, but it settles. Free, the pull alone adds 15."""
    assert low <= settled(k, rank) <= high


@pytest.mark.parametrize(
    "call", [lambda x: random_vectors(x, 0), lambda x: power_iteration(x, random_vectors(x, 1), 0)]
)
def test_bad_requests_are_refused(call):
    with pytest.raises(AssertionError):
        call(torch.eye(3))
