"""Like parameters together, pieces of large ones, other shapes and layouts: the same step as alone and whole."""

import math
import pickle

import pytest
import torch
from optim_helpers import RECIPES, all_recipes, noise, one, small, stepped
from torch import nn

import surefoot as sf
from combinations import combinations
from comparisons import weights
from surefoot import Plan, SteepestDescent
from surefoot import step as steps
from surefoot.optim.batching import batches
from surefoot.step import step as take


@pytest.mark.parametrize("role", ["linear", "embedding", "head"])
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)], ids=str)
def test_empty_matrices(role, shape):
    full, empty = nn.Parameter(noise(6, 4)), nn.Parameter(torch.zeros(shape))
    optimizer = SteepestDescent([{"params": [full, empty], "role": role}], lr=0.1)
    full.grad, empty.grad = noise(6, 4, seed=1), torch.zeros(shape)
    before = full.detach().clone()
    optimizer.step()
    assert empty.shape == shape
    assert not torch.equal(before, full.detach())
    assert optimizer.stability()["group0.1"]["forward_upper"] == 0


@pytest.mark.parametrize("recipe", ["moonlight", "rmnp"])
def test_scales_of_the_longer_side_take_an_empty_matrix(recipe):
    w = nn.Parameter(torch.zeros(0, 0))
    w.grad = torch.zeros(0, 0)
    SteepestDescent([{"params": [w], "role": getattr(sf.recipes, recipe)().role("linear")}], lr=0.1).step()


def test_like_parameters_step_as_they_do_alone():
    shape, count = (512, 512), 6  # more than one stack on a CPU
    values = [noise(*shape, seed=s) for s in range(count)]
    gradients = [noise(*shape, seed=10 + s) * 10.0**s for s in range(count)]
    ws = [nn.Parameter(v.clone()) for v in values]
    optimizer = SteepestDescent([{"params": ws, "role": "linear"}], lr=1.0)
    for w, g in zip(ws, gradients, strict=True):
        w.grad = g
    optimizer.step()
    for w, value, g in zip(ws, values, gradients, strict=True):
        assert torch.allclose(w.detach(), stepped("linear", value, g, lr=1.0), atol=1e-5)


@pytest.mark.parametrize(
    ("size", "count", "stacks"),
    [
        ((128, 128), 24, [12, 12]),  # 1.5 MiB
        ((128, 512), 6, [6]),  # 1.5 MiB, but fewer than four would be inverted in another way
        ((128, 512), 9, [4, 5]),
        ((256, 1024), 3, [1, 1, 1]),
        ((512, 256), 7, [1, 2, 2, 2]),
        ((8, 8), 3, [3]),
        ((0, 8), 2, [2]),
    ],
    ids=str,
)
def test_stacks_are_cut_evenly(size, count, stacks):
    found = [*batches(range(count), lambda _: (torch.device("cpu"), size))]
    assert [len(stack) for stack in found] == stacks
    assert [item for stack in found for item in stack] == [*range(count)]


@all_recipes
def test_like_layers_of_a_model_step_as_they_do_alone(recipe):
    layers = nn.ModuleList(nn.Conv1d(4, 6, 3, groups=2) for _ in range(3))
    plan = Plan.of(layers, recipe)
    alone = [nn.ModuleList([layer]) for layer in layers]
    copies = nn.ModuleList(nn.Conv1d(4, 6, 3, groups=2) for _ in range(3))
    copies.load_state_dict(layers.state_dict())
    for seed, (p, q) in enumerate(zip(layers.parameters(), copies.parameters(), strict=True)):
        p.grad = noise(*p.shape, seed=seed)
        q.grad = p.grad.clone()
    SteepestDescent(copies, plan, lr=0.01).step()
    for model in alone:
        SteepestDescent(model, Plan.of(model, recipe), lr=0.01).step()
    for p, q in zip(layers.parameters(), copies.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)


def test_channels_last_takes_the_same_step_and_stays():
    plain, last = nn.Conv2d(4, 8, 3), nn.Conv2d(4, 8, 3)
    last.load_state_dict(plain.state_dict())
    last = last.to(memory_format=torch.channels_last)
    optimizers = [SteepestDescent(m, Plan.of(m, stabiliser=sf.PostClip(1.0)), lr=0.1) for m in (plain, last)]
    for seed in range(3):
        for model, optimizer in zip((plain, last), optimizers, strict=True):
            model(noise(1, 4, 5, 5, seed=seed)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert last.weight.is_contiguous(memory_format=torch.channels_last)
    assert not last.weight.is_contiguous()
    assert torch.allclose(plain.weight, last.weight, atol=1e-4)


def test_transposed_weight_takes_the_same_step():
    value, g = noise(4, 6), noise(4, 6, seed=1)
    w = nn.Parameter(value.T.contiguous().T)
    optimizer = SteepestDescent([{"params": [w], "role": "linear"}], lr=0.1)
    for _ in range(2):
        w.grad = g.T.contiguous().T
        optimizer.step()
    assert w.stride() == (1, 4)
    assert torch.allclose(w.detach(), stepped("linear", value, g, g), atol=1e-6)


def states(optimizer):
    return {f"{i}.{name}": x for i, s in optimizer.state_dict()["state"].items() for name, x in s.items()}


@combinations(recipe=RECIPES, stabiliser=[sf.Free(), sf.WeightDecay(2.0), sf.PostClip(0.5), sf.Rescale(0.5)])
def test_a_step_in_pieces_is_the_step_of_the_whole(recipe, stabiliser, monkeypatch):
    """Blocks of any role, cut or not to 40 bytes a piece, take the step that they take whole."""
    results = []
    monkeypatch.setattr(steps, "LINE", 1)
    for budget in (1 << 20, 40):
        monkeypatch.setitem(steps.PIECE_BYTES, "cpu", budget)
        model = small()
        optimizer = SteepestDescent(model, Plan.of(model, recipe, stabiliser=stabiliser), lr=0.1)
        for seed in range(3):
            for p in model.parameters():
                p.grad = noise(*p.shape, seed=seed)
            model.table.weight.grad[3:] = 0
            optimizer.step()
        results.append(weights(model) | states(optimizer))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("role", ["embedding", "gain"])
def test_a_piece_that_is_not_finite_stops_them_all(role, monkeypatch):
    monkeypatch.setitem(steps.PIECE_BYTES, "cpu", 64)
    w, optimizer = one(role, noise(64, 4) if role == "embedding" else noise(256))
    w.grad = torch.ones_like(w)
    optimizer.step()
    before, momentum = w.detach().clone(), optimizer.state[w]["momentum"].clone()
    w.grad.view(-1)[-1] = math.inf
    optimizer.step()
    assert torch.equal(w, before)
    assert torch.equal(optimizer.state[w]["momentum"], momentum)
    assert int(optimizer.state[w]["skipped"]) == 1


def test_vectors_of_like_size_and_other_shapes():
    """`(4, 3)` and `(12,)` have blocks of one shape; each keeps its own."""
    together = [nn.Parameter(noise(4, 3)), nn.Parameter(noise(12, seed=1))]
    alone = [nn.Parameter(p.detach().clone()) for p in together]
    for i, (p, q) in enumerate(zip(together, alone, strict=True)):
        p.grad, q.grad = noise(*p.shape, seed=2 + i), noise(*p.shape, seed=2 + i)
    whole = SteepestDescent([{"params": together, "role": "scalar"}], lr=0.1)
    for _ in range(2):
        whole.step()
    for p, q in zip(together, alone, strict=True):
        single = SteepestDescent([{"params": [q], "role": "scalar"}], lr=0.1)
        for _ in range(2):
            single.step()
        assert torch.equal(p, q)
        assert torch.equal(whole.state[p]["momentum"], single.state[q]["momentum"])


def test_autograd_notices_a_write_to_weights_that_lie_side_by_side():
    params = [nn.Parameter(noise(4, 3)) for _ in range(3)]
    for p, w in zip(params, noise(3, 4, 3).unbind(), strict=True):
        p.data, p.grad = w, torch.ones(4, 3)
    loss = (noise(2, 3).requires_grad_() @ params[1].T).square().sum()
    loss.backward(retain_graph=True)
    SteepestDescent([{"params": params, "role": "linear"}], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_momenta_of_like_parameters_lie_side_by_side():
    """So a step stacks them without a copy; where one is missing they are copied, and no memory is added."""
    params = [nn.Parameter(noise(4, 3, seed=i)) for i in range(3)]
    single = [nn.Parameter(p.detach().clone()) for p in params]
    together = SteepestDescent([{"params": params, "role": "linear"}], lr=0.1)
    alone = [SteepestDescent([{"params": [p], "role": "linear"}], lr=0.1) for p in single]
    for step, missing in enumerate((None, None, 1, 0, None)):
        for i, (p, q) in enumerate(zip(params, single, strict=True)):
            p.grad = None if i == missing else noise(4, 3, seed=10 * step + i)
            q.grad = None if i == missing else noise(4, 3, seed=10 * step + i)
        for optimizer in (together, *alone):
            optimizer.step()
        momenta = [together.state[p]["momentum"] for p in params]
        assert len({m.untyped_storage().data_ptr() for m in momenta}) == 1
        assert momenta[0].untyped_storage().nbytes() == 3 * 4 * 3 * 4
        for p, q, optimizer in zip(params, single, alone, strict=True):
            assert torch.equal(p, q)
            assert torch.equal(together.state[p]["momentum"], optimizer.state[q]["momentum"])


def test_momenta_are_saved_apart_and_lie_side_by_side_again_after_loading():
    params = [nn.Parameter(noise(4, 3, seed=i)) for i in range(3)]
    optimizer = SteepestDescent([{"params": params, "role": "linear"}], lr=0.1)

    def storages():
        for p in params:
            p.grad = noise(4, 3)
        optimizer.step()
        return {optimizer.state[p]["momentum"].untyped_storage().data_ptr() for p in params}

    assert len(storages()) == 1
    saved = optimizer.state_dict()
    assert saved["state"][1]["momentum"].untyped_storage().nbytes() == 4 * 3 * 4, "one carries its whole bucket"
    optimizer.load_state_dict(saved)
    assert len(storages()) == 1


def test_pieces_are_taken_where_rows_are_independent(monkeypatch):
    """One call of `step` per piece, and one for a matrix that is a single problem."""
    calls = []
    monkeypatch.setitem(steps.PIECE_BYTES, "cpu", 64)
    for role, count in (("embedding", 4), ("linear", 1)):  # 16 rows are the least
        calls.clear()
        w = nn.Parameter(noise(64, 4))
        w.grad = noise(64, 4, seed=1)
        counted = lambda *arguments: calls.append(arguments) or take(*arguments)  # noqa: E731
        SteepestDescent([{"params": [w], "role": role}], lr=0.1, step=counted).step()
        assert len(calls) == count


class WholeGradient(sf.Smoothing):
    """A user's own, which reads the whole gradient: a table must not be cut for it."""

    averages = ("momentum",)

    def init_state(self, w):
        return {"momentum": torch.zeros_like(w)}

    def active(self, g, finite, couples):
        return finite.to(g.dtype)

    def __call__(self, state, g, active):
        m = torch.lerp(state["momentum"], g / g.square().mean((-2, -1), keepdim=True).sqrt(), 0.1 * active)
        return {"momentum": m}, m


def test_smoothing_of_the_whole_gradient_is_not_cut(monkeypatch):
    results = []
    for budget in (1 << 20, 64):
        monkeypatch.setitem(steps.PIECE_BYTES, "cpu", budget)
        w = nn.Parameter(noise(64, 4))
        w.grad = noise(64, 4, seed=1) * torch.linspace(0.01, 10, 64)[:, None]
        role = sf.Role("table", sf.RowRMS(), momentum=WholeGradient())
        optimizer = SteepestDescent([{"params": [w], "role": role}], lr=0.1)
        optimizer.step()
        results.append(torch.cat([w.detach(), optimizer.state[w]["momentum"]]))
    assert torch.equal(*results)


def test_a_bound_of_the_parameters_shape_is_still_one_of_blocks():
    """Three blocks of one entry have three bounds, as many as the parameter has entries."""

    class Costly(sf.RMS):
        costly = True

    role = sf.Role("mine", Costly(), view=sf.views.Projections((1, 1, 1)), stabiliser=sf.PostClip(0.7))
    params = [nn.Parameter(noise(3, seed=i)) for i in range(2)]
    optimizer = SteepestDescent([{"params": params, "role": role}], lr=0.5)
    for _ in range(5):
        for p in params:
            p.grad = -p.detach().clone()
        optimizer.step()
    assert max(float(p.detach().abs().max()) for p in params) <= 0.7 * (1 + 1e-3)


def test_a_pickled_optimizer_carries_each_momentum_once():
    params = [nn.Parameter(noise(32, seed=i)) for i in range(50)]
    optimizer = SteepestDescent([{"params": params, "role": "bias"}], lr=0.1)
    for p in params:
        p.grad = noise(32)
    optimizer.step()
    copied = pickle.loads(pickle.dumps(optimizer))
    sizes = {p: state["momentum"].untyped_storage().nbytes() for p, state in copied.state.items()}
    assert set(sizes.values()) == {32 * 4}


def test_an_optimizer_whose_step_is_compiled_is_pickled():
    optimizer = SteepestDescent(nn.Linear(2, 2), lr=0.1, step=sf.compiled(dynamic=True))
    copied = pickle.loads(pickle.dumps(optimizer))
    assert copied._step._options == {"dynamic": True}
