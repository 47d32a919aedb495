"""Recipes against the optimizers they are named after: torch's own, and the published loops written out by hand."""

import dataclasses
import math

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot import Plan, SteepestDescent, recipes

STEPS = 20


class Tower(nn.Module):
    """Hidden matrices of three shapes, an embedding, a head, a gain and biases; in float64."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.up, self.flat, self.down = nn.Linear(6, 15), nn.Linear(15, 15), nn.Linear(15, 6)
        self.norm = nn.LayerNorm(6)
        self.out = nn.Linear(6, 9, bias=False)
        Plan.of(self).initialise_(self)


def gradient(p, step, index):
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * step + index), dtype=torch.float64).to(p)


def train(model, optimizer, steps=STEPS):
    for step in range(steps):
        for index, p in enumerate(model.parameters()):
            p.grad = gradient(p, step, index)
        optimizer.step()


def run(recipe, lr, dtype=torch.float64, steps=STEPS):
    model = Tower().to(dtype)
    train(model, SteepestDescent(model, Plan.of(model, recipe), lr=lr), steps)
    return dict(model.named_parameters())


def loops(update, names=None, steps=STEPS):
    """Every parameter through a published loop: `update(w, state, g, t)` gives the next weight, t from 1."""
    results = {}
    for index, (name, p) in enumerate(Tower().double().named_parameters()):
        if names is not None and name not in names:
            continue
        w, state = p.detach().clone(), {}
        for step in range(steps):
            w = update(name, w, state, gradient(p, step, index), step + 1)
        results[name] = w
    return results


def compare(ours, theirs, **tolerance):
    start = dict(Tower().double().named_parameters())
    for name, expected in theirs.items():
        moved = (expected - start[name]).abs().max()
        assert moved > 1e-3, name
        assert torch.allclose(ours[name].detach(), expected, **tolerance), name


HIDDEN = ("up.weight", "flat.weight", "down.weight")
TABLES = ("table.weight", "out.weight")


def polar(x):
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    return u @ vh


# --- Muon --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "ratio"),
    [(recipes.muon(adam_lr=0.25), 0.25), (recipes.muon(), 0.015), (recipes.muon(sf.Moonlight()), 1.0)],
    ids=["keller", "default", "moonlight"],
)
def test_adamw_part_of_muon_is_torchs(recipe, ratio):
    lr = 0.02 / ratio
    ours = run(recipe, lr, torch.float32)
    model = Tower()
    rest = {name: p for name, p in model.named_parameters() if name not in HIDDEN}
    groups = [
        {"params": [p for name, p in rest.items() if name in TABLES], "weight_decay": 0.1},
        {"params": [p for name, p in rest.items() if name not in TABLES], "weight_decay": 0.0},
    ]
    train(model, torch.optim.AdamW(groups, lr=lr * ratio, betas=(0.9, 0.95), eps=1e-8))
    for name, p in rest.items():
        assert (p - dict(Tower().named_parameters())[name]).abs().max() > 0.05
        assert torch.allclose(ours[name], p, rtol=1e-6, atol=1e-6), name


def muon_loop(lr, ratio):
    """torch.optim.Muon's loop with the exact polar factor."""

    def update(name, w, state, g, t):
        buffer = state["m"] = torch.lerp(state.get("m", torch.zeros_like(g)), g, 1 - 0.95)
        nesterov = torch.lerp(g, buffer, 0.95)
        return w * (1 - lr * 0.1) - lr * ratio(*w.shape) * polar(nesterov)

    return update


SCALES = {
    "original": (sf.Keller(), lambda a, b: math.sqrt(max(1, a / b))),
    "match_rms_adamw": (sf.Moonlight(), lambda a, b: 0.2 * math.sqrt(max(a, b))),
}


@pytest.mark.parametrize("name", SCALES)
def test_hidden_part_of_muon_is_the_published_loop(name):
    scale, ratio = SCALES[name]
    compare(run(recipes.muon(scale), 0.02), loops(muon_loop(0.02, ratio), HIDDEN), atol=2e-3)


@pytest.mark.parametrize("name", SCALES)
def test_one_exact_muon_step(name):
    """One step has no error to add up, and the exact method none at all."""
    scale, ratio = SCALES[name]
    recipe = recipes.muon(scale)
    exact = dataclasses.replace(recipe.role("linear"), geometry=sf.Spectral("svd"))
    model = Tower().double()
    plan = Plan.of(model, recipe, overrides=[(lambda name, p: name in HIDDEN, exact)])
    train(model, SteepestDescent(model, plan, lr=0.02), 3)
    compare(dict(model.named_parameters()), loops(muon_loop(0.02, ratio), HIDDEN, 3), atol=1e-12)


@pytest.mark.parametrize("shape", [(6, 15), (15, 6), (8, 8), (1, 7)], ids=str)
@pytest.mark.parametrize("name", SCALES)
def test_scale_factors_are_torchs(name, shape):
    muon = pytest.importorskip("torch.optim._muon")
    scale, ratio = SCALES[name]
    theirs = muon._adjust_lr(1.0, name, torch.Size(shape))
    natural = math.sqrt(shape[0] / shape[1])  # of our direction
    assert scale((1, *shape)) * natural == pytest.approx(theirs, rel=1e-12)
    assert ratio(*shape) == pytest.approx(theirs, rel=1e-12)


def test_muon_beside_torchs_own_class():
    """Its five Newton-Schulz steps in bfloat16 are 15 to 30 % away from the polar factor; decay and scale agree."""
    ours = run(recipes.muon(), 0.02, torch.float32)
    model = Tower()
    hidden = [p for name, p in model.named_parameters() if name in HIDDEN]
    theirs = torch.optim.Muon(hidden, lr=0.02, weight_decay=0.1, momentum=0.95)
    train(model, theirs)
    start = dict(Tower().named_parameters())
    for name in HIDDEN:
        a, b = ours[name] - start[name], dict(model.named_parameters())[name] - start[name]
        assert 0.8 < (a.norm() / b.norm()) < 1.35
        assert torch.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.95


# --- sign methods ------------------------------------------------------------------------------------------


def test_lion_is_the_published_loop():
    lr, decay = 0.01, 0.1

    def update(name, w, state, g, t):
        m = state.get("m", torch.zeros_like(g))
        step = (0.9 * m + 0.1 * g).sign() + (decay * w if w.ndim == 2 else 0)
        state["m"] = 0.99 * m + 0.01 * g
        return w - lr * step

    compare(run(recipes.lion(), lr), loops(update), atol=1e-12)


def test_sign_sgd_is_the_sign():
    compare(run(recipes.sign_sgd(), 0.01), loops(lambda name, w, state, g, t: w - 0.01 * g.sign()), atol=1e-12)


def test_natural_sign_has_the_width_factor():
    def update(name, w, state, g, t):
        m = state.get("m", torch.zeros_like(g))
        state["m"] = 0.99 * m + 0.01 * g
        fan_in = w.shape[-1] if w.ndim == 2 and name != "table.weight" else 1  # an embedding's input is one-hot
        return w - 0.01 * (0.9 * m + 0.1 * g).sign() / fan_in

    compare(run(sf.contrib.sign_natural(), 0.01), loops(update), atol=1e-12)


# --- Scion -------------------------------------------------------------------------------------------------


def test_scion_is_the_published_loop():
    lr, radius, head_radius = 1e-3, 50.0, 3000.0

    def rms(x):
        return x.square().mean(-1, keepdim=True).sqrt()

    def lmo(name, m):
        if name in HIDDEN:
            return math.sqrt(m.shape[0] / m.shape[1]) * polar(m)
        return m.sign() / m.shape[1] if name == "out.weight" else m / rms(m)

    def update(name, w, state, g, t):
        m = state["m"] = 0.9 * state.get("m", torch.zeros_like(g)) + 0.1 * g
        return (1 - lr) * w - lr * (head_radius if name == "out.weight" else radius) * lmo(name, m)

    ours, theirs = run(recipes.scion(), lr), loops(update)
    compare(ours, {n: w for n, w in theirs.items() if n not in HIDDEN}, atol=1e-12)
    compare(ours, {n: w for n, w in theirs.items() if n in HIDDEN}, atol=5e-3)


# --- MOGA --------------------------------------------------------------------------------------------------


def moga_loop(lr, linear, embedding):
    """Algorithm 1: look-ahead from the old momentum, (0.95, 0.9)."""

    def direction(name, x):
        if x.ndim == 1:
            return x.sign()
        if name == "out.weight":  # (2, inf)
            return x / x.norm(dim=1, keepdim=True) / math.sqrt(x.shape[1])
        return (embedding if name == "table.weight" else linear)(x)

    def update(name, w, state, g, t):
        m = state.get("m", torch.zeros_like(g))
        look = 0.9 * m + 0.1 * g
        state["m"] = 0.95 * m + 0.05 * g
        return w - lr * direction(name, look)

    return update


def row(x, p):
    return x.sign() * x.abs() ** (p - 1) / x.norm(p, dim=1, keepdim=True) ** (p - 1) / x.shape[1] ** (1 / p)


def rows_rms(x):
    return x / x.square().mean(1, keepdim=True).sqrt()


@pytest.mark.parametrize("p", [1.5, 2.0, 3.0])
def test_moga_row_is_algorithm_1(p):
    compare(run(recipes.moga_row(p), 0.02), loops(moga_loop(0.02, lambda x: row(x, p), rows_rms)), atol=1e-10)


@pytest.mark.parametrize("q", [1.5, 2.0, 3.0])
def test_moga_column_is_algorithm_1(q):
    dual = q / (q - 1)

    def unit(x, dim):
        return x.sign() * x.abs() ** (dual - 1) / x.norm(dual, dim=dim, keepdim=True) ** (dual - 1)

    def column(x):
        return x.shape[0] ** (1 / q) / x.shape[1] * unit(x, 0)

    loop = moga_loop(0.02, column, lambda x: x.shape[1] ** (1 / q) * unit(x, 1))
    compare(run(recipes.moga_column(q), 0.02), loops(loop), atol=1e-10)


# --- the role table ----------------------------------------------------------------------------------------


def test_beyond_mup_is_the_role_table():
    def update(name, w, state, g, t):
        m = state.get("m", torch.zeros_like(g))
        look = 0.8 * m + 0.2 * g
        state["m"] = 0.9 * m + 0.1 * g
        if name in HIDDEN:
            step = math.sqrt(w.shape[0] / w.shape[1]) * polar(look)
        elif name == "out.weight":
            step = 16 / w.shape[1] * rows_rms(look)
        elif name == "norm.weight":
            step = look.sign() / 4
        else:
            step = look / look.square().mean(-1, keepdim=True).sqrt() / (4 if name.endswith("bias") else 1)
        return w - 0.02 * step

    ours, theirs = run(recipes.beyond_mup(), 0.02), loops(update)
    compare(ours, {n: w for n, w in theirs.items() if n not in HIDDEN}, atol=1e-10)
    compare(ours, {n: w for n, w in theirs.items() if n in HIDDEN}, atol=2e-3)


def test_the_frobenius_sphere_keeps_that_norm_of_every_matrix():
    start, ours = dict(Tower().double().named_parameters()), run(sf.contrib.frobenius_sphere(), 0.1)

    def update(name, w, state, g, t):
        m = state["m"] = 0.95 * state.get("m", torch.zeros_like(g)) + 0.05 * g
        stepped = w - 0.1 * rows_rms(0.95 * m + 0.05 * g) / (w.shape[1] if name == "out.weight" else 1)
        return stepped * (w.norm() / stepped.norm())

    compare(ours, loops(update, TABLES), atol=1e-10)
    for name in (*HIDDEN, *TABLES):
        assert ours[name].norm().item() == pytest.approx(start[name].norm().item(), rel=1e-10)
