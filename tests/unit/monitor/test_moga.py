"""MOGA's theorem: the block norm and its dual by loops, the Lipschitz constant at two widths."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import surefoot as sf
from surefoot.monitor.moga import block_dual_norm, block_norm, lipschitz_bound

inf = math.inf
PAIRS = ((1, 2), (1, 4), (1, inf), (1.5, inf), (2, inf), (2, 2))
INPUTS, CLASSES = 8, 8
each_pair = pytest.mark.parametrize(("p", "q"), PAIRS)


def mlp(width: int, layers: int = 3) -> nn.Sequential:
    sizes = [INPUTS, *[width] * (layers - 1), CLASSES]
    parts = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*parts[:-1]).double()


def mean(x: np.ndarray, p: float) -> float:
    return float(np.abs(x).max() if math.isinf(p) else (np.abs(x) ** p).mean() ** (1 / p))


def length(x: np.ndarray, p: float) -> float:
    return mean(x, p) * len(x) ** (1 / p)


def conjugate(p: float) -> float:
    return inf if p == 1 else 1.0 if math.isinf(p) else p / (p - 1)


def operator(w: np.ndarray, p: float, q: float) -> float:
    """`|W|_{(p, mean) -> (q, mean)}` by a loop over rows or columns."""
    rows, columns = w.shape
    if math.isinf(q):
        return max(length(row, conjugate(p)) for row in w) * columns ** (1 / p)
    if p == 1:
        return max(mean(column, q) for column in w.T) * columns
    return float(np.linalg.svd(w)[1].max() * math.sqrt(columns / rows))


def operator_dual(g: np.ndarray, p: float, q: float) -> float:
    rows, columns = g.shape
    if math.isinf(q):
        return sum(length(row, p) for row in g) / columns ** (1 / p)
    if p == 1:
        return sum(length(column, conjugate(q)) for column in g.T) * rows ** (1 / q) / columns
    return float(np.linalg.svd(g)[1].sum() * math.sqrt(rows / columns))


def parts(tensors, p: float, q: float, norm, first, largest):
    """The numbers of the blocks of an MLP: of W_1's columns, of hidden matrices, of W_K, of biases."""
    matrices = [t for t in tensors if t.ndim == 2]
    inner = [norm(w, p, q) for w in matrices[1:-1]]
    return [first(matrices[0]), *inner, norm(matrices[-1], p, inf), *(largest(b) for b in tensors if b.ndim == 1)]


def expected_norm(tensors, p, q):
    return max(parts(tensors, p, q, operator, lambda w: max(mean(c, q) for c in w.T), lambda b: np.abs(b).max()))


def expected_dual(tensors, p, q):
    def first(g):
        return sum(length(c, conjugate(q)) for c in g.T) * len(g) ** (1 / q)

    return sum(parts(tensors, p, q, operator_dual, first, lambda b: np.abs(b).sum()))


def arrays(tensors):
    return [t.detach().double().numpy() for t in tensors]


def gradients(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[np.ndarray]:
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    return arrays(p.grad for p in model.parameters())


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, INPUTS, generator=generator, dtype=torch.float64)
    return x / x.abs().sum(1, keepdim=True), torch.randint(CLASSES, (16,), generator=generator)


def random_point(width: int, p: float, q: float, radius: float, seed: int = 0) -> nn.Sequential:
    """Every block of norm `radius`: Gaussians, scaled."""
    model, generator = mlp(width), torch.Generator().manual_seed(seed)
    for name, w in model.named_parameters():
        w.data.normal_(generator=generator)
        own = mlp(width)
        for other, zero in own.named_parameters():
            zero.data.copy_(w if other == name else torch.zeros_like(zero))
        w.data.mul_(radius / expected_norm(arrays(own.parameters()), p, q))
    return model


def aligned_point(width: int, radius: float) -> nn.Sequential:
    """The worst point of the ball, whatever p and q: constant features, and logits against class 0."""
    model = mlp(width)
    for _, w in model.named_parameters():
        w.data.fill_(radius)
    against = torch.ones(CLASSES, dtype=torch.float64)
    against[0] = -1
    model[2].weight.data.div_(width)
    model[4].weight.data.mul_(against[:, None] / width)
    model[4].bias.data.mul_(against)
    return model


@each_pair
def test_block_norm_and_dual_are_those_of_loops(p, q):
    model = mlp(12, layers=4)
    x, y = batch()
    truth = gradients(model, x, y)
    assert block_norm(model, p, q) == pytest.approx(expected_norm(arrays(model.parameters()), p, q), rel=1e-6)
    assert block_dual_norm(model, p, q) == pytest.approx(expected_dual(truth, p, q), rel=1e-5)
    for _, w in model.named_parameters():  # each block is seen
        before = w.data.clone()
        w.data.mul_(1e4)
        assert block_norm(model, p, q) == pytest.approx(expected_norm(arrays(model.parameters()), p, q), rel=1e-6)
        w.data.copy_(before)


@each_pair
def test_the_dual_is_the_largest_decrease_over_a_step_of_norm_one(p, q):
    """No step of block norm 1 has a larger product with the gradient, and that of its directions has all of it."""
    model, (x, y) = mlp(6), batch()
    truth, best = gradients(model, x, y), block_dual_norm(model, p, q)
    for seed in range(5):
        steps = arrays(random_point(6, p, q, 1.0, seed).parameters())
        assert sum((g * d).sum() for g, d in zip(truth, steps, strict=True)) <= best


def test_blocks_are_placed_by_their_roles():
    """A table's rows are inputs, the head's rows are outputs, positions join the table, gains join the biases."""
    model = nn.ModuleDict(
        {"table": nn.Embedding(5, 4), "mix": nn.Linear(4, 4), "norm": nn.LayerNorm(4), "out": nn.Linear(4, 5)}
    )
    for w in model.parameters():
        w.data.zero_()
    plan = sf.Plan.of(model)
    assert [plan[name].role.name for name in ("table.weight", "out.weight")] == ["embedding", "head"]
    norms = {"table.weight": 2.0, "mix.weight": 8.0, "out.weight": 8.0, "norm.weight": 2.0, "mix.bias": 2.0}
    for name, expected in norms.items():
        w = model.get_parameter(name)
        w.data.fill_(2.0)
        assert block_norm(model, 1, 2) == pytest.approx(expected), name
        w.data.zero_()
    assert block_norm(model, 1, 2) == 0
    assert block_dual_norm(model, 1, 2) == 0  # there are no gradients


def test_projections_in_one_matrix_count_each():
    model = nn.MultiheadAttention(4, 2, bias=False)
    model.in_proj_weight.data.zero_()[4:8] = torch.eye(4) * 3
    model.out_proj.weight.data.zero_()
    assert block_norm(model, 2, 2) == pytest.approx(3.0)  # not sqrt(4 / 12) * 3, the norm of the whole


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: block_norm(mlp(4), 2, 4), r"\(2, 4\) has no closed form; choose \(1, q\), \(p, inf\)"),
        (lambda: block_norm(mlp(4), 2, 1), "1 <= p <= q"),
        (lambda: block_norm(nn.ConvTranspose1d(2, 2, 3, stride=3), 2, 2), "weight is a transposed convolution"),
        (lambda: lipschitz_bound(-1.0, 2), "not radius=-1.0"),
        (lambda: lipschitz_bound(1.0, 0), "at least one layer"),
        (lambda: lipschitz_bound(math.nan, 1), "not negative"),
        (lambda: lipschitz_bound(0.0, 2, slope=math.inf), "finite numbers"),
    ],
)
def test_what_has_no_norm_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("radius", [0.5, 1.0, 2.0])
@each_pair
def test_the_constant_is_never_below_the_dual_of_a_gradient(p, q, radius):
    bound = lipschitz_bound(radius, layers=3)
    for seed in range(3):
        model = random_point(24, p, q, radius, seed)
        assert block_norm(model, p, q) == pytest.approx(radius, rel=1e-6)
        x, y = batch(seed)
        assert expected_dual(gradients(model, x, y), p, q) <= bound
    worst = aligned_point(24, radius)
    assert block_norm(worst, p, q) == pytest.approx(radius)
    x, y = torch.eye(INPUTS, dtype=torch.float64), torch.zeros(INPUTS, dtype=torch.int64)
    attained = expected_dual(gradients(worst, x, y), p, q)
    probability = torch.softmax(worst(x), 1)[0, 0].item()
    assert attained == pytest.approx(bound * (1 - probability), rel=1e-9)  # so no smaller constant would do


@each_pair
def test_a_difference_of_losses_is_below_the_constant_times_the_block_norm(p, q):
    x, y = batch()
    for seed in range(4):
        a, b = random_point(16, p, q, 1.0, seed), random_point(16, p, q, 1.0, seed + 10)
        losses = [F.cross_entropy(model(x), y).item() for model in (a, b)]
        for w, v in zip(a.parameters(), b.parameters(), strict=True):
            w.data.sub_(v)
        assert abs(losses[0] - losses[1]) <= lipschitz_bound(1.0, layers=3) * block_norm(a, p, q)


@each_pair
def test_the_lipschitz_constant_is_the_same_at_two_widths_and_that_of_plain_norms_grows(p, q):
    """Plain norms: the same ball without the factors `d_in**(1/p) / d_out**(1/q)`."""
    x, y = torch.eye(INPUTS, dtype=torch.float64), torch.zeros(INPUTS, dtype=torch.int64)
    natural, plain = [], []
    for width in (32, 512):
        natural.append(expected_dual(gradients(aligned_point(width, 1.0), x, y), p, q))
        model, up, down = aligned_point(width, 1.0), width ** (1 / p), width ** (1 / q)
        for w, factor in ((model[0], 1 / down), (model[2], up / down), (model[4], up)):
            w.weight.data.mul_(factor)
        grads = gradients(model, x, y)
        for index, factor in ((0, 1 / down), (2, up / down), (4, up)):
            grads[index] *= factor
        plain.append(expected_dual(grads, p, q))
    assert natural[1] == pytest.approx(natural[0], rel=1e-6)
    assert plain[1] > 0.9 * plain[0] * 16 ** (1 / p)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("p", "q"), [(1, 2), (2, 2), (2, math.inf)])
@pytest.mark.parametrize("name", ["0.weight", "2.weight", "2.bias", "4.weight", "4.bias"])
def test_a_weight_that_is_not_finite_is_not_lost(name, p, q, value):
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5))
    with torch.no_grad():
        model.get_parameter(name).flatten()[-1:].fill_(value)
    assert not math.isfinite(block_norm(model, p, q))
