"""Hyperball against its published formula, in a few lines of numpy."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot import recipes

STEPS, RATE = 7, 0.05


class Model(nn.Module):
    """An embedding, a tall and a wide matrix, a gain, a bias and a head."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.up, self.down = nn.Linear(6, 15), nn.Linear(15, 6, bias=False)
        self.norm = nn.RMSNorm(6)
        self.out = nn.Linear(6, 9, bias=False)


def exact():
    """The recipe with exact matrix signs."""
    recipe = recipes.hyperball()
    linear = replace(recipe.role("linear"), geometry=sf.Spectral("svd"))
    return sf.Recipe(recipe.name, {**recipe.table, "linear": linear})


def length(x):
    return np.sqrt((x * x).sum())


def published(name, w, gradients):
    """`W <- R n(W - eta R n(u))` with Nesterov's u through the layer's rule; vectors by plain steps."""
    momentum, radius = np.zeros_like(w), length(w)
    for g in gradients:
        momentum = 0.95 * momentum + 0.05 * g
        u = 0.95 * momentum + 0.05 * g
        if name in ("up.weight", "down.weight"):
            left, _, right = np.linalg.svd(u, full_matrices=False)
            u = left @ right
        elif w.ndim == 2:
            u = u / np.sqrt((u * u).sum(1, keepdims=True))
        else:
            w = w - RATE * (np.sign(u) if name == "norm.weight" else u / np.sqrt((u * u).mean()))
            continue
        moved = w - RATE * radius * u / length(u)
        w = radius * moved / length(moved)
    return w


def test_seven_steps_are_the_published_ones():
    torch.manual_seed(0)
    model = Model().double()
    plan = sf.Plan.of(model, exact())
    plan.initialise_(model, 0)
    start = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    gradients = {name: [torch.randn_like(p) for _ in range(STEPS)] for name, p in model.named_parameters()}
    optimizer = sf.SteepestDescent(model, plan, lr=RATE)
    for step in range(STEPS):
        for name, p in model.named_parameters():
            p.grad = gradients[name][step].clone()
        optimizer.step()
    for name, p in model.named_parameters():
        expected = published(name, start[name], [g.numpy() for g in gradients[name]])
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=0, atol=1e-12, err_msg=name)
        assert np.abs(expected - start[name]).max() > 1e-3
        if p.ndim == 2:
            assert length(p.detach().numpy()) == pytest.approx(length(start[name]), rel=1e-12)


def test_the_recipe_of_before_is_another_one():
    assert recipes.hyperball().role("linear") != sf.contrib.frobenius_sphere().role("linear")
    assert sf.contrib.frobenius_sphere().role("linear").stabiliser == sf.Normalise(norm=sf.Frobenius())
