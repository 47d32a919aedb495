"""SOAP before a direction, against the published loop in float64, written with numpy's eigenvectors and QR."""

import numpy as np
import pytest
import torch

import surefoot as sf
from surefoot.linalg import onednn_ops


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def gradients(shape, steps, seed=0):
    """Correlated along both sides, as gradients are."""
    mix = [torch.randn(n, n, generator=seeded(seed + 1), dtype=torch.float64) for n in shape[-2:]]
    for t in range(steps):
        yield mix[0] @ torch.randn(shape, generator=seeded(seed + 10 + t), dtype=torch.float64) @ mix[1].mT


def start(soap, shape):
    w = torch.zeros(shape, dtype=torch.float64)
    return {name: x[None] for name, x in (soap.init_state(w) | soap.init_memory(w)).items()}


def scaled(x):
    return x / x.norm()


def published(history, beta, memory, every=1, limit=100, floor=1e-6):
    """Algorithm 3, its bases turned by the present gradient; a basis that is None is left out."""
    d_out, d_in = history[0].shape
    m, second, sides = 0, 0, [np.eye(n) if n <= limit else None for n in (d_out, d_in)]
    factors = [np.zeros((n, n)) for n in (d_out, d_in)]
    for t, g in enumerate(history):
        m = beta * m + (1 - beta) * g
        for i, x in enumerate((g, g.T)):
            factors[i] = memory * factors[i] + (1 - memory) * x @ x.T
            if sides[i] is not None and t % every == 0:
                shifted = factors[i] + 1e-5 * factors[i].max() * np.eye(len(x))
                sides[i] = np.linalg.qr(shifted @ sides[i])[0]
        left, right = (np.eye(len(f)) if q is None else q for q, f in zip(sides, factors, strict=True))
        second = memory * second + (1 - memory) * (left.T @ g @ right) ** 2
        root = np.sqrt(np.maximum(second, floor * second.max()))
        yield left @ ((left.T @ m @ right) / root) @ right.T


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (5, 5), (1, 4), (4, 1)], ids=str)
def test_it_is_the_published_loop(shape, every):
    soap = sf.SOAP(sf.Momentum(0.9), memory=0.8, every=every)
    history, state = list(gradients(shape, 8)), start(soap, (1, *shape))
    wanted = published([g.numpy() for g in history], 0.9, 0.8, every)
    for g, want in zip(history, wanted, strict=True):
        state, white = soap(state, g[None, None], 1.0)
        torch.testing.assert_close(scaled(white[0, 0]), scaled(torch.from_numpy(want)), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (5, 5)], ids=str)
def test_by_the_shorter_side_alone_the_longer_keeps_its_own_basis_and_a_square_turns_both(shape):
    soap = sf.SOAP(sf.Momentum(0.9), memory=0.8, sides="shorter")
    history, state = list(gradients(shape, 6)), start(soap, (1, *shape))
    for g, want in zip(history, published([g.numpy() for g in history], 0.9, 0.8, limit=min(shape)), strict=True):
        state, white = soap(state, g[None, None], 1.0)
        torch.testing.assert_close(scaled(white[0, 0]), scaled(torch.from_numpy(want)), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("shape", [(4, 6), (6, 4)], ids=str)
def test_a_side_that_is_too_long_keeps_its_own_basis_and_no_factor(shape):
    soap = sf.SOAP(sf.Momentum(0.9), memory=0.8, largest=4)
    history, state = list(gradients(shape, 6)), start(soap, (1, *shape))
    for g, want in zip(history, published([g.numpy() for g in history], 0.9, 0.8, limit=4), strict=True):
        state, white = soap(state, g[None, None], 1.0)
        torch.testing.assert_close(scaled(white[0, 0]), scaled(torch.from_numpy(want)), rtol=1e-7, atol=1e-7)
    assert sum(x.numel() for x in state.values()) == 2 * 24 + 2 * 4**2 + 1
    both = sf.SOAP(sf.Momentum(0.0), memory=0.8, largest=2)
    g = history[0]
    _, entrywise = both(start(both, (1, *shape)), g[None, None], 1.0)
    kept = g.square() >= 1e-6 * g.square().max()
    torch.testing.assert_close(scaled(entrywise[0, 0])[kept].abs() * kept.sum().sqrt(), torch.ones(kept.sum()).double())


def test_the_bases_become_the_eigenvectors_of_the_means():
    """Of 300 gradients from one source; and V the second moments there, largest where both eigenvalues are."""
    soap, state = sf.SOAP(sf.Momentum(0.9), memory=0.99), start(sf.SOAP(), (1, 4, 3))
    for g in gradients((4, 3), 300):
        state, _ = soap(state, g[None, None], 1.0)
    for name in ("left", "right"):
        factor, basis = state[name][0, 0], state[f"{name}_basis"][0, 0]
        values = (basis.mT @ factor @ basis).diagonal()
        torch.testing.assert_close(values, torch.linalg.eigvalsh(factor).flip(-1), rtol=0.05, atol=0)
        torch.testing.assert_close(basis.mT @ basis, torch.eye(len(basis)).double())
    assert state["second"][0, 0].argmax() == 0


def test_it_is_adams_step_where_gradients_have_the_entries_own_basis():
    """Diagonal gradients: the means are diagonal, their eigenvectors the axes, and what is left is `m / sqrt(v)`."""
    soap, state = sf.SOAP(sf.Momentum(0.9), memory=0.8), start(sf.SOAP(), (1, 3, 3))
    m = v = torch.zeros(3, dtype=torch.float64)
    for t in range(6):
        g = torch.randn(3, generator=seeded(t), dtype=torch.float64)
        state, white = soap(state, g.diag()[None, None], 1.0)
        m, v = 0.9 * m + 0.1 * g, 0.8 * v + 0.2 * g**2
        expected = (m / v.clamp_min(1e-6 * v.max()).sqrt()).diag()
        torch.testing.assert_close(scaled(white[0, 0]), scaled(expected), rtol=1e-12, atol=1e-12)


def test_a_matrix_at_rest_keeps_its_state_and_others_do_not_see_it():
    """Two experts, one of which sits out every other step, beside the same two alone with their own gradients."""
    soap = sf.SOAP(sf.Momentum(0.9, 0.5), memory=0.8, every=2)
    state, alone = start(soap, (2, 4, 6)), [start(soap, (1, 4, 6)) for _ in range(2)]
    for t, g in enumerate(gradients((2, 4, 6), 6)):
        moves = [True, t % 2 == 0]
        active = torch.tensor(moves, dtype=torch.float64)[None, :, None, None]
        before = {name: x.clone() for name, x in state.items()}
        state, white = soap(state, (g * active[0])[None], active)
        for i, moved in enumerate(moves):
            if moved:
                alone[i], own = soap(alone[i], g[None, i : i + 1], 1.0)
                torch.testing.assert_close(white[:, i], own[:, 0], rtol=1e-10, atol=1e-10)
            else:
                assert all(torch.equal(x[:, i], before[name][:, i]) for name, x in state.items())
    assert state["turns"].tolist() == [[6.0, 3.0]]


@pytest.mark.parametrize("shape", [(6, 4), (4, 4)], ids=str)
@pytest.mark.parametrize("momentum", [sf.SOAP(sf.Momentum(0.9)), sf.contrib.Whitened(0.9)], ids=repr)
def test_under_a_norm_of_rows_a_row_without_gradient_is_one_of_the_matrix(momentum, shape):
    table = torch.nn.Parameter(torch.randn(shape, generator=seeded(1)))
    role = sf.Role("embedding", sf.RowRMS(), momentum=momentum)
    optimizer = sf.SteepestDescent([{"params": [table], "role": role}], lr=0.1)
    for t in range(3):
        table.grad = torch.randn(shape, generator=seeded(2 + t))
        table.grad[1] *= t == 0
        optimizer.step()
    left = optimizer.state[table]["left"][0]
    torch.testing.assert_close(left, left.mT)


@pytest.mark.parametrize("shape", [(2, 128, 512), (2, 512, 128), (0, 128, 512)], ids=str)
def test_large_matrices_by_onednn_are_those_of_float64(shape, monkeypatch):
    """Of the shorter side, whose factor has full rank from the first step on: in another, rounding chooses vectors."""
    if not onednn_ops._has_onednn():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setenv(onednn_ops.VARIABLE, "onednn")
    soap = sf.SOAP(sf.Momentum(0.9, 0.5), memory=0.8, sides="shorter")
    state, exact = {n: x.float() for n, x in start(soap, shape).items()}, start(soap, shape)
    for t in range(3):
        g = torch.randn((1, *shape), generator=seeded(t), dtype=torch.float64)
        (state, white), (exact, wanted) = soap(state, g.float(), 1.0), soap(exact, g, 1.0)
        assert white.shape == g.shape
        assert not g.numel() or float((scaled(white.double()) - scaled(wanted)).norm()) < 1e-4


@pytest.mark.parametrize(
    "settings",
    [{"memory": 1.0}, {"floor": 0.0}, {"every": 0}, {"every": float("nan")}, {"every": 1.5}, {"sides": "left"}],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(ValueError, match=r"memory must lie|every 1 step or more|not 'left'"):
        sf.SOAP(**settings)
