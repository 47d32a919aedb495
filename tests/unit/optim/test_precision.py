"""Momentum in 16 and 8 bits and half-precision weights: right on average, exact where promised, resumed bit for bit."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.optim.precision import average
from surefoot.optim.rounding import to_int8

BF16 = torch.bfloat16
SHAPE = (6, 10)


def pull(seed, shape=SHAPE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def optimizer_of(p, storage, role="linear", **options):
    return sf.SteepestDescent([{"params": [p], "role": role}], lr=0.05, precision=storage, **options)


def steps(p, optimizer, numbers):
    for i in numbers:
        p.grad = pull(i, p.shape).to(p.dtype)
        optimizer.step()


# --- momentum


@pytest.mark.parametrize(("dtype", "bytes_each", "near"), [(BF16, 2.01, 0.01), (torch.int8, 1.04, 0.05)], ids=str)
def test_small_momentum_takes_few_bytes_and_follows_float32(dtype, bytes_each, near):
    exact, small = nn.Parameter(pull(0, (64, 128)) / 8), nn.Parameter(pull(0, (64, 128)) / 8)
    one, other = optimizer_of(exact, None), optimizer_of(small, sf.Precision(dtype))
    steps(exact, one, range(40))
    steps(small, other, range(40))
    state, momentum = other.state[small], one.state[exact]["momentum"]
    assert state["momentum"].dtype == dtype
    assert sum(x.numel() * x.element_size() for x in state.values()) <= bytes_each * small.numel()
    exact, small = exact.detach(), small.detach()
    difference = (exact - small).norm() / (exact - pull(0, (64, 128)) / 8).norm()
    assert 0 < float(difference) < near
    error = (average(state, "momentum", torch.float32) - momentum).norm() / momentum.norm()
    assert float(error) < near


def test_vectors_and_adams_means_are_kept_in_bfloat16_beside_eight_bits():
    """In 8 bits an entry below others of its block came out 1000 times its history: no step had a bound."""
    adam, plain = sf.Role("adam", sf.Identity(), momentum=sf.Adam()), sf.Role("plain", sf.Spectral())
    vector, matrix, none = nn.Parameter(pull(0, (7,))), nn.Parameter(pull(0)), nn.Parameter(pull(0))
    groups = [{"params": [vector], "role": "bias"}, {"params": [matrix], "role": adam}]
    groups.append({"params": [none], "role": replace(plain, momentum=sf.Momentum(0.0))})
    optimizer = sf.SteepestDescent(groups, lr=0.05, precision=sf.Precision(torch.int8))
    uneven = pull(1).mul_(torch.where(torch.arange(pull(0).shape[1]) < 2, 1.0, 1e-4))
    for i in range(30):
        before = matrix.detach().clone()
        vector.grad, matrix.grad, none.grad = pull(i, (7,)), uneven, pull(i)
        optimizer.step()
        assert float((matrix.detach() - before).abs().max()) <= 0.05 * sf.Adam().largest
    dtypes = {name: x.dtype for p in (vector, matrix, none) for name, x in optimizer.state[p].items() if x.ndim}
    assert dtypes == {"momentum": BF16, "exp_avg": BF16, "exp_avg_sq": BF16}
    packed = optimizer.state_dict()  # as an earlier version saved it
    packed["state"][1]["exp_avg"], packed["state"][1]["exp_avg_scale"] = to_int8(
        optimizer.state[matrix]["exp_avg"].float()
    )
    optimizer.load_state_dict(packed)
    assert optimizer.state[matrix]["exp_avg"].dtype == BF16


def test_an_average_keeps_what_rounding_to_nearest_would_lose():
    """A gradient of 1/500 of the momentum: its share of a step is below half a unit in the last place."""
    role = sf.Role("slow", sf.RMS(), view=sf.views.Vector(), momentum=sf.Momentum(0.99))
    p = nn.Parameter(torch.zeros(4000))
    optimizer = optimizer_of(p, sf.Precision(BF16), role)
    p.grad = torch.full((4000,), 100.0)
    optimizer.step()
    start = float(optimizer.state[p]["momentum"].float().mean())
    p.grad = torch.full((4000,), start * 1.2)
    for _ in range(50):
        optimizer.step()
    expected = start * (1 + 0.2 * (1 - 0.99**50))
    assert float(optimizer.state[p]["momentum"].float().mean()) == pytest.approx(expected, rel=1e-3)
    assert torch.tensor(start, dtype=BF16).lerp(torch.tensor(start * 1.2, dtype=BF16), 0.01) == torch.tensor(
        start, dtype=BF16
    )


def test_parameters_of_one_shape_have_noise_of_their_own():
    ps = [nn.Parameter(pull(0)) for _ in range(2)]
    optimizer = sf.SteepestDescent([{"params": ps, "role": "linear"}], lr=0.1, precision=sf.Precision(BF16))
    for p in ps:
        p.grad = pull(1)
    optimizer.step()
    one, other = (optimizer.state[p]["momentum"] for p in ps)
    assert not torch.equal(one, other)
    assert torch.allclose(one.float(), other.float(), rtol=2**-7)


# --- weights


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("scheme", [sf.Free(), sf.PostClip(0.6)], ids=repr)
def test_a_master_copy_trains_as_float32_does(dtype, scheme):
    role = replace(sf.recipes.beyond_mup().role("linear"), stabiliser=scheme)
    half = nn.Parameter((pull(0) / 4).to(dtype))
    exact = nn.Parameter(half.detach().float())
    one, other = optimizer_of(half, sf.Precision(weights=sf.MasterWeights()), role), optimizer_of(exact, None, role)
    for i in range(20):
        half.grad = pull(i).to(dtype)
        exact.grad = half.grad.float()
        one.step()
        other.step()
    assert torch.equal(one.state[half]["master"], exact)
    assert torch.equal(half, exact.to(dtype))


def test_small_steps_need_a_master_copy_or_stochastic_rounding():
    """Steps of 1/1000 of the weight, 200 times."""
    means = {}
    for rounding in (sf.RoundToNearest(), sf.StochasticRounding(), sf.MasterWeights()):
        p = nn.Parameter(torch.ones(8, 500, dtype=BF16))
        role = sf.Role("plain", sf.MaxNorm(), view=sf.views.Vector())
        optimizer = sf.SteepestDescent(
            [{"params": [p], "role": role}], lr=1e-3, precision=sf.Precision(weights=rounding)
        )
        for _ in range(200):
            p.grad = torch.ones_like(p)
            optimizer.step()
        means[type(rounding)] = float(p.detach().float().mean())
    assert means[sf.RoundToNearest] == 1.0
    assert means[sf.StochasticRounding] == pytest.approx(0.8, abs=0.002)
    assert means[sf.MasterWeights] == pytest.approx(0.8, abs=0.002)


def test_a_write_from_outside_replaces_the_master_copy():
    p = nn.Parameter(torch.ones(4, 4, dtype=BF16))
    optimizer = optimizer_of(p, sf.Precision(weights=sf.MasterWeights()))
    steps(p, optimizer, range(3))
    with torch.no_grad():
        p[0] = 5.0
    old_master = optimizer.state[p]["master"].clone()
    p.grad = torch.zeros_like(p)
    p.grad[0, 0] = 1e-30
    for group in optimizer.param_groups:
        group["lr"] = 1e-9
    optimizer.step()
    master = optimizer.state[p]["master"]
    assert torch.allclose(master[0], torch.tensor(5.0), atol=1e-6)
    assert torch.allclose(master[1:], old_master[1:], atol=1e-6)


@pytest.mark.parametrize("weights", [sf.RoundToNearest(), sf.StochasticRounding(), sf.MasterWeights()], ids=repr)
@pytest.mark.parametrize("momentum", [torch.float32, BF16, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_every_precision_obeys_the_optimizers_laws(weights, momentum, dtype):
    """No change for a zero gradient or lr = 0; a resume goes on bit for bit, a copy too."""
    p = nn.Parameter(pull(0).to(dtype))
    optimizer = optimizer_of(p, sf.Precision(momentum, weights))
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(p, before)
    steps(p, optimizer, range(3))
    old = p.detach().clone()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    p.grad = torch.zeros_like(p)
    kept = optimizer.state[p]["momentum"].clone()
    optimizer.step()
    assert torch.equal(p, old)
    assert torch.equal(optimizer.state[p]["momentum"], kept)
    for group in optimizer.param_groups:
        group["lr"] = 0.05
    resumed = nn.Parameter(p.detach().clone())
    again = optimizer_of(resumed, sf.Precision(momentum, weights))
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copied = copy.deepcopy(optimizer)
    (twin,) = copied.param_groups[0]["params"]
    for parameter, its_optimizer in ((p, optimizer), (resumed, again), (twin, copied)):
        steps(parameter, its_optimizer, range(3, 8))
    assert torch.equal(p, resumed)
    assert torch.equal(p, twin)
    assert not torch.equal(p, old)


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (None, sf.Precision(BF16)),
        (sf.Precision(BF16, sf.MasterWeights()), None),
        (None, sf.Precision(torch.int8)),
        (sf.Precision(torch.int8), None),
        (sf.Precision(BF16), sf.Precision(torch.int8)),
    ],
)
def test_a_checkpoint_of_another_precision_is_converted(saved, wanted):
    p = nn.Parameter(pull(0).to(BF16))
    old = optimizer_of(p, saved)
    steps(p, old, range(3))
    new = optimizer_of(p, wanted)
    new.load_state_dict(old.state_dict())
    before, after = old.state[p], new.state[p]
    assert after["momentum"].dtype == (wanted.momentum if wanted else torch.float32)
    one, other = (average(state, "momentum", torch.float32) for state in (before, after))
    eight = torch.int8 in (before["momentum"].dtype, after["momentum"].dtype)
    assert torch.allclose(one, other, rtol=2**-7, atol=float(one.abs().max()) / 120 if eight else 0)
    assert ("momentum_scale" in after) == (after["momentum"].dtype == torch.int8)
    assert ("master" in after, "rounds" in after) == (False, wanted is not None)
    steps(p, new, range(3, 5))
    assert new.state[p]["momentum"].dtype == after["momentum"].dtype


def test_momentum_in_8_bits_goes_on_in_double_precision_when_the_model_does():
    p = nn.Parameter(pull(0))
    optimizer = optimizer_of(p, sf.Precision(torch.int8))
    steps(p, optimizer, range(3))
    before = average(optimizer.state[p], "momentum", torch.float32)
    p.data, p.grad = p.data.double(), None
    steps(p, optimizer, range(3, 4))
    after = optimizer.state[p]
    assert after["momentum"].dtype == torch.float64
    assert "momentum_scale" not in after
    want = torch.lerp(before.double(), pull(3).double(), 0.05)
    torch.testing.assert_close(after["momentum"], want, rtol=0, atol=1e-6)


def test_a_checkpoint_whose_eight_bits_lack_their_scale_is_refused():
    p = nn.Parameter(pull(0))
    old = optimizer_of(p, sf.Precision(torch.int8))
    steps(p, old, range(1))
    for precision in (None, sf.Precision(torch.int8)):
        saved = old.state_dict()
        del saved["state"][0]["momentum_scale"]
        with pytest.raises(ValueError, match="lacks 'momentum_scale'"):
            optimizer_of(p, precision).load_state_dict(saved)


def test_noise_goes_by_the_name_without_wrappers_and_not_by_the_order():
    def momenta(names, role="linear"):
        ps = [(name, nn.Parameter(torch.ones(4, 4))) for name in names]
        optimizer = sf.SteepestDescent([{"params": ps, "role": role}], lr=0.1, precision=sf.Precision(BF16))
        for _, p in ps:
            p.grad = pull(0, (4, 4))
        optimizer.step()
        return {name.rpartition("module.")[2]: optimizer.state[p]["momentum"] for name, p in ps}

    first = momenta(["a.weight", "b.weight"])
    second = momenta(["module.b.weight", "_orig_mod.module.a.weight"])
    assert not torch.equal(first["a.weight"], first["b.weight"])
    assert torch.equal(first["a.weight"], second["a.weight"])
    assert torch.equal(first["b.weight"], second["b.weight"])


def test_float64_parameters_have_float64_momentum_under_every_precision():
    p = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
    optimizer = optimizer_of(p, sf.Precision(BF16))
    steps(p, optimizer, range(2))
    assert optimizer.state[p]["momentum"].dtype == torch.float64


# --- refused


def test_unsupported_dtypes_and_roundings_are_refused():
    with pytest.raises(ValueError, match=r"torch\.bfloat16 or torch\.int8, not torch\.float16"):
        sf.Precision(torch.float16)
    for rounding in (sf.MasterWeights, "nearest"):
        with pytest.raises(ValueError, match="not "):
            sf.Precision(weights=rounding)
    for other in (torch.bfloat16, "bf16", sf.MasterWeights(), sf.Precision, 0, False):
        with pytest.raises(ValueError, match=r"Precision\(\.\.\.\), mom.*torch.int8, weights .*Master.*, not "):
            optimizer_of(nn.Parameter(torch.ones(2, 2)), other)
    with pytest.raises(ValueError, match="float8_e4m3fn cannot be stepped"):
        optimizer_of(nn.Parameter(torch.ones(2, 2).to(torch.float8_e4m3fn)), None)
    with pytest.raises(ValueError, match="take MasterWeights"):
        optimizer_of(nn.Parameter(torch.ones(2, 2, dtype=torch.float16)), sf.Precision(weights=sf.StochasticRounding()))
    wide = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    optimizer = optimizer_of(wide, sf.Precision(weights=sf.StochasticRounding()))
    steps(wide, optimizer, range(1))
    assert optimizer.state[wide]["momentum"].dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.complex64])
def test_a_cast_to_what_a_rounding_cannot_store_is_refused_at_the_step(dtype):
    """`model.half()` under stochastic rounding stored bfloat16's digits."""
    p = nn.Parameter(torch.ones(4, 4))
    optimizer = optimizer_of(p, sf.Precision(weights=sf.StochasticRounding()))
    steps(p, optimizer, range(1))
    p.data, p.grad = p.data.to(dtype), None
    p.grad = torch.ones(4, 4).to(dtype)
    before = p.detach().clone()
    with pytest.raises(ValueError, match=r"^group0\.0(: .*; take MasterWeights| of .* cannot be stepped| is complex)"):
        optimizer.step()
    assert torch.equal(before.view(torch.uint8), p.detach().view(torch.uint8))
