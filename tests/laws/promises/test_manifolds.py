"""Promises of the manifolds: orthogonal matrices and vectors of fixed length, over a thousand steps; what they keep."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import surefoot as sf
from combinations import combinations
from comparisons import advanced
from laws.inputs import exact, gaussian
from surefoot import recipes
from surefoot.geometry import HeadRMS, RowRMS, Spectral
from surefoot.geometry.base import Tangents
from surefoot.geometry.constraints import SameLengths
from surefoot.linalg.tangent import stiefel_msign
from surefoot.plan import Placement

from .roles import KINDS, PULLS, Run

SHAPES = {"square": (16, 16), "odd": (7, 7), "tall": (24, 10), "taller": (33, 8), "wide": (6, 20), "batched": (3, 9, 6)}
MATRICES = ("linear", "embedding", "head")


def steps(scheme, shape, count, geometry=None, eta=0.05):
    """The weight before and after every step with a wandering gradient."""
    ball, w = Spectral(), gaussian(shape, 1) * 0.3
    cache = scheme.init_state(w, geometry or ball, ball)
    for step in range(count):
        m = gaussian(shape, 2) + gaussian(shape, 10 + step)
        new, cache = advanced(scheme, w, m, eta, geometry or ball, ball, cache)
        yield w, new
        w = new


@combinations(lambda shape: shape == "tall", shape=list(SHAPES))
def test_a_thousand_steps_stay_orthogonal(shape):
    shape = SHAPES[shape]
    rows, columns = shape[-2:]
    for _, w in steps(sf.Stiefel(1.0), shape, 1000):
        q = w.double() * math.sqrt(columns / rows)
        gram = q.mT @ q if rows >= columns else q @ q.mT
        assert float((gram - torch.eye(min(rows, columns))).abs().max()) <= 1e-5


def test_the_nearest_orthogonal_matrix_is_orthogonal_at_real_sizes():
    w = Spectral().retract(gaussian((256, 512), 1)).double() * 2**0.5
    assert float((w @ w.mT - torch.eye(256)).abs().max()) <= 1e-5


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("radius", [1.0, 2.5])
def test_a_small_step_is_the_best_one_at_any_radius(shape, radius):
    unit, eta = math.sqrt(shape[-2] / shape[-1]), 1e-3
    w, m = sf.Spectral("svd").retract(gaussian(shape, 1, torch.float64)) * radius, gaussian(shape, 2, torch.float64)
    geometry = Spectral("svd")
    new, _ = advanced(sf.Stiefel(radius), w, m, eta, geometry)
    best = stiefel_msign(m, w / (radius * unit), "svd") * unit
    torch.testing.assert_close((w - new) / eta, best, atol=5e-3 * unit, rtol=0)


@combinations(
    lambda scheme, shape: shape == ("tall" if scheme.radius else "wide") or (scheme.radius, shape) == (None, "odd"),
    scheme=[sf.RowSphere(), sf.ColumnSphere(), sf.RowSphere(1.5), sf.ColumnSphere(1.5)],
    shape=list(SHAPES),
)
def test_a_hundred_steps_keep_every_length(scheme, shape):
    shape = SHAPES[shape]
    dim = -1 if isinstance(scheme, sf.RowSphere) else -2
    rows, columns = shape[-2:]
    start = (gaussian(shape, 1) * 0.3).double().norm(dim=dim)
    radius = 1.5 if dim == -1 else 1.5 * math.sqrt(rows / columns)
    for _, w in steps(scheme, shape, 100):
        expected = start if scheme.radius is None else torch.full_like(start, radius)
        torch.testing.assert_close(w.double().norm(dim=dim), expected, rtol=1e-5, atol=0)
    if scheme.radius is not None:
        whole = w.double().norm(dim=(-2, -1)) / math.sqrt(rows)  # the RMS of the outputs over isotropic inputs
        torch.testing.assert_close(whole, torch.full_like(whole, 1.5), rtol=1e-5, atol=0)


def test_a_radius_is_in_the_roles_unit():
    w, m = gaussian((6, 8), 1), gaussian((6, 8), 2)
    for ball, unit in ((RowRMS(), 1.0), (HeadRMS(), 1 / 8)):
        rows, _ = advanced(sf.RowSphere(2.0), w, m, 0.1, ball)
        torch.testing.assert_close(rows.square().mean(1).sqrt(), torch.full((6,), 2 * unit))
        assert float(ball.norm(rows)) == pytest.approx(2)
        columns, _ = advanced(sf.ColumnSphere(2.0), w, m, 0.1, ball)
        torch.testing.assert_close(columns.square().mean(0).sqrt(), torch.full((8,), 2 * unit))
        assert float(columns.norm()) == pytest.approx(float(rows.norm()))
    table, _ = advanced(sf.Stiefel(2.0), w, m, 0.1, RowRMS())
    torch.testing.assert_close(table.square().mean(1).sqrt(), torch.full((6,), 2.0))


@combinations(
    lambda recipe, scheme, kind: recipe.name == "beyond_mup",
    recipe=[
        *(recipes.steady(), recipes.beyond_mup(), recipes.moga_row(3.0)),
        *(recipes.moga_column(), recipes.muon(), recipes.lion()),
    ],
    scheme=[sf.RowSphere(), sf.ColumnSphere()],
    kind=MATRICES,
)
def test_lengths_are_kept_under_every_recipe(recipe, scheme, kind):
    for gradients in PULLS:
        run = Run(recipe, scheme, kind, gradients)
        dim = -1 if isinstance(scheme, sf.RowSphere) else -2
        start = run.p.detach().double().norm(dim=dim)
        assert run.placement.promise == f"each {'row' if dim == -1 else 'column'}'s length = initial"
        for _, w in run.steps(12):
            torch.testing.assert_close(w.norm(dim=dim), start, rtol=1e-5, atol=0)


def test_rows_across_columns_of_fixed_length_are_tangent_together():
    """Of gradients near rank one: each row shortened by itself left the tangent, and the step was longer than told."""
    for seed in range(100):
        shapes = (24, 2), (24, 1), (1, 2), (24, 2)
        first, *factors, noise = (gaussian(shape, seed=5 * seed + i) for i, shape in enumerate(shapes))
        w = nn.Parameter(first * torch.logspace(0, -4, 24)[:, None])
        role = sf.Role("head", HeadRMS(), momentum=sf.Momentum(0.0), stabiliser=sf.ColumnSphere())
        group = {"params": [w], "role": role, "lr": 1e-4 * float(HeadRMS().norm(w.detach()))}
        optimizer, before = sf.SteepestDescent([group], lr=1.0), w.detach().clone()
        (numbers,) = optimizer.stability().values()
        w.grad = factors[0] @ factors[1] + 0.03 * noise
        optimizer.step()
        assert float(HeadRMS().norm(w.detach() - before)) <= 1.001 * numbers["update_upper"]


def test_hyperball_turns_each_matrix_by_the_rate():
    for kind in KINDS:
        run = Run(recipes.beyond_mup(), sf.Hyperball(), kind, "random")
        start = float(run.p.detach().double().norm())
        eta = run.lr * run.role.lr_scale(run.placement.blocks[0])
        for before, after in run.steps(20):
            assert float(after.norm()) == pytest.approx(start, rel=1e-5)
            if start:
                cosine = float((before * after).sum()) / start**2
                assert 0.3 * eta <= math.acos(min(1.0, cosine)) <= math.asin(min(1.0, eta)) + 1e-3


@pytest.mark.parametrize("scheme", [sf.RowSphere(), sf.ColumnSphere(), sf.Stiefel(1.0)], ids=repr)
def test_vectors_are_one_row_and_the_plan_says_so(scheme):
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5))
    plan = sf.Plan.of(model, stabiliser=scheme)
    promise = "norm = initial" if scheme != sf.Stiefel(1.0) else "norm = 1, or 0 where it is 0"
    assert {plan[name].promise for name in ("0.bias", "1.weight", "1.bias")} == {promise}
    assert plan["0.weight"].promise != promise


@pytest.mark.parametrize("scheme", [sf.RowSphere(), sf.ColumnSphere(), sf.Stiefel(1.0), sf.Hyperball()], ids=repr)
def test_a_resumed_run_is_the_same_run(scheme):
    def optimizer(p, steps, start, saved=None):
        role = sf.Role("linear", Spectral(), stabiliser=scheme)
        made = sf.SteepestDescent([{"params": [p], "role": role}], lr=0.1)
        if saved:
            made.load_state_dict(saved)
        for step in range(steps):
            p.grad = gaussian((6, 9), start + step)
            made.step()
        return made

    p, whole = (nn.Parameter(gaussian((6, 9), 1)) for _ in range(2))
    optimizer(whole, 5, 10)
    saved = copy.deepcopy(optimizer(p, 3, 10).state_dict())
    kept = {name: x.numel() for name, x in saved["state"][0].items() if name not in ("momentum", "skipped")}
    multipliers = {sf.RowSphere(): 6, sf.ColumnSphere(): 9}.get(scheme)
    assert kept == ({} if multipliers is None else {"multipliers": multipliers})
    optimizer(p, 2, 13, saved)
    assert torch.equal(p, whole)


@pytest.mark.parametrize("scheme", [sf.RowSphere(), sf.ColumnSphere(), sf.RowSphere(1.0)], ids=repr)
def test_zero_vectors_stay_zero_and_hinder_no_other(scheme):
    w, m = gaussian((6, 5), 1), gaussian((6, 5), 2)
    w[2], w[:, 3] = 0, 0
    new, _ = advanced(scheme, w, m, 0.1, Spectral())
    rows = isinstance(scheme, sf.RowSphere)
    assert torch.isfinite(new).all()
    assert not (new[2] if rows else new[:, 3]).any()
    assert int((new.norm(dim=-1 if rows else -2) > 0).sum()) == (5 if rows else 4)


def test_a_step_along_the_spheres_changes_lengths_to_second_order_only():
    """Which is what the reported update number relies on."""
    for dim, scheme in ((-1, sf.RowSphere()), (-2, sf.ColumnSphere())):
        w, m = gaussian((6, 9), 1, torch.float64), 5 * gaussian((6, 9), 1, torch.float64)
        m += gaussian((6, 9), 2, torch.float64)
        cache = scheme.init_state(w, Spectral(), Spectral())
        geometry = Spectral()
        d, _ = geometry.tangent(w, m, SameLengths(dim), cache)
        change = np.abs(exact((w - 0.01 * d).norm(dim=dim) / w.norm(dim=dim)) - 1).max()
        assert change <= 1e-4
        plain = np.abs(exact((w - 0.01 * geometry.direction(m)).norm(dim=dim) / w.norm(dim=dim)) - 1).max()
        assert plain >= 10 * change


def test_a_placement_keeps_a_vectors_scheme():
    placement = Placement(sf.Role("gain", sf.MaxNorm(), view=sf.views.Vector(), stabiliser=sf.Stiefel(1.5)), "", (8,))
    assert placement.stabilisers == (sf.Normalise(1.5),)


@pytest.mark.parametrize(
    ("scheme", "kind"), [*((sf.RowSphere(), kind) for kind in MATRICES), (sf.ColumnSphere(), "linear")], ids=repr
)
def test_a_short_vector_does_not_loosen_the_reported_change(scheme, kind):
    run = Run(recipes.beyond_mup(), scheme, kind, "random")
    with torch.no_grad():
        run.p[3] *= 1e-4
        run.p[:, 5] *= 1e-4
    block = run.placement.blocks[0]
    reach = run.lr * run.role.lr_scale(block)
    for _ in range(5):
        reported = run.optimizer.stability()["weight"]["update_upper"]
        (before, after), *_ = run.steps(1)
        assert float(run.role.weight_geometry.norm((after - before).reshape(block))) <= reported <= 2.2 * reach


@pytest.mark.parametrize("geometry", [RowRMS(), sf.MeanOperator(1.0, math.inf), sf.Identity()], ids=repr)
@pytest.mark.parametrize("scheme", [sf.RowSphere(), sf.ColumnSphere()], ids=repr)
def test_problems_that_rest_do_not_bend_the_step_of_the_others(geometry, scheme):
    """An absent token's row, an entry without gradient: the step of what moves is orthogonal by itself."""
    w, m = gaussian((8, 6), 1, torch.float64), gaussian((8, 6), 2, torch.float64)
    eta = torch.full_like(w, 1e-4)
    if geometry == RowRMS():
        eta[::2] = 0
    else:
        eta[gaussian((8, 6), 3) > 0] = 0
    new, _ = advanced(scheme, w, m, eta, geometry, RowRMS())
    step, dim = (new - w) / 1e-4, -1 if isinstance(scheme, sf.RowSphere) else -2
    assert float((step * w).sum(dim).abs().max()) <= 1e-3
    assert float(step[eta == 0].abs().max()) <= 1e-3 < 0.1 < float(step[eta > 0].abs().mean())


def unevenly(shape):
    """Weights of every rank, of singular values down to nothing, of rows and columns that are zero or nearly so."""
    rows, columns = shape
    u, v = (torch.linalg.qr(gaussian((n, min(shape)), 5)).Q for n in shape)
    for rank in range(1, min(shape) + 1):
        yield u[:, :rank] @ v[:, :rank].mT
    for least in (1e-8, 1e-4, 0.3):
        for values in ([1.0] * (min(shape) - 1) + [least], [1.0] + [least] * (min(shape) - 1)):
            yield u * torch.tensor(values) @ v.mT
    for factor in (0.0, 1e-7):
        for axis in (torch.arange(rows)[:, None] == 0, torch.arange(columns) == 0):
            yield torch.where(axis, factor, 1.0) * gaussian(shape, 6)
    for size in (1.0, 1e-12, 1e-41):
        yield size * gaussian(shape, 7)
        yield size * torch.eye(rows, columns).cumprod(0)


BALLS = (Spectral(), RowRMS(), HeadRMS(), sf.RowMean(3.0), sf.MeanOperator(1.0, 1.5), sf.MeanOperator(1.0, math.inf))
LENGTHS = (sf.RowSphere(), sf.RowSphere(0.7), sf.ColumnSphere(), sf.ColumnSphere(0.7))
ROUND = (sf.SpectralSphere(0.7), sf.Normalise(), sf.Normalise(0.7), sf.Normalise(0.7, sf.Frobenius()), sf.Hyperball())


@combinations(
    lambda scheme, ball, step, shape: (
        scheme == sf.Stiefel(0.7) and step == BALLS[-1] and (ball == BALLS[0] or shape[0] > 4)
    ),
    scheme=[sf.Stiefel(0.7), sf.Stiefel(3.0), *LENGTHS, *ROUND],
    ball=BALLS,
    step=[*BALLS, sf.Frobenius()],
    shape=[(6, 4), (4, 9)],
)
def test_from_weights_of_every_rank_no_step_moves_further_than_was_reported(scheme, ball, step, shape):
    """Some of which are far from the manifold: the first step goes to it, where there is a way, at any rate."""
    role = sf.Role("any", step, weight_norm=ball, stabiliser=scheme)
    for i, start in enumerate(unevenly(shape)):
        for lr in (4e-4, 0.3):
            p = nn.Parameter(start.clone())
            optimizer = sf.SteepestDescent([{"params": [("w", p)], "role": role}], lr=lr)
            for seed in (i, -i):
                before, bound = p.detach().double(), optimizer.stability()["w"]["update_upper"]
                p.grad = gaussian(shape, 100 + seed) if seed > 0 else gaussian((shape[0], 1), 9).expand(shape).clone()
                optimizer.step()
                assert p.isfinite().all()
                assert float(ball.norm(p.detach().double() - before)) <= 1.01 * bound + 1e-12


@pytest.mark.parametrize("ball", BALLS[1:-1], ids=repr)
def test_a_tables_rows_keep_their_shape_on_the_way_to_the_radius(ball):
    """Under norms of every exponent: the way there is radial."""
    w = gaussian((6, 4), 1)
    dim = -2 if ball == BALLS[4] else -1
    there = Tangents.of(ball).retract(w)
    torch.testing.assert_close(Tangents.of(ball).spread(there), (torch.tensor(1.0), torch.tensor(1.0)))
    torch.testing.assert_close((there * w).sum(dim), there.norm(dim=dim) * w.norm(dim=dim))
