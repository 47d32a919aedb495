"""mclip against the float64 SVD. The norm alone proves nothing: small singular directions must be right too."""

import numpy as np
import pytest
import torch

import surefoot
from laws import oracle
from laws.inputs import EMPTY, exact, gaussian, generator
from laws.linalg.spectra import SHAPES, spectra, with_spectrum
from surefoot.linalg import clip

METHODS = ("svd", "gram", "auto")  # exact; msign's stated error, 2e-5 sigma_max, has its own tests
# The largest entry of the error over the threshold: one rounding to the dtype, or 1e-16 (sigma_max/t)**2 for gram.
EPS = {torch.float64: 1e-11, torch.float32: 1e-6, torch.bfloat16: 2.0**-8}

each_method = pytest.mark.parametrize("method", METHODS)
with_msign = pytest.mark.parametrize("method", [*METHODS, "msign"])
each_dtype = pytest.mark.parametrize("dtype", list(EPS), ids=lambda dtype: str(dtype).removeprefix("torch."))


def assert_clipped(w: torch.Tensor, threshold: float, method: str, label: object) -> None:
    clipped = surefoot.mclip(w, threshold, method=method)
    assert clipped.dtype == w.dtype
    assert clipped.shape == w.shape
    truth = oracle.clip_spectrum(exact(w), threshold)
    error = np.abs(exact(clipped) - truth).max()
    assert error <= EPS[w.dtype] * threshold, (label, error / threshold)
    top = oracle.singular_values(exact(clipped))[0]
    assert top <= threshold * (1 + (4e-3 if w.dtype == torch.bfloat16 else 4 * EPS[w.dtype])), (label, top)


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        pytest.param(
            m, dtype, marks=() if m == "auto" or dtype == torch.float32 else pytest.mark.slow, id=f"{m}-{dtype}"
        )
        for m in METHODS
        for dtype in EPS
    ],
)
def test_agrees_with_svd(method, dtype):
    """Ill-conditioned, deficient, spiked and structured spectra; thresholds through the whole spectrum."""
    for m, n in SHAPES:
        for name, values in spectra(m, n):
            w = torch.tensor(values).to(dtype)
            top = float(oracle.singular_values(exact(w))[0])
            for share in (0.9999, 0.9, 0.3, 1e-2):
                assert_clipped(w, share * top, method, ((m, n), name, share))


@each_method
@pytest.mark.parametrize("condition", [1e6, 1e8, 1e12])
def test_condition_number(method, condition):
    """Small singular values survive: clipping the large ones must not smear over them."""
    values = np.geomspace(1, 1 / condition, 10)
    for m, n in ((10, 10), (10, 30), (30, 10)):
        w = torch.tensor(with_spectrum(m, n, values))
        for threshold in (0.5, 0.05):
            assert_clipped(w, threshold, method, (m, n, condition))
            clipped = exact(surefoot.mclip(w, threshold, method=method))
            u, _, vt = np.linalg.svd(exact(w), full_matrices=False)
            np.testing.assert_allclose(
                np.diag(u.T @ clipped @ vt.T), np.minimum(values, threshold), atol=1e-11, rtol=1e-6
            )


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", [*SHAPES, (64, 64), (48, 160)])
def test_msign_errs_as_stated(shape, dtype):
    """By 2e-5 sigma_max at any rank and condition, also in the small singular directions and close to t."""
    k = min(shape)
    near = np.r_[1.0, 0.9 + np.geomspace(1e-6, 0.1, k - 1) * np.where(np.arange(k - 1) % 2, 1, -1)]
    more = (("near t", with_spectrum(*shape, near)), ("1e8", with_spectrum(*shape, np.geomspace(1, 1e-8, k))))
    for name, values in (*spectra(*shape), *more):
        w = torch.tensor(values).to(dtype)
        top = float(oracle.singular_values(exact(w))[0])
        for share in (0.9, 0.3, 1e-2):
            clipped = exact(surefoot.mclip(w, share * top, method="msign"))
            truth = exact(surefoot.mclip(w.double(), share * top, method="svd"))
            error = oracle.singular_values(clipped - truth)[0]
            assert error <= 2e-5 * top, (name, share, error / top)


@each_method
def test_far_above_the_threshold(method):
    """sigma_max / t = 1e8 (an explosion): the feasible point is still the nearest one for svd and auto."""
    w = with_spectrum(12, 9, np.geomspace(1e8, 1, 9))
    clipped = exact(surefoot.mclip(torch.tensor(w), 2.0, method=method))
    if method == "gram":  # states an error of 1e-16 (sigma_max/t)**2, which says nothing here; it stays finite
        assert np.isfinite(clipped).all()
        return
    np.testing.assert_allclose(clipped, oracle.clip_spectrum(w, 2.0), atol=1e-6)
    np.testing.assert_allclose(
        exact(surefoot.mclip(torch.tensor(w).float(), 2.0, method=method)),
        oracle.clip_spectrum(exact(torch.tensor(w).float()), 2.0),
        atol=1e-5,
    )


@each_dtype
@each_method
def test_ties_at_the_threshold(method, dtype):
    """Singular values equal to t, on an orthogonal matrix and within a mixed spectrum."""
    eye = torch.eye(6, 4, dtype=dtype) * 2
    assert torch.equal(surefoot.mclip(eye, 2.0, method=method), eye)
    assert_clipped(eye, 1.0, method, "halved")
    mixed = torch.tensor(with_spectrum(8, 5, np.array([3.0, 2.0, 2.0, 2.0, 1.0]))).to(dtype)
    assert_clipped(mixed, 2.0, method, "mixed")
    assert_clipped(torch.tensor(with_spectrum(6, 6, np.full(6, 2.0))).to(dtype), 2.0, method, "all tied")


@each_dtype
@with_msign
def test_below_the_threshold_is_bit_exact(method, dtype):
    for m, n in SHAPES:
        if method == "msign" and dtype == torch.bfloat16:
            continue
        w = gaussian((m, n), 4, dtype)
        bound = 1.001 * float(oracle.singular_values(exact(w))[0])
        same = surefoot.mclip(w, bound, method=method)
        assert torch.equal(same, w)
        assert same.data_ptr() != w.data_ptr()
        assert torch.equal(surefoot.mclip(w, float("inf"), method=method), w)


def test_auto_decomposes_once_and_only_what_is_above(monkeypatch):
    """A batch below the threshold takes no eigendecomposition; one matrix above it takes one, of that matrix."""
    decomposed = []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda x: decomposed.append(x.shape) or eigh(x))
    w = gaussian((2, 3, 8, 12), 9)
    top = float(oracle.singular_values(exact(w).reshape(-1, 12))[0])
    surefoot.mclip(w, top)
    assert decomposed == []
    w[1, 1] *= 100
    clipped = surefoot.mclip(w, top)
    assert decomposed == [(1, 8, 8)]
    assert torch.equal(clipped.ne(w).any(-1).any(-1), torch.tensor([[False] * 3, [False, True, False]]))


def test_auto_on_an_accelerator_clips_by_products_up_to_twice_the_threshold(monkeypatch):
    """Tried on the CPU: msign where sigma_max is in (t, 2 t], an eigendecomposition above that and in float64."""
    decomposed = []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda x: decomposed.append(x.shape) or eigh(x))
    monkeypatch.setattr(clip, "EIGH_DEVICES", frozenset())
    w = gaussian((4, 8, 12), 13)
    w = w / torch.linalg.svdvals(w)[:, :1, None] * torch.tensor([0.9, 1.5, 1.9, 3.0])[:, None, None]
    clipped = surefoot.mclip(w, 1.0)
    assert decomposed == [(1, 8, 8)]
    assert torch.equal(clipped[0], w[0])
    for index in range(4):
        np.testing.assert_allclose(exact(clipped[index]), oracle.clip_spectrum(exact(w[index]), 1.0), atol=4e-5)
    surefoot.mclip(w.double(), 1.0)
    surefoot.mclip(w.bfloat16(), 1.0)
    assert decomposed[1:] == [(3, 8, 8)] * 2


@pytest.mark.parametrize("method", ["auto", "gram", "msign"])
def test_autocast_changes_nothing(method):
    w = gaussian((2, 24, 40), 10)
    with torch.autocast("cpu", torch.bfloat16):
        inside = surefoot.mclip(w, 3.0, method=method)
    assert torch.equal(inside, surefoot.mclip(w, 3.0, method=method))


@each_method
def test_all_above_gives_a_scaled_polar_factor(method):
    w = with_spectrum(9, 7, np.linspace(5, 2, 7))
    np.testing.assert_allclose(
        exact(surefoot.mclip(torch.tensor(w), 1.5, method=method)), 1.5 * oracle.polar(w), atol=1e-11
    )


@with_msign
def test_batch_mixes_inside_outside_zero_and_scales(method):
    """Each matrix of a batch by its own spectrum: inside bit for bit, zero exactly, tiny and huge ones right."""
    w = gaussian((5, 6, 4), 1, torch.float64)
    w[0] *= 0.01
    w[2] = 0
    w[3] *= 1e3
    w[4, 2:] = 0
    before = w.clone()
    clipped = surefoot.mclip(w, 1.0, method=method)
    assert torch.equal(clipped[0], w[0])
    assert torch.equal(clipped[2], w[2])
    for index in (1, 3, 4):
        atol = 2e-5 * float(oracle.singular_values(exact(w[index]))[0]) if method == "msign" else 1e-9
        np.testing.assert_allclose(exact(clipped[index]), oracle.clip_spectrum(exact(w[index]), 1.0), atol=atol)
        torch.testing.assert_close(clipped[index], surefoot.mclip(w[index], 1.0, method=method), rtol=1e-9, atol=1e-9)
    assert torch.equal(w, before)


@each_method
def test_threshold_per_matrix(method):
    w = gaussian((2, 3, 5, 4), 7, torch.float64)
    thresholds = torch.tensor([[0.5, 1.0, 2.0], [100.0, 0.0, 1e-3]], dtype=torch.float64)
    clipped = surefoot.mclip(w, thresholds[..., None, None], method=method)
    assert torch.equal(clipped[1, 0], w[1, 0])
    assert not clipped[1, 1].any()
    for index in ((0, 0), (0, 1), (0, 2), (1, 2)):
        truth = oracle.clip_spectrum(exact(w[index]), float(thresholds[index]))
        np.testing.assert_allclose(exact(clipped[index]), truth, atol=1e-8 * float(thresholds[index]))


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
@with_msign
def test_scale_free(method, scale):
    w = gaussian((7, 5), 8)
    clipped = surefoot.mclip(w * scale, 1.5 * scale, method=method) / scale
    torch.testing.assert_close(clipped, surefoot.mclip(w, 1.5, method=method), rtol=1e-5, atol=1e-5)


@with_msign
def test_zero_threshold_zero_matrix_and_empty(method):
    assert not surefoot.mclip(gaussian((4, 3), 2), 0.0, method=method).any()
    zero = torch.zeros(2, 4, 3)
    assert torch.equal(surefoot.mclip(zero, 1.0, method=method), zero)
    assert torch.equal(surefoot.mclip(zero, 0.0, method=method), zero)
    for shape in EMPTY[2]:
        assert surefoot.mclip(torch.zeros(shape), 1.0, method=method).shape == shape


@each_method
def test_nearest_point_and_idempotent(method):
    """<w - P, z - P> <= 0 for z of the ball: the best z is t times the polar factor of w - P."""
    for m, n in SHAPES:
        w = generator(3, m, n).standard_normal((m, n))
        t = 0.4 * float(oracle.singular_values(w)[0])
        p = exact(surefoot.mclip(torch.tensor(w), t, method=method))
        worst = t * oracle.singular_values(w - p).sum() - ((w - p) * p).sum()
        assert worst <= 1e-9 * (w**2).sum()
        np.testing.assert_allclose(exact(surefoot.mclip(torch.tensor(p), t, method=method)), p, atol=1e-12)


@with_msign
def test_input_untouched_result_not_aliased_strides_kept(method):
    base = gaussian((6, 9), 5, torch.float64)
    before = base.clone()
    for view in (base, base.mT, base[::2, 1::3]):
        for threshold in (0.7, 1e9):
            torch.testing.assert_close(
                surefoot.mclip(view, threshold, method=method),
                surefoot.mclip(view.contiguous(), threshold, method=method),
                rtol=1e-10,
                atol=1e-10,
            )
            surefoot.mclip(view, threshold, method=method).fill_(7)
    assert torch.equal(base, before)


def test_a_batch_is_clipped_in_pieces_that_fit_the_cache(monkeypatch):
    """Each with its own thresholds, and the same to the last bit."""
    x, limits = gaussian((7, 12, 20), 3), torch.linspace(1, 7, 7)[:, None, None]
    whole, sizes = surefoot.mclip(x, limits), []
    monkeypatch.setitem(clip.METHODS, "auto", lambda piece, t: sizes.append(len(piece)) or clip._auto(piece, t))
    monkeypatch.setattr(clip, "PIECE", 3 * 12 * 20)
    assert torch.equal(surefoot.mclip(x, limits), whole)
    monkeypatch.setattr(clip, "PIECE", 1)
    assert torch.equal(surefoot.mclip(x[:2].mT, limits[:2]), whole[:2].mT)
    assert sizes == [3, 3, 1, 1, 1]


def test_bad_requests_are_refused():
    with pytest.raises(ValueError, match=r"auto, svd, gram, msign"):
        surefoot.mclip(torch.eye(2), 1.0, method="newton")
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(ValueError, match="loses the bound"):
            surefoot.mclip(torch.eye(2, dtype=dtype), 0.5, method="msign")
    for threshold in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="threshold"):
            surefoot.mclip(torch.eye(2), threshold)


@pytest.mark.parametrize("x", [torch.ones(4, 4, dtype=torch.int64), torch.ones(4), torch.ones(4, 4) * 1j], ids=str)
def test_what_is_no_real_matrix_is_refused(x):
    with pytest.raises(ValueError, match=r"mclip takes real \(\.\.\., out, in\) matrices, not shape"):
        surefoot.mclip(x, 1.0)
