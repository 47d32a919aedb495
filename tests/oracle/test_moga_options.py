"""MOGA's options by Algorithm 1 written out, and what its sources get wrong."""

import math

import pytest
import torch
from test_torch import Tower, compare, loops, row, rows_rms, run
from torch import nn

import surefoot as sf
from surefoot import Plan, SteepestDescent, recipes

LR = 0.02


def dual(x, q, dim):
    """The vectors along dim of l_q norm 1 with the largest product with those of x; the sign for q = inf."""
    p = 1.0 if math.isinf(q) else q / (q - 1)
    return x.sign() * x.abs() ** (p - 1) / x.norm(p, dim=dim, keepdim=True) ** (p - 1)


def algorithm_1(linear, embedding, head_p, bias_q):
    """One parameter's step: look-ahead from the old momentum, (0.95, 0.9); line 9's two rules for biases."""
    roles = {name: placement.role.name for name, placement in Plan.of(Tower()).placements.items()}

    def direction(name, x):
        if roles[name] == "bias":
            return len(x) ** (1 / bias_q) * dual(x, bias_q, 0)
        if roles[name] == "gain":
            return x.sign()
        if roles[name] == "head":
            return row(x, head_p)
        return embedding(x) if roles[name] == "embedding" else linear(x)

    def update(name, w, state, g, t):
        m = state.get("m", torch.zeros_like(g))
        state["m"] = 0.95 * m + 0.05 * g
        return w - LR * direction(name, 0.9 * m + 0.1 * g)

    return update


@pytest.mark.parametrize(("p", "head_p", "bias_q"), [(1.5, 1.5, 2.0), (3.0, 4.0, 1.5), (2.0, 1.0, math.inf)])
def test_row_with_its_options(p, head_p, bias_q):
    loop = algorithm_1(lambda x: row(x, p), rows_rms, head_p, bias_q)
    compare(run(recipes.moga_row(p, head_p, bias_q), LR, steps=7), loops(loop, steps=7), atol=1e-12)


@pytest.mark.parametrize(("q", "head_p", "bias_q"), [(3.0, 1.0, 3.0), (2.0, 1.5, 2.0), (math.inf, 2.0, 1.5)])
def test_column_with_its_options(q, head_p, bias_q):
    loop = algorithm_1(
        lambda x: x.shape[0] ** (1 / q) / x.shape[1] * dual(x, q, 0),
        lambda x: x.shape[1] ** (1 / q) * dual(x, q, 1),
        head_p,
        bias_q,
    )
    compare(run(recipes.moga_column(q, head_p, bias_q), LR, steps=7), loops(loop, steps=7), atol=1e-12)


def test_the_recipes_name_has_the_options_that_are_not_the_default():
    assert recipes.moga_row(1.5).name == "moga_row(1.5)"
    assert recipes.moga_column(3, head_p=1, bias_q=3).name == "moga_column(3, head_p=1, bias_q=3)"
    assert recipes.moga_row(bias_q=2).role("bias").weight_norm is None  # it is the bias's own
    assert recipes.moga_row(bias_q=3).role("bias").weight_norm == sf.RMS()
    assert recipes.moga_row(head_p=1).role("head").weight_norm == sf.HeadRMS()


@pytest.mark.parametrize("recipe", [recipes.moga_row(1.5), recipes.moga_column(3.0)], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("vocab", [8, 512])
def test_a_tokens_step_does_not_depend_on_the_vocabulary(recipe, vocab):
    """Algorithm 1 taken word for word divides an embedding's step by its fan-in, the number of tokens."""
    model = nn.Embedding(vocab, 16)
    before = model.weight.detach().clone()
    optimizer = SteepestDescent(model, Plan.of(model, recipe, head=()), lr=0.1)
    model.weight.grad = torch.randn(vocab, 16, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    q = 2.0 if recipe.name.startswith("moga_row") else 3.0
    moved = (model.weight.detach() - before).abs().pow(q).mean(1) ** (1 / q)
    torch.testing.assert_close(moved, torch.full((vocab,), 0.1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("recipe", [recipes.moga_row(1.5), recipes.moga_column(3.0)], ids=lambda recipe: recipe.name)
def test_steps_go_against_the_gradient(recipe):
    """The slides' row and column examples lack the minus sign that their Algorithm 1 has."""
    model = nn.Linear(6, 4)
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = SteepestDescent(model, Plan.of(model, recipe), lr=0.1)
    model(torch.ones(3, 6)).square().sum().backward()
    optimizer.step()
    assert all(float(((p.detach() - w) * p.grad).sum()) < 0 for p, w in zip(model.parameters(), start, strict=True))


def test_a_bias_moves_by_sign_under_moga_and_by_rms_under_the_role_table():
    g = torch.tensor([3.0, -1.0, 0.5, 0.0])
    moga, natural = (recipe.role("bias").geometry.direction(g) for recipe in (recipes.moga_row(), recipes.beyond_mup()))
    torch.testing.assert_close(moga, g.sign())
    torch.testing.assert_close(natural, g / g.square().mean().sqrt())
