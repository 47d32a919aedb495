"""Related recipes against their published loops, written out; 7 steps in float64."""

import math
from dataclasses import replace

import pytest
import torch
from test_torch import HIDDEN, TABLES, compare, gradient, loops, polar, run

import surefoot as sf
from surefoot import recipes

LR = 0.02
TIGHT = {"atol": 1e-12, "rtol": 0}


def exact(recipe, kind="linear"):
    """The recipe with the matrix sign by the SVD."""
    role = recipe.role(kind)
    svd = sf.Spectral("svd")
    geometry = svd if role.geometry == sf.Spectral() else replace(role.geometry, norm_of=svd)
    return recipes.Recipe(recipe.name, {**recipe.table, kind: replace(role, geometry=geometry)})


def adamw(w, state, g, t, decay=0.0, beta2=0.95):
    m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    v = state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g * g
    return w * (1 - LR * decay) - LR * m / (1 - 0.9**t) / ((v / (1 - beta2**t)).sqrt() + 1e-8)


def beside_adamw(hidden, tables=0.1, vectors=0.0):
    """Hidden matrices by a loop, all else by AdamW."""

    def update(name, w, state, g, t):
        if name in HIDDEN:
            return hidden(w, state, g, t)
        return adamw(w, state, g, t, tables if name in TABLES else vectors)

    return update


def scale_loop(name, w, state, g, t):
    if g.ndim < 2:
        return adamw(w, state, g, t, beta2=0.999)
    if name == "out.weight":
        g = state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    return w - LR * g / g.square().mean(0 if name == "table.weight" else 1, keepdim=True).sqrt()


def mano_loop(w, state, g, t):
    buffer = state["m"] = 0.95 * state.get("m", 0) + g
    dim = (t - 1) % 2
    unit = w / w.norm(dim=dim, keepdim=True)
    tangent = buffer - (buffer * unit).sum(dim, keepdim=True) * unit
    return w * (1 - LR * 0.1) - LR * 0.2 * math.sqrt(w.shape[dim]) * tangent / tangent.norm(dim=dim, keepdim=True)


def rmnp_loop(w, state, g, t):
    buffer = state["m"] = 0.95 * state.get("m", 0) + g
    ahead = g + 0.95 * buffer
    rows = ahead / ahead.norm(dim=1, keepdim=True) * max(1, w.shape[0] / w.shape[1]) ** 0.5
    return w * (1 - LR * 0.1) - LR * rows


def normalised_loop(name, w, state, g, t):
    m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    return w - LR * m / m.square().mean().sqrt()


def signum_loop(name, w, state, g, t):
    m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    return w * (1 - LR * 0.1 * (w.ndim > 1)) - LR * m.sign()


def normuon_loop(w, state, g, t):
    m = state["m"] = 0.95 * state.get("m", 0) + 0.05 * g
    o = polar(m)
    v = state["v"] = 0.95 * state.get("v", 0) + 0.05 * o.square().mean(1, keepdim=True)
    o = o / v.sqrt()
    return w * (1 - LR * 0.1) - 0.2 * LR * math.sqrt(w.numel()) / o.norm() * o


def squared_loop(w, state, g, t):
    m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    v = state["v"] = 0.95 * state.get("v", 0) + 0.05 * g * g
    adam = m / (1 - 0.9**t) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
    return w * (1 - LR * 0.1) - 0.2 * LR * math.sqrt(max(w.shape)) * polar(adam)


def moonlight_loop(w, state, g, t):
    m = state["m"] = 0.95 * state.get("m", 0) + g
    return w * (1 - LR * 0.1) - 0.2 * LR * math.sqrt(max(w.shape)) * polar(g + 0.95 * m)


def power(x, exponent, floor):
    values, vectors = torch.linalg.eigh(x)
    return vectors * values.clamp_min(floor * values[-1]) ** exponent @ vectors.T


def shampoo_loop(w, state, g, t):
    left = state["l"] = 0.95 * state.get("l", 0) + 0.05 * g @ g.T
    right = state["r"] = 0.95 * state.get("r", 0) + 0.05 * g.T @ g
    m = state["m"] = 0.95 * state.get("m", 0) + 0.05 * g
    ahead = 0.95 * m + 0.05 * g
    white = power(left, -0.25, 1e-6) @ ahead @ power(right, -0.25, 1e-6)
    return w * (1 - LR * 0.1) - 0.2 * LR * math.sqrt(max(w.shape)) * polar(white)


@pytest.mark.parametrize(
    ("recipe", "loop"),
    [
        (recipes.scale(), scale_loop),
        (recipes.mano(), beside_adamw(mano_loop, vectors=0.1)),
        (recipes.rmnp(), beside_adamw(rmnp_loop)),
        (recipes.normalised_sgd(), normalised_loop),
        (sf.contrib.signum(), signum_loop),
        (exact(recipes.moonlight()), beside_adamw(moonlight_loop)),
        (exact(recipes.normuon()), beside_adamw(normuon_loop)),
        (exact(sf.contrib.muon_squared()), beside_adamw(squared_loop)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_published_loop(recipe, loop):
    compare(run(recipe, LR, steps=7), loops(loop, steps=7), **TIGHT)


def test_shampoo_before_the_matrix_sign():
    """The signs of the smallest singular values follow the floor of eigenvalues, hence a looser tolerance."""
    ours = run(exact(sf.contrib.shampoo_muon()), LR, steps=7)
    compare(ours, loops(beside_adamw(shampoo_loop), steps=7), atol=1e-8, rtol=0)


def test_wion_clips_the_leading_singular_value_after_each_step():
    """By the SVD, where one singular value is far above the others and the warm vectors have found its own."""
    recipe, radius, shape = exact(recipes.wion(2.0)), 2.0, (12, 8)
    unit = math.sqrt(shape[0] / shape[1])
    start = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.01
    start[:, 0] += 1.0
    p = torch.nn.Parameter(start * (2.5 * unit / torch.linalg.matrix_norm(start, 2)))
    optimizer = sf.SteepestDescent([{"params": [("weight", p)], "role": recipe.role("linear")}], lr=LR)
    w, m = p.detach().clone(), torch.zeros(shape, dtype=torch.float64)
    for step in range(7):
        p.grad = gradient(p, step, 0)
        optimizer.step()
        m, ahead = 0.9 * m + 0.1 * p.grad, 0.8 * m + 0.2 * p.grad
        w = w - LR * unit * polar(ahead)
        u, s, vh = torch.linalg.svd(w)
        w = w - (s[0] - radius * unit).clamp_min(0) * torch.outer(u[:, 0], vh[0])
        assert float((p.detach() - w).abs().max()) < 1e-6
        assert float(torch.linalg.matrix_norm(p.detach(), 2)) <= radius * unit * (1 + 1e-6)
