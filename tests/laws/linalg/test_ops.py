"""The operations under the iterations, on both sides of the sizes at which they change how they compute."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from laws.inputs import gaussian
from surefoot.linalg import onednn_ops, ops, polar
from surefoot.linalg.coefficients import HALLEY
from surefoot.linalg.onednn_ops import ONEDNN
from surefoot.linalg.ops import TORCH

BOTH = pytest.mark.parametrize("by", [TORCH, ONEDNN], ids=["torch", "onednn"])

SHAPES = ((1, 1), (5, 9), (63, 2000), (64, 1024), (70, 1001), (128, 129), (129, 512), (258, 259))


def relative(value: torch.Tensor, truth: torch.Tensor) -> float:
    return float((value.double() - truth).abs().max() / truth.abs().max())


@BOTH
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_symmetric_products(shape, by):
    x = gaussian((3, *shape), 0)
    gram = by.gram(x)
    exact = x.double() @ x.double().mT
    assert torch.equal(gram, gram.mT)
    assert torch.equal(gram, by.gram(x.mT.contiguous().mT)) or by is TORCH  # a tall matrix is transposed first
    assert relative(gram, exact) < 1e-5
    a = gram / gram.abs().max()
    b = a @ a + 2 * a
    wide = a.double(), b.double()
    assert relative(by.product(a, b), wide[0] @ wide[1]) < 1e-5
    assert relative(by.quadratic(a, 3.0, -0.5), 3 * wide[0] - 0.5 * wide[0] @ wide[0]) < 1e-5


@pytest.mark.parametrize("count", [1, ops.BATCH])
@pytest.mark.parametrize(
    ("rows", "by"),
    [*((rows, TORCH) for rows in (1, 16, 17, 32, 33, 65, 100, 127, 128, 129, 200)), (200, ONEDNN), (517, ONEDNN)],
    ids=lambda x: str(x) if isinstance(x, int) else "onednn" if x is ONEDNN else "torch",
)
def test_inverse_of_an_ill_conditioned_matrix(rows, by, count):
    """Condition 1e4, from a spectrum that Gram matrices have: a few large eigenvalues, many small."""
    q, _ = torch.linalg.qr(gaussian((count, rows, rows), 1, torch.float64))
    values = 1 + 1e4 * torch.arange(1, rows + 1, dtype=torch.float64) ** -2.0
    a = (q * values @ q.mT).float()
    a = (a + a.mT) / 2
    inverse = by.inverse(a)
    torch.testing.assert_close(inverse, inverse.mT)
    assert relative(inverse, torch.linalg.inv(a.double())) < 2e-3


def test_batches_of_small_matrices_are_inverted_by_halves(monkeypatch):
    """The fast path really runs, for enough matrices of few enough rows."""
    calls = []
    monkeypatch.setattr(ops, "_inverse_by_halves", lambda a, multiply, leaf: calls.append(len(a)) or a)
    for count, rows in ((ops.BATCH, 128), (ops.BATCH - 1, 128), (ops.BATCH, 129), (ops.BATCH, 32), (ops.BATCH, 33)):
        TORCH.inverse(torch.eye(rows).expand(count, -1, -1))
    assert calls == [ops.BATCH] * 2


@BOTH
def test_a_tall_matrix_stays_tall(by):
    """The direction of a tall weight has the weight's memory layout."""
    tall, a = gaussian((3, 70, 20), 0), gaussian((3, 20, 20), 1)
    product = by.apply(a + a.mT, tall.mT)
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


@pytest.mark.parametrize(
    "b", [gaussian((2, 40, 70), 3), gaussian((2, 70, 40), 3).mT, gaussian((2, 90, 140), 3)[:, 9:49, 1:71]]
)
def test_onednn_multiplies_in_every_memory_layout(b):
    a = gaussian((2, 60, 50), 2)[:, 1:31, 5:45]
    for left in (a, a.contiguous(), a.mT.contiguous().mT):
        assert relative(onednn_ops.multiply(left, b), left.double() @ b.double()) < 1e-6


def test_what_is_fast_is_timed_on_one_thread(monkeypatch):
    before, during = torch.get_num_threads(), []
    monkeypatch.setattr(onednn_ops, "_best", lambda **_: during.append(torch.get_num_threads()) or {"torch": 0.0})
    torch.set_num_threads(2)
    try:
        onednn_ops._timed.__wrapped__()
        assert (during, torch.get_num_threads()) == ([1] * onednn_ops._has_onednn(), 2)
    finally:
        torch.set_num_threads(before)


def test_the_environment_says_what_is_fast(monkeypatch):
    """Words force; auto asks the clock once; a word that nobody knows is refused by name."""
    monkeypatch.setattr(onednn_ops, "_timed", lambda: frozenset({"onednn"}))
    for value, expected in (("", "onednn"), ("auto", "onednn"), ("torch", ""), ("torch,bfloat16", "bfloat16")):
        monkeypatch.setenv(onednn_ops.VARIABLE, value)
        assert [name for name in ("onednn", "bfloat16") if onednn_ops.is_fast(name)] == expected.split()
    monkeypatch.setenv(onednn_ops.VARIABLE, "onednn,mkl")
    with pytest.raises(ValueError, match=f"{onednn_ops.VARIABLE}.*unknown: mkl"):
        onednn_ops.is_fast("onednn")


def test_what_takes_three_quarters_of_the_time_is_fast(monkeypatch):
    """The decision from the times; where the clock is too coarse to tell, torch stays."""
    for times, expected in (((1.0, 0.7, 4.0), {"onednn"}), ((1.0, 0.9, 0.3), {"bfloat16"}), ((0.0, 0.0, 0.0), set())):
        monkeypatch.setattr(
            onednn_ops, "_best", lambda times=times, **products: dict(zip(products, times, strict=True))
        )
        assert onednn_ops._timed.__wrapped__() == expected


@pytest.mark.parametrize(("fast", "large"), [("torch", "qdwh_2"), ("onednn", "qdwh_2"), ("bfloat16", "qdwh_2_bf16")])
def test_auto_by_shape_and_by_what_is_fast(fast, large, monkeypatch):
    """One Gram matrix only where that is enough; bfloat16 and oneDNN where they are fast, for many rows."""
    monkeypatch.setenv(onednn_ops.VARIABLE, fast)
    names = {
        shape: polar.choose(torch.empty(shape))
        for shape in ((32, 64), (128, 2048), (31, 64), (32, 63), (128, 2049), (129, 512), (191, 400), (512, 192))
    }
    assert list(names.values()) == ["halley"] * 2 + ["qdwh_2"] * 5 + [large]
    many, few = torch.empty(1, 128, 512), torch.empty(1, 127, 512)
    assert (polar.choose_ops(many) is ONEDNN) == (fast == "onednn")
    traced = many.double(), few, many.clone().requires_grad_()
    assert all(polar.choose_ops(x) is TORCH for x in traced)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_derivatives_do_not_go_to_onednn(monkeypatch):
    """It would drop them in silence: by `torch.func` and by `forward_ad` they are those of torch's products."""
    x, t = gaussian((200, 300), 0), gaussian((200, 300), 1)
    tangents = []
    for value in ("torch", "onednn,bfloat16"):
        monkeypatch.setenv(onednn_ops.VARIABLE, value)
        tangents.append(torch.func.jvp(polar.msign, (x,), (t,))[1])
        with torch.autograd.forward_ad.dual_level():
            dual = polar.msign(torch.autograd.forward_ad.make_dual(x, t))
            tangents.append(torch.autograd.forward_ad.unpack_dual(dual).tangent)
    assert all(torch.equal(tangent, tangents[0]) for tangent in tangents)


def test_the_clock_is_asked_whatever_the_defaults_are(monkeypatch):
    """A default device and dtype, autocast, fake tensors; not where oneDNN is switched off, where a wish is refused."""
    plain = onednn_ops._timed.__wrapped__()
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16), FakeTensorMode():
        torch.set_default_dtype(torch.float64)
        try:
            assert onednn_ops._timed.__wrapped__() == plain
        finally:
            torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(onednn_ops, "_best", lambda **products: {"torch": 1.0, "onednn": 0.1})
    torch.backends.mkldnn.set_flags(False)
    try:
        assert onednn_ops._timed.__wrapped__() == frozenset()
        monkeypatch.setenv(onednn_ops.VARIABLE, "onednn")
        with pytest.raises(ValueError, match=f"{onednn_ops.VARIABLE} asks for onednn"):
            onednn_ops.is_fast("onednn")
    finally:
        torch.backends.mkldnn.set_flags(True)
