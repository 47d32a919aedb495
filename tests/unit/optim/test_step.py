"""One step: its loss, gradients, size and descent, and bounds that hold also after writes from outside."""

import copy
import math

import pytest
import torch
from optim_helpers import ROLES, all_recipes, backward, noise, one, small, stepped
from torch import nn

import surefoot as sf
from comparisons import natural_norm, same_bits, weights
from surefoot import Plan, SteepestDescent
from surefoot.plan import warn_once


def test_step_returns_the_closures_loss_and_enables_gradients():
    model = small()
    optimizer = SteepestDescent(model, lr=0.01)
    enabled = []

    def closure():
        optimizer.zero_grad()
        enabled.append(torch.is_grad_enabled())
        return backward(model, 0)

    before = weights(model)
    with torch.no_grad():
        loss = optimizer.step(closure)
    assert enabled == [True]
    assert loss.item() > 0
    assert not same_bits(before, weights(model))
    assert optimizer.step() is None


@all_recipes
def test_maximize_climbs(recipe):
    after = []
    for sign in (1, -1):
        model = small()
        optimizer = SteepestDescent(model, Plan.of(model, recipe), lr=0.001, maximize=sign < 0)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step)
            for p in model.parameters():
                p.grad = noise(*p.shape, seed=step) * sign
            optimizer.step()
        after.append(weights(model))
    assert same_bits(*after)


def test_sparse_gradient_is_a_clear_error():
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = SteepestDescent(table, Plan.of(table, head=()), lr=0.1)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"sparse gradients.*sparse=False"):
        optimizer.step()


@all_recipes
def test_gradients_are_not_written_to(recipe):
    model = small()
    optimizer = SteepestDescent(model, Plan.of(model, recipe), lr=0.1)
    for step in range(2):
        backward(model, step)
        before = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        assert same_bits(before, {name: p.grad for name, p in model.named_parameters()})


def test_gradient_accumulation_is_the_step_of_the_sum():
    a, b = small(), small()
    for seed in (0, 1):
        backward(a, seed)
    sums = [p.grad.clone() for p in a.parameters()]
    for p, g in zip(b.parameters(), sums, strict=True):
        p.grad = g
    for model in (a, b):
        SteepestDescent(model, lr=0.1).step()
    assert same_bits(weights(a), weights(b))


def test_gradient_scaler_changes_nothing_and_skips_an_overflow():
    a, b = small(), small()
    scaler, plain = SteepestDescent(a, lr=0.1), SteepestDescent(b, lr=0.1)
    scale = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    tokens = torch.tensor([[0, 1, 2]])
    scale.scale(a(tokens).square().mean()).backward()
    b(tokens).square().mean().backward()
    scale.step(scaler)
    scale.update()
    plain.step()
    assert same_bits(weights(a), weights(b))
    before = weights(a)
    a.up.weight.grad.fill_(math.inf)
    scale.scale(a(tokens).square().mean()).backward()
    scale.step(scaler)
    scale.update()
    assert same_bits(before, weights(a))
    assert scale.get_scale() == 2.0**9


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch 2.9 gives gradients the weight's dtype")
@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32], ids=str)
def test_gradient_of_another_dtype(weight):
    value = noise(6, 4).to(weight)
    other = torch.float32 if weight == torch.bfloat16 else torch.float64
    g = noise(6, 4, seed=1).to(other)
    w, optimizer = one("linear", value)
    w.grad_dtype = None
    w.grad = g
    optimizer.step()
    assert optimizer.state[w]["momentum"].dtype == torch.float32
    assert torch.equal(w.detach(), stepped("linear", value.float(), g.float()).to(weight))


@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1e12, 1e25])
@pytest.mark.parametrize("role", ROLES)
def test_the_size_of_the_gradient_does_not_matter(role, scale):
    value, g = noise(*ROLES[role]), [noise(*ROLES[role], seed=s) for s in (1, 2)]
    expected = stepped(role, value, *g, lr=1.0)
    assert torch.allclose(expected, stepped(role, value, *(x * scale for x in g), lr=1.0), atol=1e-5)
    assert (expected - value).abs().max() > 0.05


@pytest.mark.parametrize("geometry", [sf.MeanOperator(1.5, math.inf), sf.MeanOperator(1, 2), sf.RowMean(3.0)], ids=str)
def test_the_size_of_the_gradient_does_not_matter_to_general_exponents(geometry):
    role, value, g = sf.Role("own", geometry), noise(6, 4), noise(6, 4, seed=1)
    assert torch.allclose(stepped(role, value, g), stepped(role, value, g * 1e-25), atol=1e-5)


@pytest.mark.parametrize("stabiliser", [sf.PostClip(0.5), sf.Rescale(0.5)], ids=str)
def test_weights_written_from_outside_are_bounded_on_the_next_step(stabiliser):
    model = small()
    optimizer = SteepestDescent(model, Plan.of(model, stabiliser=stabiliser), lr=0.1)
    ema = {name: 20 * p for name, p in weights(model).items()}

    def check():
        optimizer.zero_grad()
        backward(model, 0)
        optimizer.step()
        assert natural_norm(model.up.weight) <= 0.5 * 1.001
        assert natural_norm(model.down.weight) <= 0.5 * 1.001
        assert model.table.weight.square().mean(-1).sqrt().max() <= 0.5 * 1.001
        assert 6 * model.out.weight.square().mean(-1).sqrt().max() <= 0.5 * math.log(11) * 1.001
        assert model.norm.weight.abs().max() <= 0.5 * 1.001

    for _ in range(3):
        check()
    with torch.no_grad():
        model.up.weight.mul_(50)  # a reset in place
    check()
    model.load_state_dict(ema)  # a swap
    check()
    model.down.weight.data = 20 * torch.ones(6, 24)  # around the version counter
    check()


@pytest.mark.parametrize("role", ["linear", "conv", "embedding", "head", "bias", "gain"])
def test_the_first_step_has_norm_lr(role):
    shape = {"conv": (6, 4, 3)}.get(role) or ROLES[role]
    w, optimizer = one(role, torch.zeros(shape), lr=0.25)
    w.grad = noise(*shape)
    optimizer.step()
    numbers = optimizer.stability()["group0.0"]
    assert numbers["forward_lower"] == pytest.approx(0.25, rel=0.35 if role in ("linear", "conv") else 1e-5)
    assert numbers["forward_lower"] <= 0.25 * 1.001
    assert numbers["update_upper"] == pytest.approx(0.25, rel=2e-3)


def test_the_step_descends():
    for role, shape in ROLES.items():
        g = noise(*shape)
        assert (stepped(role, torch.zeros(shape), g) * g).sum() < 0


def test_stability_reports_every_parameter_in_natural_units():
    model = small()
    optimizer = SteepestDescent(model, Plan.of(model, sf.recipes.beyond_mup()), lr=0.02)
    report = optimizer.stability()
    assert {name.partition("[")[0] for name in report} == {name for name, _ in model.named_parameters()}
    assert report["up.weight"]["forward_lower"] == pytest.approx(natural_norm(model.up.weight), rel=0.02)
    assert report["out.weight"]["update_upper"] == pytest.approx(16 * 0.02, rel=1e-4)
    assert report["table.weight"]["forward_upper"] == pytest.approx(
        float(model.table.weight.detach().square().mean(-1).sqrt().max()), rel=1e-6
    )


# --- what loops do to groups and parameters between two steps


@pytest.mark.parametrize("setting", [{"weight_decay": 0.5}, {"betas": (0.9, 0.95)}])
def test_a_schedule_of_another_optimizers_setting_is_refused(setting):
    """DINO's and MAE's loops write `group["weight_decay"] = schedule[step]`."""
    model = small()
    optimizer, before = SteepestDescent(model, lr=0.1), weights(model)
    backward(model, 0)
    optimizer.param_groups[1].update(setting)
    with pytest.raises(TypeError, match=f"takes no {next(iter(setting))}: decay follows from run="):
        optimizer.step()
    assert same_bits(before, weights(model))


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("shape", [(14, 6), (0,), (66,)], ids=str)
def test_a_parameter_of_another_shape_than_it_had_is_refused_by_name(steps, shape):
    """A vocabulary that is resized in place, weights that FullyShardedDataParallel has flattened."""
    model = small()
    optimizer = SteepestDescent(model, lr=0.1)
    for seed in range(steps):
        backward(model, seed)
        optimizer.step()
    before, table = weights(model), model.table.weight
    optimizer.zero_grad()
    table.data = torch.ones(shape)
    table.grad = torch.ones(shape)
    with pytest.raises(ValueError, match=r"table\.weight has shape .*, but \(11, 6\) in the plan: .*fully_shard"):
        optimizer.step()
    assert same_bits({**before, "table.weight": torch.ones(shape)}, weights(model))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.uint8])
def test_frozen_parameters_may_be_of_any_dtype_as_in_torch(dtype):
    """A quantised base of adapters."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight = nn.Parameter(torch.ones(4, 4).to(dtype), requires_grad=False)
    optimizer = sf.SteepestDescent(model, lr=0.1, precision=sf.Precision(weights=sf.StochasticRounding()))
    before = model[1].weight.detach().clone()
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    assert not torch.equal(before, model[1].weight)
    assert torch.equal(model[0].weight.to(torch.complex64), torch.ones(4, 4, dtype=torch.complex64))
    assert "1.weight" in optimizer.stability()
    optimizer.load_state_dict(optimizer.state_dict())


def test_a_step_without_any_gradient_says_once_that_it_moves_nothing(caplog):
    """An optimizer that was made before `fully_shard`, or of a model that was then copied, trains nothing."""
    model = small()
    optimizer = SteepestDescent(model, lr=0.1)
    warn_once.cache_clear()
    for _ in range(2):
        backward(copy.deepcopy(model), 0)
        optimizer.step()
    (record,) = caplog.records
    assert "no parameter of the optimizer has a gradient; copy or wrap the model before making it" in record.message
    backward(model, 0)
    optimizer.step()
    assert len(caplog.records) == 1


@pytest.mark.parametrize("kind", ["embedding", "head"])
def test_a_table_of_one_entry_steps_as_it_does_beside_others(kind):
    """Its history, one number a row, has the shape of the table itself."""
    role, tables = sf.recipes.steady().role(kind), [nn.Parameter(torch.ones(rows, 1)) for rows in (1, 2)]
    optimizer = SteepestDescent([{"params": tables, "role": role}], lr=0.1)
    for g in (0.5, -2.0, 3.0):
        for p in tables:
            p.grad = torch.full_like(p, g)
        optimizer.step()
    assert torch.equal(tables[0], tables[1][:1])
    assert not torch.equal(tables[0], torch.ones(1, 1))


def test_a_parameter_without_a_shape_is_refused_by_name():
    with pytest.raises(ValueError, match=r"group0\.0 has no shape before the first forward pass"):
        SteepestDescent([{"params": [nn.UninitializedParameter()], "role": "linear"}], lr=0.1)
