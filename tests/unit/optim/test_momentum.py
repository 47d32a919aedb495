"""State and dtypes: momentum as the average of gradients, rounding, memory per parameter, and random numbers."""

import dataclasses
import math

import pytest
import torch
from optim_helpers import ROLES, all_recipes, backward, noise, one, small
from torch import nn

import surefoot as sf
from comparisons import bits
from surefoot import Plan, SteepestDescent
from surefoot.optim.rounding import BLOCK, from_int8, noise_key, noise_seed, stochastic, to_int8
from surefoot.roles import NATURAL


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lookahead", [None, 0.9, 0.5])
@pytest.mark.parametrize("role", ROLES)
def test_momentum_is_the_average_of_the_gradients(role, lookahead, dtype):
    """Normalising must not write to it, whatever the direction is computed from (torch's Muon did, in bfloat16)."""
    rule = dataclasses.replace(NATURAL[role], momentum=sf.Momentum(0.9, lookahead))
    w, optimizer = one(rule, noise(*ROLES[role]).to(dtype))
    average = torch.zeros(ROLES[role], dtype=torch.float64)
    for seed in range(6):
        w.grad = noise(*ROLES[role], seed=seed).to(dtype)
        average = 0.9 * average + 0.1 * w.grad.double()
        optimizer.step()
        assert optimizer.state[w]["momentum"].dtype == torch.float32
        assert torch.allclose(optimizer.state[w]["momentum"].double(), average, atol=1e-6)


def test_an_entry_without_gradients_rests_under_adam_without_an_epsilon():
    rule = sf.Role("own", sf.geometry.Identity(), view=NATURAL["bias"].view, momentum=sf.Adam(eps=0.0))
    w, optimizer = one(rule, torch.ones(3))
    w.grad = torch.tensor([1.0, 0.0, -2.0])
    optimizer.step()
    torch.testing.assert_close(w.detach(), torch.tensor([0.9, 1.0, 1.1]))


@pytest.mark.parametrize("shape", [(3000, 99), (2, 300, 300), (3, 1 << 18)], ids=str)
def test_a_large_tensor_is_rounded_in_pieces_as_it_is_whole(shape):
    x, seed = noise(*shape), torch.tensor(5, dtype=torch.int32)
    assert torch.equal(stochastic(x, seed, 7), stochastic.__wrapped__(x, seed, 7))
    for ours, whole in zip(to_int8(x, seed, 7), to_int8.__wrapped__(x, seed, 7), strict=True):
        assert torch.equal(ours, whole)


def test_lookahead_uses_the_old_momentum():
    rule = sf.Role("own", sf.RMS(), view=NATURAL["bias"].view, momentum=sf.Momentum(0.9, 0.5))
    w, optimizer = one(rule, torch.zeros(4), lr=1.0)
    gradients = [noise(4, seed=s) for s in (1, 2)]
    for g in gradients:
        before = w.detach().clone()
        w.grad = g
        optimizer.step()
    look = 0.5 * 0.1 * gradients[0] + 0.5 * gradients[1]
    assert torch.allclose(before - w.detach(), look / look.square().mean().sqrt(), atol=1e-6)


@pytest.mark.parametrize("role", ROLES)
def test_low_precision_weights_are_rounded_once(role):
    value = noise(*ROLES[role]).bfloat16()
    w, optimizer = one(role, value)
    exact, twin = one(role, value.float())
    for seed in range(4):
        w.grad = noise(*ROLES[role], seed=seed).bfloat16()
        exact.grad = w.grad.float()
        optimizer.step()
        twin.step()
        assert torch.equal(bits(w), bits(exact.bfloat16()))
        with torch.no_grad():
            exact.copy_(exact.bfloat16())
    assert torch.equal(optimizer.state[w]["momentum"], twin.state[exact]["momentum"])


def test_float64_parameters_have_float64_momentum():
    value, g = noise(6, 4).double(), noise(6, 4, seed=1).double()
    w, optimizer = one("linear", value, lr=1.0)
    w.grad = g
    optimizer.step()
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    assert optimizer.state[w]["momentum"].dtype == torch.float64
    assert torch.allclose(value - w.detach(), math.sqrt(6 / 4) * u @ vh, atol=1e-3)
    assert torch.allclose(optimizer.state[w]["momentum"], 0.05 * g, atol=1e-15)


@all_recipes
def test_state_is_four_bytes_a_parameter_or_what_the_recipe_says(recipe):
    class Model(nn.Module):
        def __init__(self, d=64, v=256):
            super().__init__()
            self.table, self.out = nn.Embedding(v, d), nn.Linear(d, v, bias=False)
            self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(d, 4, 3 * d) for _ in range(2))

    model = Model()
    optimizer = SteepestDescent(model, Plan.of(model, recipe), lr=0.1)
    for p in model.parameters():
        p.grad = noise(*p.shape)
    optimizer.step()
    sizes = [t.numel() * t.element_size() for state in optimizer.state.values() for t in state.values()]
    entries = sum(p.numel() for p in model.parameters())
    limits = {"sign_sgd": 0.1, "steady": 5.2, "steady_soap": 10.6, "muon(keller)": 8.1}  # tables have 8 at most
    limit = limits.get(recipe.name, 4.1)
    assert sum(sizes) / entries <= limit


def test_state_holds_tensors_and_the_groups_plain_values():
    model = small()
    optimizer = SteepestDescent(model, lr=0.1)
    backward(model, 0)
    optimizer.step()
    state = optimizer.state_dict()
    assert all(isinstance(v, torch.Tensor) for entry in state["state"].values() for v in entry.values())
    for group in state["param_groups"]:
        assert all(isinstance(v, (str, int, float, bool, list)) for v in group.values())
    names = str([{k: v for k, v in g.items() if k != "param_names"} for g in state["param_groups"]])
    assert "up.weight" not in names


@all_recipes
def test_a_step_draws_no_random_numbers(recipe):
    model = small()
    optimizer = SteepestDescent(model, Plan.of(model, recipe, stabiliser=sf.PostClip(0.5)), lr=0.1)
    backward(model, 0)
    before = torch.get_rng_state()
    for _ in range(2):
        optimizer.step()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("way", ["loaded", "cast"])
@pytest.mark.parametrize("weights", [sf.RoundToNearest(), sf.StochasticRounding(), sf.MasterWeights()], ids=repr)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (torch.float32, torch.float64),
        (torch.float64, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_all_state_follows_the_parameters_dtype(before, after, weights, way):
    """After a checkpoint of another dtype and after model.to(dtype); counts stay as they are."""

    def build(dtype, recipe):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 8)).to(dtype)
        plan = sf.Plan.of(model, recipe, stabiliser=sf.PostClip(1.0))
        return model, sf.SteepestDescent(model, plan, lr=0.1, precision=sf.Precision(weights=weights))

    def train(model, optimizer):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()

    for recipe in (sf.recipes.steady(), sf.recipes.steady_soap(), sf.recipes.normuon()):
        (model, optimizer), (fresh, wanted) = build(before, recipe), build(after, recipe)
        train(model, optimizer)
        if way == "cast":
            model.to(after)
        else:
            saved = optimizer.state_dict()
            model, optimizer = build(after, recipe)
            optimizer.load_state_dict(saved)
        optimizer.stability()
        train(model, optimizer)
        train(fresh, wanted)
        dtypes, like = ([{k: x.dtype for k, x in s.items()} for s in o.state.values()] for o in (optimizer, wanted))
        assert dtypes == like, recipe.name
        assert all(p.isfinite().all() for p in model.parameters())


# --- rounding at random

SHAPE = (6, 10)


def count(i):
    return torch.tensor(i, dtype=torch.int32)


def pull(seed, shape=SHAPE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_stochastic_rounding_is_right_on_average_and_never_further_than_a_neighbour():
    x = torch.cat([pull(0, (2000,)), pull(1, (2000,)) * 1e-30, pull(2, (2000,)) * 1e30])
    rounded = torch.stack([stochastic(x, count(i)).double() for i in range(500)])
    low = (x.view(torch.int32) & -0x10000).view(torch.float32).double()
    unit = (rounded - low).abs().amax(0)
    assert ((rounded == low) | ((rounded - low).abs() == unit)).all()
    fraction = (x.double() - low).abs() / unit.clamp_min(1e-300)
    up = ((rounded - low).abs() > 0).double().mean(0)
    moved = unit > 0
    deviation = (up - fraction)[moved] / (fraction * (1 - fraction) / 500).sqrt()[moved].clamp_min(1e-9)
    assert abs(float(deviation.mean())) < 0.1
    assert 0.9 < float(deviation.std()) < 1.1, "as independent coins would"


def test_noise_differs_between_counts_and_entries_and_repeats_with_the_count():
    x = torch.full((4096,), 1 + 2**-8)  # half way
    a, b = stochastic(x, count(1)), stochastic(x, count(2))
    assert torch.equal(a, stochastic(x, count(1)))
    for first, other in ((a, b), (a[:-1], a[1:]), (a[:2048], a[2048:])):
        assert abs(float((first == other).float().mean()) - 0.5) < 0.05


def test_bfloat16_numbers_are_unchanged_bit_for_bit():
    special = [
        0.0,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        1.0,
        -3.5,
        2.0**-126,
        2.0**-133,
        torch.finfo(torch.bfloat16).max,
    ]
    x = torch.cat([torch.tensor(special), pull(0, (500,)).to(torch.bfloat16).float()])
    for i in range(20):
        assert torch.equal(stochastic(x, count(i)).view(torch.int16), x.to(torch.bfloat16).view(torch.int16))
        odd = torch.tensor([0x7F800001, -1], dtype=torch.int32).view(torch.float32)  # NaNs whose low bits would carry
        assert stochastic(odd, count(i)).isnan().all()
    assert stochastic(torch.empty(0, 3), count(0)).shape == (0, 3)


def test_no_generator_is_consumed_and_no_argument_is_written():
    x, n, before = pull(0), count(3), torch.get_rng_state()
    copy_of_x = x.clone()
    stochastic(x.T, n)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(x, copy_of_x)
    assert int(n) == 3
    assert torch.equal(stochastic(x.T.contiguous(), n), stochastic(x.T, n))


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_eight_bits_are_right_on_average_and_within_a_part_of_their_blocks_largest(scale):
    x = pull(0, (40, 3 * BLOCK - 5)) * pull(1, (40, 1)).exp() * scale
    rounded = torch.stack([from_int8(*to_int8(x, count(i))).double() for i in range(500)])
    unit = from_int8(torch.ones_like(x, dtype=torch.int8), to_int8(x)[1]).double()
    largest = torch.stack([part.abs().amax(-1) for part in x.split(BLOCK, -1)], -1).double()
    assert (unit[:, ::BLOCK] * 64 <= largest).all()
    assert (largest < unit[:, ::BLOCK] * 128).all()
    assert ((rounded - x).abs() <= unit).all()
    assert ((from_int8(*to_int8(x)).double() - x).abs() <= unit).all()
    inner = x.double().abs() < 127 * unit
    part = (x.double() / unit) % 1
    deviation = ((rounded - x).mean(0) / unit)[inner] / (part * (1 - part) / 500).sqrt()[inner].clamp_min(1e-3)
    assert abs(float(deviation.mean())) < 0.1
    assert 0.9 < float(deviation.std()) < 1.1, "as independent coins would"


def test_numbers_of_eight_bits_are_unchanged_bit_for_bit():
    x = torch.cat([pull(0, (6, 70)), torch.zeros(2, 70), pull(1, (2, 70)) * 2.0**-140])
    for i in range(20):
        stored = to_int8(x, count(i))
        again = to_int8(from_int8(*stored), count(i + 1))
        assert torch.equal(from_int8(*again), from_int8(*stored))
        assert all(torch.equal(one[:8], other[:8]) for one, other in zip(stored, again, strict=True))  # below: all 0
    for shape in ((0, 3), (3, 0), (2, 0, 5)):
        assert from_int8(*to_int8(torch.empty(shape), count(0))).shape == shape


def test_thousands_of_parameters_have_noise_of_their_own():
    keys = [noise_key(f"blocks.{i}.weight") for i in range(2100)]
    assert len(set(keys)) == len(keys)
    seeds = torch.stack([noise_seed(torch.tensor(key << 32) + torch.arange(50)) for key in keys])
    assert len(seeds.unique()) > seeds.numel() * 0.9999
    lags = [float((seeds[0, lag:] == seeds[1, : 50 - lag]).float().mean()) for lag in range(40)]
    assert max(lags) == 0


@pytest.mark.parametrize("start", [0, 1, 7, 12, 29])
def test_a_part_is_rounded_as_in_the_whole(start):
    x = torch.rand(30)
    assert torch.equal(stochastic(x, count(3))[start:], stochastic(x[start:], count(3), index=start))
    rows = torch.rand(30, 7)
    for whole, part in zip(to_int8(rows, count(3)), to_int8(rows[start:], count(3), index=7 * start), strict=True):
        assert torch.equal(whole[start:], part)
