"""Directions that are rescaled and momenta that are preconditioned: their laws on every kind of data."""

import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot import contrib, recipes
from surefoot.geometry import Adaptive
from surefoot.momentum import Adam

ROWS = sf.NormalisedRows(sf.Spectral("svd"), 0.5)
ADAPTIVE = (
    contrib.DualScaled(sf.Spectral("svd")),
    sf.RMSScaled(sf.HeadRMS()),
    sf.RMSScaled(sf.MeanOperator(1, math.inf)),
    sf.RMSScaled(sf.Spectral("svd")),
    contrib.RadialBrake(sf.Spectral("svd"), 0.25),
    contrib.UpdateFloor(sf.Spectral("svd"), 0.5),
    ROWS,
    *(sf.Oblique(), sf.StreamingSpectral()),
    contrib.MeanLookahead(sf.Spectral("svd"), 0.3, 0.5),
    contrib.MeanLookahead(contrib.UpdateFloor(contrib.RadialBrake(ROWS), 0.5), 0.3, 0.5),
    sf.RMSScaled(ROWS),
    *(sf.NormalisedRows(sf.Oblique()), contrib.MeanLookahead(sf.NormalisedRows(sf.StreamingSpectral()))),
)
SHAPES = ((6, 4), (4, 9), (5, 5), (1, 3), (3, 1), (0, 4), (4, 0))
MOMENTA = (
    *(sf.RowAdam(), sf.RowAdam(0.5, 0.3)),
    contrib.Whitened(0.9, 0.8, memory=0.5),
    contrib.ScheduledMomentum(((1, sf.Momentum(0.5)), (5, sf.Momentum(0.9, 0.7)))),
    sf.SOAP(sf.Momentum(0.9, 0.8), memory=0.5),
    sf.SOAP(sf.Momentum(0.9), memory=0.5, every=2, largest=4),
    sf.SOAP(sf.Momentum(0.9), memory=0.5, sides="shorter"),
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(shape, seed=0):
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


def inputs(shape):
    """Dense, of rank one, with a zero row, tiny, huge."""
    g = normal((2, *shape))
    yield from (g, g * 1e-30, g * 1e30)
    yield g[..., :1] * g[..., :1, :] if g.numel() else g
    yield g * (torch.arange(shape[0]) > 0)[:, None]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("geometry", ADAPTIVE, ids=repr)
def test_a_direction_is_finite_below_its_bound_and_zero_where_the_gradient_is(geometry, shape):
    w = normal((2, *shape), seed=1)
    for m in inputs(shape):
        d, memory = geometry.take(w, m, 1.0, geometry.init_memory(w))
        assert d.shape == w.shape
        assert d.isfinite().all()
        assert not d[m == 0].any() or (m != 0).any()
        assert {name: x.shape for name, x in memory.items()} == {n: x.shape for n, x in geometry.init_memory(w).items()}
        norms = geometry.plain.norm(d)
        assert norms.numel() == 0 or float(norms.max()) <= geometry.direction_norm_bound(sf.Spectral(), shape)
        zero, _ = geometry.take(w, torch.zeros_like(m), 1.0, geometry.init_memory(w))
        assert not zero.any()


@pytest.mark.parametrize("geometry", ADAPTIVE, ids=repr)
def test_matrices_of_a_batch_do_not_see_each_other(geometry):
    w, m = normal((3, 5, 4), 1), normal((3, 5, 4), 2)
    together, _ = geometry.take(w, m, 1.0, geometry.init_memory(w))
    for i in range(3):
        alone, _ = geometry.take(w[i : i + 1], m[i : i + 1], 1.0, geometry.init_memory(w[i : i + 1]))
        torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("geometry", [x for x in ADAPTIVE if x.init_memory(torch.zeros(1, 2, 2))], ids=repr)
def test_a_matrix_that_rests_remembers_what_it_did(geometry):
    w, m = normal((2, 5, 4), 1), normal((2, 5, 4), 2)
    _, memory = geometry.take(w, m, 1.0, geometry.init_memory(w))
    before = {name: x.clone() for name, x in memory.items()}
    _, after = geometry.take(w, m, torch.tensor([1.0, 0.0], dtype=torch.float64)[:, None, None], memory)
    for name, x in after.items():
        assert torch.equal(x[1], before[name][1])
        assert not torch.equal(x[0], before[name][0])


def test_dual_scaled_is_the_proximal_step():
    """Of `<m, -d> + |d|^2 / 2`, by random trials around it."""
    m, norm = normal((1, 5, 4)), sf.Spectral("svd")
    best, _ = contrib.DualScaled(norm).take(m, m, 1.0, {})

    def value(d):
        return float(-(m * d).sum() + norm.norm(d)[0] ** 2 / 2)

    assert value(best) == pytest.approx(-(float(sf.dual_norm(norm, m)[0]) ** 2) / 2, rel=1e-9)
    assert all(value(best + 0.1 * normal((1, 5, 4), seed)) > value(best) for seed in range(50))


def test_the_brake_takes_from_what_lengthens_the_weight_only():
    w, brake = normal((1, 5, 4), 1), contrib.RadialBrake(sf.Spectral("svd"), 0.0)
    for seed in range(20):
        m = normal((1, 5, 4), seed)
        plain, (braked, _) = brake.norm_of.direction(m), brake.take(w, m, 1.0, {})
        outward = -float((plain * w).sum())
        assert float((braked * w).sum()) == pytest.approx(max(0.0, -outward), abs=1e-12)
        rest = braked - plain
        assert outward > 0 or not rest.any()
        assert float(((rest * w).sum()) ** 2) == pytest.approx(float(rest.square().sum() * w.square().sum()), abs=1e-12)


def test_the_floor_is_relative_to_the_weight():
    """A direction is that long, and a weight grows by no more: attained where the direction is along it (seed 0)."""
    eye, eta, ratio, norm = torch.eye(5, dtype=torch.float64)[None], 0.2, 0.1, sf.Spectral("svd")
    for size, seed, inner in itertools.product((1e-3, 0.5, 10.0, 1e3), range(3), (norm, sf.RMSScaled(norm))):
        m = (seed * normal((1, 5, 5), seed) - eye) * size
        plain = inner.take(size * eye, m, 1.0, {})[0] if isinstance(inner, sf.RMSScaled) else inner.direction(m)
        d = contrib.UpdateFloor(inner, ratio).take(size * eye, m, 1.0, {})[0]
        assert float(norm.norm(d)) == pytest.approx(longest := max(ratio * size, float(norm.norm(plain))), rel=1e-9)
        grown = float(norm.norm(size * eye - eta * d))
        assert grown == pytest.approx(size + eta * longest) if seed == 0 else grown <= (size + eta * longest) * 1.000001


def history(momentum, gradients):
    """The smoothed gradients of a momentum, one for each gradient."""
    block = torch.zeros(1, *gradients[0].shape, dtype=torch.float64)
    whole, memory = momentum.init_state(block), momentum.init_memory(block)
    state = {name: x.reshape(1, *x.shape) for name, x in (whole | memory).items()}
    for g in gradients:
        state, m = momentum(state, g[None, None], torch.ones(1, 1, 1, 1, dtype=torch.float64))
        yield m[0, 0]


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.5, 0.3), (0.0, 0.9)])
def test_no_row_of_row_adam_is_longer_than_its_bound(betas):
    momentum = sf.RowAdam(*betas)
    bound, highest = momentum.sizes((3, 8)).row, 0.0
    for growth in (betas[1] / betas[0] if betas[0] else 9.0, 1.0, 3.0):
        gradients = [growth ** max(t - 200, -300) * torch.ones(3, 8, dtype=torch.float64) for t in range(200)]
        highest = max(highest, *(float(m.norm(dim=1).max()) for m in history(momentum, gradients)))
    noise = [normal((3, 8), seed) for seed in range(60)]
    assert max(float(m.norm(dim=1).max()) for m in history(momentum, noise)) <= bound
    assert 0.95 * bound <= highest <= bound * (1 + 1e-9)
    assert bound == pytest.approx(Adam(*betas).largest * math.sqrt(8))


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.5, 0.3), (0.0, 0.9)])
@pytest.mark.parametrize(
    "norm", [sf.RowRMS(), sf.HeadRMS(), sf.RowMean(math.inf), sf.MeanOperator(1, math.inf)], ids=repr
)
def test_a_step_scaled_by_its_rms_is_no_longer_than_cauchy_schwarz_says(norm, betas):
    """`(1-b1)/sqrt((1-b2)(1-b1^2/b2))`: approached as gradients grow by b2/b1 a step, exceeded by none."""
    b1, b2 = betas
    bound = max(1.0, (1 - b1) / math.sqrt((1 - b2) * (1 - b1**2 / b2)))
    momentum = sf.RowAdam(*betas) if norm.couples else Adam(*betas, eps=0.0)
    role = replace(recipes.beyond_mup().role("head"), geometry=sf.RMSScaled(norm), momentum=momentum)
    assert role.step_norm_bound((1, 3, 8), norm) == pytest.approx(bound, rel=1e-3)
    noise = [normal((3, 8), seed) for seed in range(60)]
    growing = [(b2 / b1 if b1 else 9.0) ** (t - 200 if b1 else t - 20) * normal((3, 8)) for t in range(200)]
    longest = [
        max(float(norm.norm(role.geometry.take(m, m, 1.0, {})[0])) for m in history(momentum, gradients))
        for gradients in (noise, growing)
    ]
    assert max(longest) <= bound * (1 + 1e-9)
    assert longest[1] >= 0.95 * bound


def test_a_step_scaled_by_its_rms_is_the_gradient_over_its_history_in_natural_units():
    m = normal((2, 3, 8))
    for norm, unit in ((sf.RowRMS(), 1), (sf.HeadRMS(), 1 / 8), (sf.MeanOperator(1, math.inf), 1 / 8)):
        torch.testing.assert_close(sf.RMSScaled(norm).take(m, m, 1.0, {})[0], m * unit, rtol=1e-12, atol=1e-12)


def test_whitening_is_between_the_roots_of_both_factors():
    gradients = [normal((4, 6), seed) for seed in range(5)]
    left, right, m = 0, 0, 0
    for g, ours in zip(gradients, history(contrib.Whitened(0.9, memory=0.5), gradients), strict=True):
        left, right, m = 0.5 * left + 0.5 * g @ g.T, 0.5 * right + 0.5 * g.T @ g, 0.9 * m + 0.1 * g
        roots = []
        for factor in (left, right):
            values, vectors = torch.linalg.eigh(factor)
            roots.append(vectors * values.clamp_min(1e-6 * values[-1]) ** -0.25 @ vectors.T)
        expected = roots[0] @ m @ roots[1]
        torch.testing.assert_close(ours / ours.norm(), expected / expected.norm(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("momentum", MOMENTA, ids=repr)
def test_zero_tiny_and_deficient_gradients_stay_finite(momentum):
    for g in inputs((4, 6)):
        zero = torch.zeros(4, 6, dtype=torch.float64)
        for m in history(momentum, [zero, g[0], zero, g[1], zero]):
            assert m.isfinite().all()


class Experts(nn.Module):
    """A linear layer, stacked experts, and heads of a fused projection."""

    def __init__(self):
        super().__init__()
        self.plain, self.fused, self.grouped = nn.Linear(6, 4), nn.Linear(6, 12), nn.Linear(6, 10)
        self.stack = nn.Parameter(torch.zeros(3, 4, 6))


@pytest.mark.parametrize(
    "change",
    [*({"geometry": geometry} for geometry in ADAPTIVE), *({"momentum": momentum} for momentum in MOMENTA)],
    ids=repr,
)
def test_a_resumed_run_goes_on_bit_for_bit(change, tmp_path):
    """Under a bound, in every layout, with a matrix that sometimes has no gradient."""
    role = replace(recipes.beyond_mup().role("linear"), stabiliser=sf.PostClip(1.5), **change)
    if isinstance(change.get("momentum"), sf.RowAdam):
        role = replace(role, geometry=sf.Identity(), weight_norm=sf.RowRMS())
    overrides = [("plain.weight", role), ("fused.weight", replace(role, view=sf.views.Fused(3)))]
    overrides.append(("grouped.weight", replace(role, view=sf.views.Projections((6, 2, 2)))))
    overrides.append(("stack", replace(role, view=sf.views.Stack())))

    def build():
        model = Experts()
        plan = sf.Plan.of(model, overrides=overrides)
        plan.initialise_(model, seed=0)
        return model, sf.SteepestDescent(model, plan, lr=0.1)

    def go(model, optimizer, steps):
        for step in steps:
            for i, p in enumerate(model.parameters()):
                p.grad = torch.randn(p.shape, generator=seeded(10 * step + i))
                if p.ndim == 3 and step % 2:
                    p.grad[1] = 0
            optimizer.step()

    model, optimizer = build()
    go(model, optimizer, range(4))
    assert isinstance(role.geometry, Adaptive) or role.momentum == change.get("momentum")
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "saved.pt")
    weights, state = torch.load(tmp_path / "saved.pt")
    other, resumed = build()
    other.load_state_dict(weights)
    resumed.load_state_dict(copy.deepcopy(state))
    go(model, optimizer, range(4, 8))
    go(other, resumed, range(4, 8))
    for name, p in model.named_parameters():
        assert torch.equal(p, other.get_parameter(name)), name


def plain(**change):
    return replace(recipes.beyond_mup().role("linear"), momentum=sf.Momentum(0.0), **change)


@pytest.mark.parametrize(
    ("role", "numbers"),
    [
        (recipes.beyond_mup().role("linear"), lambda m, n: m * n),
        (plain(geometry=sf.NormalisedRows()), lambda m, n: m),
        (plain(geometry=sf.Oblique()), lambda m, n: 1),
        (plain(geometry=contrib.DualScaled()), lambda m, n: 0),
        (plain(geometry=contrib.RadialBrake()), lambda m, n: 0),
        (plain(geometry=contrib.UpdateFloor()), lambda m, n: 0),
        (plain(geometry=contrib.MeanLookahead(sf.NormalisedRows())), lambda m, n: m * n + m),
        (plain(geometry=sf.StreamingSpectral()), lambda m, n: min(m, n) ** 2),
        (replace(plain(geometry=sf.Identity()), momentum=sf.RowAdam()), lambda m, n: m * n + m + 1),
        (replace(plain(), momentum=sf.Adam()), lambda m, n: 2 * m * n + 1),
        (replace(plain(), momentum=contrib.ScheduledMomentum(((0, sf.Momentum()),))), lambda m, n: m * n + 1),
        (replace(plain(), momentum=contrib.Whitened()), lambda m, n: m * n + m**2 + n**2),
        (replace(plain(), momentum=sf.SOAP()), lambda m, n: 2 * (m * n + m**2 + n**2) + 1),
        (replace(plain(), momentum=sf.SOAP(largest=4)), lambda m, n: 2 * m * n + 2 * 4**2 + 1),
        (replace(plain(), momentum=sf.SOAP(sides="shorter")), lambda m, n: 2 * (m * n + min(m, n) ** 2) + 1),
        (plain(stabiliser=contrib.CautiousDecay(0.1)), lambda m, n: 0),
        (plain(stabiliser=contrib.IndependentDecay(0.1)), lambda m, n: 0),
    ],
    ids=lambda value: "" if callable(value) else repr(value)[:60],
)
def test_the_state_is_what_the_docs_say(role, numbers):
    for m, n in ((6, 4), (4, 10)):
        p = nn.Parameter(torch.randn(m, n, generator=seeded()))
        p.grad = torch.randn(m, n, generator=seeded(1))
        optimizer = sf.SteepestDescent([{"params": [("weight", p)], "role": role}], lr=0.1)
        optimizer.step()
        kept = [x for name, x in optimizer.state[p].items() if name != "skipped"]
        assert (sum(x.numel() for x in kept), {x.element_size() for x in kept} - {4}) == (numbers(m, n), set())


def test_blocks_of_unequal_size_keep_no_more_than_their_own():
    """Queries, keys and values of one parameter: eight heads of 16 rows, and a square matrix."""
    d, heads, rows = 64, 8, 16
    attention = nn.MultiheadAttention(d, 4, bias=False)
    optimizer = sf.SteepestDescent(attention, sf.Plan.of(attention, recipes.steady_soap()), lr=0.1)
    p = attention.in_proj_weight
    p.grad = torch.randn(p.shape, generator=seeded())
    optimizer.step()
    numbers = {name: x.numel() for name, x in optimizer.state[p].items() if name != "skipped"}
    assert sum(numbers.values()) == 2 * 3 * d**2 + heads * 2 * rows**2 + 2 * 2 * d**2 + heads + 1, numbers
