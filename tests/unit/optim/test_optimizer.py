"""The optimizer as users of torch's optimizers know it, and what one step does and leaves alone."""

import dataclasses
import math
import platform
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import surefoot as sf
import surefoot.optim.optimizer
import surefoot.step
from surefoot import Plan, SteepestDescent, recipes
from surefoot.optim.batching import stack_adjacent
from surefoot.step import step as take

RECIPES = [
    recipes.beyond_mup(),
    recipes.moga_row(1.5),
    recipes.moga_column(),
    recipes.muon(),
    recipes.scion(),
    recipes.lion(),
    recipes.sign_sgd(),
    recipes.hyperball(),
]
STABILISERS = [
    sf.WeightDecay(2.0),
    sf.PostClip(0.5),
    sf.PreDecay(2.0),
    sf.Rescale(0.5),
    sf.Normalise(0.5),
    sf.SpectralSphere(0.5),
]
ROLES = {"linear": (6, 4), "embedding": (9, 4), "head": (9, 4), "gain": (7,), "bias": (7,), "scalar": ()}
by_name = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


class Small(nn.Module):
    """A parameter of every kind; 3 tokens of 11 are seen."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1, groups=2)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.up = nn.Linear(6, 24)
        self.down = nn.Linear(24, 6)
        self.norm = nn.LayerNorm(6)
        self.temperature = nn.Parameter(torch.ones(()))
        self.out = nn.Linear(6, 11, bias=False)

    def forward(self, tokens):
        x = self.table(tokens)
        x = x + self.conv(x.mT).mT
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.down(self.up(self.norm(x)).relu())
        return self.out(self.norm(x)) * self.temperature


def small(seed=0):
    model = Small()
    Plan.of(model).initialise_(model, seed)
    return model


def backward(model, seed):
    """Gradients on random tokens of 0, 1, 2."""
    tokens = torch.randint(3, (4, 5), generator=torch.Generator().manual_seed(seed))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
    loss.backward()
    return loss


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def one(role, value, **options):
    """A parameter with this value and an optimizer of it alone."""
    w = nn.Parameter(value.clone())
    return w, SteepestDescent([{"params": [w], "role": role}], **{"lr": 0.1, **options})


def stepped(role, value, *gradients, **options):
    """The value after a step with each gradient."""
    w, optimizer = one(role, value, **options)
    for gradient in gradients:
        w.grad = gradient.clone()
        optimizer.step()
    return w.detach()


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def bits(x):
    return x.detach().contiguous().view({4: torch.int32, 2: torch.int16}[x.element_size()])


def same(a, b):
    """Bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(bits(a[name]), bits(b[name])) for name in a)


def spectral(w):
    return float(torch.linalg.matrix_norm(w.detach().double(), 2)) * math.sqrt(w.shape[1] / w.shape[0])


# --- construction ------------------------------------------------------------------------------------------


def test_the_three_ways_to_build_it_are_the_same():
    results = []
    for build in (
        lambda model: SteepestDescent(model, lr=0.1),
        lambda model: SteepestDescent(model, Plan.of(model), lr=0.1),
        lambda model: SteepestDescent(model.named_parameters(), Plan.of(model), lr=0.1),
    ):
        model = small()
        optimizer = build(model)
        backward(model, 0)
        optimizer.step()
        results.append(weights(model))
        assert isinstance(optimizer, torch.optim.Optimizer)
    assert same(results[0], results[1])
    assert same(results[0], results[2])
    assert not same(results[0], weights(small()))


def test_groups_by_role_with_names():
    groups = SteepestDescent(small(), lr=0.1).param_groups
    assert {g["role"]: len(g["params"]) for g in groups} == {
        "embedding": 1,
        "conv": 1,
        "bias": 6,
        "linear": 4,
        "gain": 1,
        "scalar": 1,
        "head": 1,
    }
    assert sorted(n for g in groups for n in g["param_names"]) == sorted(n for n, _ in small().named_parameters())


def test_root_linear_is_role_linear():
    assert [g["role"] for g in SteepestDescent(nn.Linear(3, 2, bias=False), lr=0.1).param_groups] == ["linear"]


def test_a_named_role_has_natural_scale_and_no_bound():
    w, optimizer = one("head", torch.ones(3, 4), lr=1.0)
    w.grad = noise(3, 4)
    optimizer.step()
    assert torch.allclose((1 - w).detach(), sf.HeadRMS().direction(w.grad), atol=1e-6)  # and not 16 times that


def test_a_role_object_in_a_group():
    own = sf.Role("mine", sf.MaxNorm(), view=recipes.NATURAL["gain"].view, lr_scale=sf.Constant(3.0))
    w, optimizer = one(own, torch.zeros(2, 2))
    w.grad = torch.tensor([[1.0, -2.0], [3.0, -4.0]])
    optimizer.step()
    assert torch.allclose(w.detach(), torch.tensor([[-0.3, 0.3], [-0.3, 0.3]]))
    assert optimizer.param_groups[0]["role"] == "mine"


def test_options_of_a_group_override_the_defaults():
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    groups = [{"params": [a], "role": "gain", "lr": 0.5}, {"params": [b], "role": "gain", "maximize": True}]
    optimizer = SteepestDescent(groups, lr=0.25)
    a.grad = b.grad = torch.ones(3)
    optimizer.step()
    assert a.tolist() == [-0.5] * 3
    assert b.tolist() == [0.25] * 3


def test_frozen_parameters_are_left_out():
    model = small()
    model.up.weight.requires_grad_(False)
    names = [n for g in SteepestDescent(model, lr=0.1).param_groups for n in g["param_names"]]
    assert "up.weight" not in names


def test_subclass_may_override_add_param_group():
    class Tagged(SteepestDescent):
        def add_param_group(self, param_group):
            super().add_param_group({**param_group, "tag": len(self.param_groups)})

    optimizer = Tagged(nn.Linear(3, 2), lr=0.1)
    assert [g["tag"] for g in optimizer.param_groups] == [0, 1]


# --- what construction refuses -----------------------------------------------------------------------------


def refused_by_sgd(build):
    try:
        torch.optim.SGD(build(), lr=0.1)
    except Exception as error:
        return error
    raise AssertionError("SGD accepts it")


@pytest.mark.parametrize(
    "build",
    [list, lambda: torch.zeros(3), lambda: [3], lambda: nn.Parameter(torch.zeros(2))],
    ids=["empty", "Tensor", "number", "Parameter"],
)
def test_list_errors_are_torchs_own(build):
    theirs = refused_by_sgd(build)
    with pytest.raises(type(theirs)) as ours:
        SteepestDescent(build(), lr=0.1)
    assert type(ours.value) is type(theirs)
    assert str(ours.value) == str(theirs)


@pytest.mark.parametrize(
    "change",
    [
        lambda p: {"params": [p * 2]},
        lambda p: {"params": {p}},
        lambda p: {"params": [p, 3]},
    ],
    ids=["non-leaf", "set", "number"],
)
def test_group_errors_are_torchs_own(change):
    p = nn.Parameter(torch.ones(2, 2))
    theirs = refused_by_sgd(lambda: [change(p)])
    with pytest.raises(type(theirs)) as ours:
        SteepestDescent([{**change(p), "role": "linear"}], lr=0.1)
    assert type(ours.value) is type(theirs)
    assert str(ours.value) == str(theirs)


def test_duplicates_warn_within_a_group_and_raise_across_groups():
    p = nn.Parameter(torch.ones(2, 2))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        SteepestDescent([{"params": [p, p], "role": "linear"}], lr=0.1)
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        SteepestDescent([{"params": [p], "role": "linear"}, {"params": [p], "role": "linear"}], lr=0.1)


@pytest.mark.parametrize(
    "build",
    [
        lambda model: model.parameters(),
        lambda model: list(model.parameters()),
        lambda model: model.named_parameters(),
        lambda model: [{"params": list(model.parameters())}],
    ],
    ids=["generator", "list", "named", "group"],
)
def test_parameters_without_a_role_raise_with_the_remedy(build):
    with pytest.raises(ValueError, match="needs a role") as error:
        SteepestDescent(build(nn.Linear(2, 2)), lr=0.1)
    assert "'role': 'linear'" in str(error.value)
    assert "SteepestDescent(model, lr=...)" in str(error.value)


@pytest.mark.parametrize("shape", [(7,), (2, 3, 4), ()], ids=str)
@pytest.mark.parametrize("role", ["linear", "embedding", "head"])
def test_matrix_roles_take_two_dimensions_only(role, shape):
    with pytest.raises(ValueError, match=role) as error:
        one(role, torch.zeros(shape))
    assert str(shape) in str(error.value)


@pytest.mark.parametrize("shape", [(), (0,), (3, 4)], ids=str)
@pytest.mark.parametrize("role", ["bias", "gain", "scalar"])
def test_vector_roles_take_any_shape_as_one_vector(role, shape):
    w = stepped(role, torch.ones(shape), torch.full(shape, 2.0))
    assert w.shape == shape
    assert torch.allclose(w, torch.full(shape, 0.9))


def test_a_vector_role_has_one_norm_over_all_entries():
    g = noise(3, 4)
    assert torch.allclose(stepped("bias", torch.zeros(3, 4), g, lr=1.0), -g / g.square().mean().sqrt(), atol=1e-6)


def test_unknown_role_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'lineal'.*linear, embedding, head"):
        one("lineal", torch.zeros(2, 2))


@pytest.mark.parametrize(
    "build",
    [
        lambda: SteepestDescent(nn.Linear(2, 2, dtype=torch.complex64), lr=0.1),
        lambda: one("linear", torch.zeros(2, 2, dtype=torch.complex64)),
        lambda: SteepestDescent([nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))], lr=0.1),
    ],
    ids=["model", "group", "list"],
)
def test_complex_parameters_raise(build):
    with pytest.raises(ValueError, match="complex"):
        build()


@pytest.mark.parametrize("lr", [-1.0, math.nan, math.inf])
def test_impossible_learning_rate_raises(lr):
    with pytest.raises(ValueError, match="learning rate"):
        SteepestDescent(nn.Linear(2, 2), lr=lr)


def test_parameters_that_the_plan_does_not_know_raise():
    plan = Plan.of(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"'0\.weight'"):
        SteepestDescent(nn.Sequential(nn.Linear(2, 2)), plan, lr=0.1)
    with pytest.raises(ValueError, match=r"weight has shape \(3, 2\).*\(2, 2\)"):
        SteepestDescent(nn.Linear(2, 3), plan, lr=0.1)
    with pytest.raises(ValueError, match="named_parameters"):
        SteepestDescent(nn.Linear(2, 2).parameters(), plan, lr=0.1)


# --- add_param_group ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False])
def test_added_group_is_stepped(named):
    optimizer = SteepestDescent(nn.Linear(3, 2), lr=0.1)
    late = nn.Parameter(torch.zeros(4))
    optimizer.add_param_group({"params": [("late", late) if named else late], "role": "gain", "lr": 0.5})
    late.grad = torch.ones(4)
    optimizer.step()
    assert late.tolist() == [-0.5] * 4


@pytest.mark.parametrize("role", [None, "linear", "lineal"])
def test_refused_group_leaves_the_optimizer_as_it_was(role):
    w, optimizer = one("gain", torch.zeros(4))
    group = {"params": [nn.Parameter(torch.zeros(4))]} | ({"role": role} if role else {})
    with pytest.raises(ValueError, match="role"):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    w.grad = torch.ones(4)
    optimizer.step()
    assert torch.allclose(w.detach(), torch.full((4,), -0.1))


def test_add_param_group_does_not_write_to_its_argument():
    group = {"params": [nn.Parameter(torch.zeros(4))], "role": recipes.NATURAL["gain"]}
    one("gain", torch.zeros(4))[1].add_param_group(group)
    assert group["role"] is recipes.NATURAL["gain"]


# --- step, closure, maximize, gradients ---------------------------------------------------------------------


def test_step_returns_the_closures_loss_and_enables_gradients():
    model = small()
    optimizer = SteepestDescent(model, lr=0.01)
    seen = []

    def closure():
        optimizer.zero_grad()
        seen.append(torch.is_grad_enabled())
        return backward(model, 0)

    before = weights(model)
    with torch.no_grad():
        loss = optimizer.step(closure)
    assert seen == [True]
    assert loss.item() > 0
    assert not same(before, weights(model))
    assert optimizer.step() is None


@by_name
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
    assert same(*after)


def test_missing_gradient_leaves_weight_and_state():
    model = small()
    optimizer = SteepestDescent(model, lr=0.1)
    backward(model, 0)
    model.up.weight.grad = None
    before = weights(model)
    optimizer.step()
    after = weights(model)
    assert torch.equal(before["up.weight"], after["up.weight"])
    assert not torch.equal(before["down.weight"], after["down.weight"])
    assert not optimizer.state.get(model.up.weight)


def test_sparse_gradient_is_a_clear_error():
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = SteepestDescent(table, Plan.of(table, head=()), lr=0.1)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"sparse gradients.*sparse=False"):
        optimizer.step()


@by_name
def test_gradients_are_not_written_to(recipe):
    model = small()
    optimizer = SteepestDescent(model, Plan.of(model, recipe), lr=0.1)
    for step in range(2):
        backward(model, step)
        before = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        assert same(before, {name: p.grad for name, p in model.named_parameters()})


def test_gradient_accumulation_is_the_step_of_the_sum():
    a, b = small(), small()
    for seed in (0, 1):
        backward(a, seed)
    sums = [p.grad.clone() for p in a.parameters()]
    for p, g in zip(b.parameters(), sums, strict=True):
        p.grad = g
    for model in (a, b):
        SteepestDescent(model, lr=0.1).step()
    assert same(weights(a), weights(b))


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
    assert same(weights(a), weights(b))
    before = weights(a)
    a.up.weight.grad.fill_(math.inf)
    scale.scale(a(tokens).square().mean()).backward()
    scale.step(scaler)
    scale.update()
    assert same(before, weights(a))
    assert scale.get_scale() == 2.0**9


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


# --- learning rates ----------------------------------------------------------------------------------------

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (t + 1)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.5),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 2], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.25, 1.0, 2),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=5, cycle_momentum=False),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 5), lr_scheduler.ExponentialLR(o, 0.5)], [1]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.5)], o
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.01, anneal_epochs=2),
}


@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("name", [n for n in lr_scheduler.__all__ if n not in ("LRScheduler", "ReduceLROnPlateau")])
def test_every_scheduler_sets_the_step_size(name, tensor):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    gain, scale = model[1].weight, sf.Plan.of(model)["1.weight"].role.lr_scale((1, 4))
    optimizer = SteepestDescent(model, lr=torch.tensor(0.1) if tensor else 0.1)
    scheduler = SCHEDULERS[name](optimizer)
    rates = []
    for _ in range(4):
        rates.append({float(g["lr"]) for g in optimizer.param_groups})
        before = gain.detach().clone()
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert torch.allclose(before - gain.detach(), scale * torch.tensor(rates[-1].copy().pop()), atol=1e-6)
        scheduler.step()
    assert all(len(rate) == 1 for rate in rates)  # one number for all groups
    assert len(set.union(*rates)) > 1


def test_swa_schedule():
    optimizer = SteepestDescent(nn.LayerNorm(4), lr=0.1)
    scheduler = SCHEDULERS["SWALR"](optimizer)
    optimizer.step()
    for _ in range(2):
        scheduler.step()
    assert {g["lr"] for g in optimizer.param_groups} == {0.01}


def test_reduce_on_plateau():
    optimizer = SteepestDescent(nn.Linear(3, 2), lr=0.1)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for _ in range(3):
        optimizer.step()
        scheduler.step(1.0)
    assert {g["lr"] for g in optimizer.param_groups} == {0.025}


def test_learning_rate_as_a_tensor_takes_the_same_step():
    value, g = noise(6, 4), noise(6, 4, seed=1)
    expected = stepped("linear", value, g, g, lr=0.125)
    assert torch.equal(expected, stepped("linear", value, g, g, lr=torch.tensor(0.125)))


@by_name
@pytest.mark.parametrize("zero", [0.0, torch.tensor(0.0)], ids=["float", "tensor"])
def test_zero_learning_rate_is_a_bit_exact_no_op(recipe, zero):
    model = small()
    optimizer = SteepestDescent(model, Plan.of(model, recipe), lr=zero)
    before = weights(model)
    for step in range(2):
        backward(model, step)
        optimizer.step()
    assert same(before, weights(model))


@pytest.mark.parametrize("role", ROLES)
def test_the_sign_of_zero_survives_a_step_of_zero(role):
    minus = torch.full(ROLES[role], -0.0)
    for lr, size in ((0.0, 1.0), (0.1, math.nan)):
        assert torch.equal(bits(stepped(role, minus, noise(*ROLES[role]) * size, lr=lr)), bits(minus))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stabiliser", STABILISERS, ids=str)
def test_zero_learning_rate_leaves_weights_outside_the_ball(stabiliser, dtype):
    model = small().to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(30)
    optimizer = SteepestDescent(model, Plan.of(model, stabiliser=stabiliser), lr=0.0)
    before = weights(model)
    backward(model, 0)
    optimizer.step()
    assert same(before, weights(model))
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    optimizer.step()
    assert not torch.equal(before["up.weight"], model.up.weight)  # it was the zero


# --- zero, tiny, missing and broken gradients ---------------------------------------------------------------


@by_name
def test_zero_gradient_on_fresh_state_is_no_update(recipe):
    model = small()
    plan = Plan.of(model, recipe)
    optimizer = SteepestDescent(model, plan, lr=0.1)
    before = weights(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    after = weights(model)
    decayed = {n for n in plan if recipe.name.startswith("muon") and plan[n].role.name in ("embedding", "head")}
    assert all(torch.equal(before[n], after[n]) != (n in decayed) for n in before)  # AdamW decays without a gradient


@by_name
def test_the_way_distributed_checkpoint_makes_state_does_no_harm(recipe):
    """torch.distributed.checkpoint fills a fresh optimizer by a step with lr = 0 and zero gradients."""
    model = small()
    with torch.no_grad():
        model.up.weight.mul_(30)
    optimizer = SteepestDescent(model, Plan.of(model, recipe, stabiliser=sf.PostClip(1.0)), lr=0.0)
    before = weights(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert same(before, weights(model))
    assert all(torch.equal(p, before[n]) and optimizer.state[p] for n, p in model.named_parameters())


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


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@by_name
def test_a_gradient_that_is_not_finite_touches_its_parameter_only(recipe, bad):
    plain, hit = small(), small()
    optimizers = [SteepestDescent(m, Plan.of(m, recipe), lr=0.01) for m in (plain, hit)]
    victims = ("up.weight", "table.weight", "norm.weight", "conv.weight", "attention.in_proj_weight")
    for step in range(3):
        for model, optimizer in zip((plain, hit), optimizers, strict=True):
            for seed, p in enumerate(model.parameters()):
                p.grad = noise(*p.shape, seed=100 * step + seed)
            if model is hit and step == 1:
                before = weights(hit)
                state = {n: {k: v.clone() for k, v in optimizer.state[p].items()} for n, p in hit.named_parameters()}
                for name in victims:
                    hit.get_parameter(name).grad.view(-1)[-1] = bad
            optimizer.step()
        if step == 1:
            after, free = weights(hit), weights(plain)
            for name, p in hit.named_parameters():
                expected = before[name] if name in victims else free[name]
                assert torch.equal(bits(after[name]), bits(expected)), name
                if name in victims:
                    assert int(state[name].pop("skipped")) == 0
                    assert all(torch.equal(bits(v), bits(optimizers[1].state[p][k])) for k, v in state[name].items())
    assert optimizers[0].skipped() == {}
    assert optimizers[1].skipped() == dict.fromkeys(victims, 1)
    assert all(p.isfinite().all() for p in hit.parameters())
    assert not torch.equal(before["up.weight"], hit.up.weight)  # it moves again


def test_a_bad_gradient_on_the_first_step():
    w, optimizer = one("linear", noise(4, 4))
    w.grad = torch.full((4, 4), math.nan)
    before = w.detach().clone()
    optimizer.step()
    assert torch.equal(before, w.detach())
    assert not optimizer.state[w]["momentum"].any()
    w.grad = noise(4, 4, seed=1)
    optimizer.step()
    assert torch.equal(w.detach(), stepped("linear", before, w.grad))
    assert optimizer.skipped() == {"group0.0": 1}


def test_like_parameters_do_not_share_a_bad_gradient():
    ws = [nn.Parameter(noise(4, 4, seed=s)) for s in range(3)]
    optimizer = SteepestDescent([{"params": ws, "role": "linear"}], lr=0.1)
    before = [w.detach().clone() for w in ws]
    for seed, w in enumerate(ws):
        w.grad = noise(4, 4, seed=10 + seed)
    ws[1].grad[0, 0] = math.nan
    optimizer.step()
    assert [torch.equal(a, b) for a, b in zip(before, ws, strict=True)] == [False, True, False]
    assert optimizer.skipped() == {"group0.1": 1}


@pytest.mark.parametrize("role", ["embedding", "head"])
def test_absent_rows_keep_weight_and_momentum(role):
    w, optimizer = one(role, noise(6, 4))
    w.grad = noise(6, 4, seed=1)
    optimizer.step()
    rows, momentum = w.detach().clone(), optimizer.state[w]["momentum"].clone()
    for step in range(3):
        w.grad = torch.zeros(6, 4)
        w.grad[:2] = noise(2, 4, seed=step)
        optimizer.step()
    assert w.isfinite().all()
    assert torch.equal(bits(rows[2:]), bits(w[2:]))
    assert torch.equal(bits(momentum[2:]), bits(optimizer.state[w]["momentum"][2:]))
    assert not torch.isclose(rows[:2], w[:2]).all(-1).any()


def test_absent_rows_of_a_model():
    model = small()
    optimizer = SteepestDescent(model, lr=0.1)
    before = weights(model)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    assert torch.equal(before["table.weight"][3:], model.table.weight[3:])
    assert not (before["table.weight"][:3] == model.table.weight[:3]).any()


def test_absent_experts_keep_weight_and_momentum():
    w, optimizer = one("experts", noise(3, 4, 4))
    w.grad = noise(3, 4, 4, seed=1)
    optimizer.step()
    before, momentum = w.detach().clone(), optimizer.state[w]["momentum"].clone()
    w.grad = noise(3, 4, 4, seed=2)
    w.grad[1] = 0
    optimizer.step()
    assert [torch.equal(a, b) for a, b in zip(before, w, strict=True)] == [False, True, False]
    assert torch.equal(momentum[1], optimizer.state[w]["momentum"][1])


def test_an_experts_norm_is_its_own():
    g = noise(3, 4, 5)
    together = stepped("experts", torch.zeros(3, 4, 5), g * torch.tensor([1.0, 1e3, 1e-3])[:, None, None])
    for i in range(3):
        assert torch.allclose(together[i], stepped("linear", torch.zeros(4, 5), g[i]), atol=1e-6)


def test_absent_rows_are_clipped_all_the_same():
    role = sf.Role("embedding", sf.RowRMS(), stabiliser=sf.PostClip(0.5))
    value = 3 * noise(6, 4)
    g = torch.zeros(6, 4)
    g[0] = 1
    rms = stepped(role, value, g).square().mean(-1).sqrt()
    assert (value.square().mean(-1).sqrt() > 0.5).all()
    assert (rms <= 0.5 + 1e-6).all()


# --- state and shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lookahead", [None, 0.9, 0.5])
@pytest.mark.parametrize("role", ROLES)
def test_momentum_is_the_average_of_the_gradients(role, lookahead, dtype):
    """Normalising must not write to it, whatever the direction is computed from (torch's Muon did, in bfloat16)."""
    rule = dataclasses.replace(recipes.NATURAL[role], momentum=sf.Momentum(0.9, lookahead))
    w, optimizer = one(rule, noise(*ROLES[role]).to(dtype))
    average = torch.zeros(ROLES[role], dtype=torch.float64)
    for seed in range(6):
        w.grad = noise(*ROLES[role], seed=seed).to(dtype)
        average = 0.9 * average + 0.1 * w.grad.double()
        optimizer.step()
        assert optimizer.state[w]["momentum"].dtype == torch.float32
        assert torch.allclose(optimizer.state[w]["momentum"].double(), average, atol=1e-6)


def test_lookahead_uses_the_old_momentum():
    rule = sf.Role("own", sf.RMS(), view=recipes.NATURAL["bias"].view, momentum=sf.Momentum(0.9, 0.5))
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


def test_double_precision_is_kept():
    value, g = noise(6, 4).double(), noise(6, 4, seed=1).double()
    w, optimizer = one("linear", value, lr=1.0)
    w.grad = g
    optimizer.step()
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    assert optimizer.state[w]["momentum"].dtype == torch.float64
    assert torch.allclose(value - w.detach(), math.sqrt(6 / 4) * u @ vh, atol=1e-3)
    assert torch.allclose(optimizer.state[w]["momentum"], 0.05 * g, atol=1e-15)


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


def test_like_parameters_together_step_as_each_alone():
    shape, count = (512, 512), 6  # more than one chunk on a CPU
    values = [noise(*shape, seed=s) for s in range(count)]
    gradients = [noise(*shape, seed=10 + s) * 10.0**s for s in range(count)]
    ws = [nn.Parameter(v.clone()) for v in values]
    optimizer = SteepestDescent([{"params": ws, "role": "linear"}], lr=1.0)
    for w, g in zip(ws, gradients, strict=True):
        w.grad = g
    optimizer.step()
    for w, value, g in zip(ws, values, gradients, strict=True):
        assert torch.allclose(w.detach(), stepped("linear", value, g, lr=1.0), atol=1e-5)


@by_name
def test_like_layers_of_a_model_step_as_each_alone(recipe):
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


@by_name
def test_state_is_four_bytes_a_parameter(recipe):
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
    limit = {"sign_sgd": 0.1, "muon(keller)": 8.1}.get(recipe.name, 4.1)
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


@by_name
def test_a_step_draws_no_random_numbers(recipe):
    model = small()
    optimizer = SteepestDescent(model, Plan.of(model, recipe, stabiliser=sf.PostClip(0.5)), lr=0.1)
    backward(model, 0)
    before = torch.get_rng_state()
    for _ in range(2):
        optimizer.step()
    assert torch.equal(before, torch.get_rng_state())


# --- bounds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stabiliser", [sf.PostClip(0.5), sf.Rescale(0.5)], ids=str)
def test_weights_written_from_outside_are_bounded_on_the_next_step(stabiliser):
    model = small()
    optimizer = SteepestDescent(model, Plan.of(model, stabiliser=stabiliser), lr=0.1)
    ema = {name: 20 * p for name, p in weights(model).items()}

    def check():
        optimizer.zero_grad()
        backward(model, 0)
        optimizer.step()
        assert spectral(model.up.weight) <= 0.5 * 1.001
        assert spectral(model.down.weight) <= 0.5 * 1.001
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
def test_a_fresh_step_has_norm_lr(role):
    shape = {"conv": (6, 4, 3)}.get(role) or ROLES[role]
    w, optimizer = one(role, torch.zeros(shape), lr=0.25)
    w.grad = noise(*shape)
    optimizer.step()
    numbers = optimizer.stability()["group0.0"]
    assert numbers["forward_lower"] == pytest.approx(0.25, rel=0.35 if role in ("linear", "conv") else 1e-5)
    assert numbers["forward_lower"] <= 0.25 * 1.001
    assert numbers["update_upper"] == pytest.approx(0.25)


def test_the_step_descends():
    for role, shape in ROLES.items():
        g = noise(*shape)
        assert (stepped(role, torch.zeros(shape), g) * g).sum() < 0


def test_stability_reports_every_parameter_in_natural_units():
    model = small()
    optimizer = SteepestDescent(model, lr=0.02)
    report = optimizer.stability()
    assert {name.partition("[")[0] for name in report} == {name for name, _ in model.named_parameters()}
    assert report["up.weight"]["forward_lower"] == pytest.approx(spectral(model.up.weight), rel=0.02)
    assert report["out.weight"]["update_upper"] == pytest.approx(16 * 0.02)
    assert report["table.weight"]["forward_upper"] == pytest.approx(
        float(model.table.weight.detach().square().mean(-1).sqrt().max()), rel=1e-6
    )


# --- pieces ------------------------------------------------------------------------------------------------


def states(optimizer):
    return {f"{i}.{name}": x for i, s in optimizer.state_dict()["state"].items() for name, x in s.items()}


@pytest.mark.parametrize("stabiliser", [sf.Free(), sf.WeightDecay(2.0), sf.PostClip(0.5), sf.Rescale(0.5)], ids=repr)
@by_name
def test_pieces_are_the_whole(recipe, stabiliser, monkeypatch):
    """Blocks of any role, cut or not to 40 bytes a piece, take the step that they take whole."""
    found = []
    monkeypatch.setattr(surefoot.step, "LINE", 1)
    for budget in (1 << 20, 40):
        monkeypatch.setitem(surefoot.optim.optimizer._PIECE_BYTES, "cpu", budget)
        model = small()
        optimizer = SteepestDescent(model, Plan.of(model, recipe, stabiliser=stabiliser), lr=0.1)
        for seed in range(3):
            for p in model.parameters():
                p.grad = noise(*p.shape, seed=seed)
            model.table.weight.grad[3:] = 0
            optimizer.step()
        found.append(weights(model) | states(optimizer))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("role", ["embedding", "gain"])
def test_a_piece_that_is_not_finite_stops_them_all(role, monkeypatch):
    monkeypatch.setitem(surefoot.optim.optimizer._PIECE_BYTES, "cpu", 64)
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


def test_stacking_what_lies_side_by_side_copies_nothing():
    whole = noise(3, 4, 2)
    assert stack_adjacent(list(whole.unbind())).data_ptr() == whole.data_ptr()
    assert torch.equal(stack_adjacent(list(whole.unbind())), whole)
    for others in (whole[::2], whole.mT):
        copied = stack_adjacent(list(others.unbind()))
        assert torch.equal(copied, others)
        assert copied.data_ptr() != others.data_ptr()


def test_autograd_sees_a_write_to_weights_that_lie_side_by_side():
    params = [nn.Parameter(noise(4, 3)) for _ in range(3)]
    for p, w in zip(params, noise(3, 4, 3).unbind(), strict=True):
        p.data, p.grad = w, torch.ones(4, 3)
    loss = (noise(2, 3).requires_grad_() @ params[1].T).square().sum()
    loss.backward(retain_graph=True)
    SteepestDescent([{"params": params, "role": "linear"}], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("stabiliser", STABILISERS, ids=repr)
def test_a_rate_may_be_a_tensor_of_one_entry(stabiliser):
    weights = []
    for lr in (0.1, torch.tensor(0.1), torch.tensor([0.1])):
        p = nn.Parameter(noise(6, 4))
        p.grad = noise(6, 4, seed=1)
        role = dataclasses.replace(sf.roles.by_name("linear"), stabiliser=stabiliser)
        SteepestDescent([{"params": [p], "role": role}], lr=lr).step()
        weights.append(p.detach())
    for w in weights[1:]:
        torch.testing.assert_close(w, weights[0])


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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="how glibc keeps memory")
def test_a_step_fetches_no_pages():
    """Temporaries stay in the process's heap; without the block that the optimizer frees, each is fetched anew."""
    script = """
import resource, sys, torch, surefoot as sf
from surefoot.linalg import device
if sys.argv[1] == "without":
    device.keep_freed = lambda: None
params = [torch.nn.Parameter(torch.randn(128, 128)) for _ in range(32)]
optimizer = sf.SteepestDescent([{"params": params, "role": "linear"}], lr=0.1)
for p in params:
    p.grad = torch.randn(128, 128)
for _ in range(5):
    optimizer.step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    optimizer.step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10)
"""
    faults = [int(subprocess.check_output([sys.executable, "-c", script, how])) for how in ("with", "without")]
    assert 10 * faults[0] < faults[1], faults


def test_pieces_are_taken_where_rows_are_independent(monkeypatch):
    """The fast path really runs: one call of `step` per piece, and one for a matrix that is a problem of its own."""
    calls = []
    monkeypatch.setitem(surefoot.optim.optimizer._PIECE_BYTES, "cpu", 64)
    for role, count in (("embedding", 4), ("linear", 1)):  # 16 rows are the least
        calls.clear()
        w = nn.Parameter(noise(64, 4))
        w.grad = noise(64, 4, seed=1)
        counted = lambda *arguments: calls.append(arguments) or take(*arguments)  # noqa: E731
        SteepestDescent([{"params": [w], "role": role}], lr=0.1, step=counted).step()
        assert len(calls) == count
