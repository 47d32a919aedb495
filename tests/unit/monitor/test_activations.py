"""Measured stability numbers: against formulas, below their bounds, and without a trace on the model."""

import copy
import json
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from surefoot.experiment.models.decoder import Decoder, GPTConfig, Size, reference
from surefoot.monitor.block_bounds import LIPSCHITZ
from surefoot.monitor.maxima import largest_rms, rms


def tokens(rows: int = 4, vocab: int = 256) -> Tensor:
    return torch.randint(vocab, (rows, 16), generator=torch.Generator().manual_seed(0))


def trained(model: nn.Module, x: Tensor, steps: int = 3) -> sf.Plan:
    """Trained to repeat its input, out of the state it starts in."""
    plan = sf.Plan.of(model, sf.recipes.beyond_mup())
    optimizer = sf.SteepestDescent(model, plan, lr=2**-4)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
        optimizer.step()
    return plan


def gpt() -> tuple[nn.Module, nn.Module, sf.Plan]:
    """Before and after three steps, and the plan."""
    model = reference("gpt", 32)
    sf.Plan.of(model).initialise_(model, seed=0)
    before = copy.deepcopy(model)
    return before, model, trained(model, tokens())


def test_numbers_of_a_layer_are_the_formulas():
    layer, x = nn.Linear(3, 5), torch.randn(4, 7, 3, generator=torch.Generator().manual_seed(0))
    before = copy.deepcopy(layer)
    with torch.no_grad():
        layer.weight += 1.0
    measured = sf.measure(layer, x, before=before)[""]
    y, vectors = layer(x).detach(), x.flatten(0, 1)
    pairs = [(a, b) for a in vectors for b in vectors if not torch.equal(a, b)]
    with torch.no_grad():
        ratios = [rms(layer(a) - layer(b)) / rms(a - b) for a, b in pairs]
    assert measured == {
        "input": pytest.approx(max(map(rms, vectors))),
        "input_smallest": pytest.approx(min(map(rms, vectors))),
        "forward": pytest.approx(max(map(rms, y.flatten(0, 1)))),
        "dependency": pytest.approx(max(ratios), rel=1e-4),
        "update": pytest.approx(float(x.sum(-1).abs().max()), rel=1e-5),
    }


def test_the_numbers_are_maxima_not_means():
    """One vector along the leading direction among many that the layer hardly sees."""
    layer = nn.Linear(40, 40, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.diag(torch.tensor([1.0] + [0.01] * 39)))
    x = torch.zeros(50, 40)
    x[:, 1:] = torch.randn(50, 39, generator=torch.Generator().manual_seed(0)).sign()
    x[7] = 0
    x[7, 0] = math.sqrt(40)
    x[8] = -x[7]
    measured = sf.measure(layer, x)[""]
    assert measured == {
        "input": pytest.approx(1, rel=0.02),
        "input_smallest": pytest.approx(math.sqrt(39 / 40), rel=1e-5),
        "forward": pytest.approx(1),
        "dependency": pytest.approx(1, rel=1e-5),
    }


class Mix(nn.Module):
    """Every position's output is the sum of the sample."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.gain * x.sum(1, keepdim=True).expand_as(x)


def test_samples_are_paired_where_positions_mix():
    x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    y = Mix()(x).detach()
    ratios = [rms(y[i] - y[j]) / rms(x[i] - x[j]) for i in range(3) for j in range(i)]
    assert sf.measure(Mix(), x)[""]["dependency"] == pytest.approx(max(ratios), rel=1e-5)


def test_discrete_inputs_have_the_plain_difference():
    table = nn.Embedding(5, 8)
    measured = sf.measure(table, torch.tensor([0, 3]))[""]
    assert measured.keys() == {"forward", "dependency"}
    assert measured["dependency"] == pytest.approx(rms(table.weight[0] - table.weight[3]), rel=1e-5)


def test_every_owner_is_measured_and_modules_by_name():
    before, model, _ = gpt()
    measured = sf.measure(model, tokens(), before=before, names=["blocks.0.mlp", "blocks.1", ""])
    layers = [name for name, m in model.named_modules() if list(m.parameters(recurse=False))]
    assert list(measured) == [*layers, "blocks.0.mlp", "blocks.1", ""]
    assert all({"forward", "dependency", "update"} <= numbers.keys() for numbers in measured.values())
    assert json.loads(json.dumps(measured, allow_nan=False)) == measured
    change = model(tokens()) - before(tokens())
    assert measured[""]["update"] == pytest.approx(
        largest_rms(change), rel=1e-5
    )  # of the model: the batch is its input
    x: list[Tensor] = []
    model.head.register_forward_pre_hook(lambda _, args: x.append(args[0]))
    model(tokens())
    own = model.head(x[0]) - before.head(x[0])  # of a layer: its own step only
    assert measured["head"]["update"] == pytest.approx(largest_rms(own), rel=1e-5)
    assert measured["head"]["update"] != pytest.approx(largest_rms(change), rel=1e-3)


def test_measured_values_stay_below_their_bounds():
    before, model, plan = gpt()
    x = tokens()
    measured = sf.measure(model, x, before=before, plan=plan)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "head":
            numbers, norm = measured[name], sf.Spectral().norm
            bound = float(norm(module.weight.detach()))
            assert numbers["dependency_bound"] == pytest.approx(bound)
            assert 0.2 * bound < numbers["dependency"] <= bound
            assert numbers["forward"] <= bound * numbers["input"]
            step = float(norm(module.weight.detach() - before.get_submodule(name).weight.detach()))
            assert 0 < numbers["update"] <= step * numbers["input"]


def test_loss_bounds_of_the_head():
    before, model, plan = gpt()
    measured = sf.measure(model, tokens(), before=before, plan=plan)["head"]
    weight, old = model.head.weight.detach(), before.head.weight.detach()
    r, step = float(sf.HeadRMS().norm(weight)), float(sf.HeadRMS().norm(weight - old))
    assert measured["loss_forward_bound"] == pytest.approx(math.log(256) + 2 * r)
    assert measured["loss_dependency_bound"] == pytest.approx(4 * r)
    assert measured["loss_update_bound"] == pytest.approx(2 * step)
    x = torch.randn(512, 32, generator=torch.Generator().manual_seed(0))
    x /= x.square().mean(-1, keepdim=True).sqrt()
    worst = weight[0] - weight[1]
    x[0] = worst / rms(worst)
    for label in (0, 1):
        target = torch.full((512,), label)
        loss, then = (F.cross_entropy(x @ w.T, target, reduction="none") for w in (weight, old))
        assert float(loss.max()) <= measured["loss_forward_bound"]
        assert float(loss.max() - loss.min()) <= measured["loss_dependency_bound"]
        assert float((loss - then).abs().max()) <= measured["loss_update_bound"]


@pytest.mark.parametrize("tie", ["tied", "tied_scaled"])
def test_loss_bounds_of_a_tied_head(tie):
    model = Decoder(GPTConfig(Size(32, 1, 16, 256), head=tie))
    plan = sf.Plan.of(model)
    plan.initialise_(model)
    measured = sf.measure(model, tokens(), plan=plan)
    r = float(sf.HeadRMS().norm(model.head.weight.detach())) / (32 if tie == "tied_scaled" else 1)
    assert measured["head"]["loss_dependency_bound"] == pytest.approx(4 * r)
    assert 0.5 < r / (math.log(256) if tie == "tied" else 1) < 2
    assert "loss_forward_bound" not in measured["embedding"]


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.SiLU])
def test_a_block_is_bounded_by_the_product(activation):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), activation(), nn.Sequential(nn.Linear(64, 16)))
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    plan = sf.Plan.of(block)
    measured = sf.measure(block, x, plan=plan, names=[""])
    product = measured["0"]["dependency_bound"] * measured["3.0"]["dependency_bound"] * LIPSCHITZ[activation]
    assert measured[""]["dependency_bound"] == pytest.approx(product)
    assert measured[""]["dependency"] <= product
    with torch.no_grad():
        block[0].bias.fill_(3.0)
    x /= x.square().mean(-1, keepdim=True).sqrt()
    measured = sf.measure(block, x, plan=plan, names=[""])
    up, down = measured["0"]["dependency_bound"], measured["3.0"]["dependency_bound"]
    bound = down * LIPSCHITZ[activation] * (up + 3.0) + rms(block[3][0].bias)
    assert measured["0"]["forward_bound"] == pytest.approx(up + 3.0)
    assert measured[""]["forward_bound"] == pytest.approx(bound)
    assert 0.3 * bound < measured[""]["forward"] <= bound
    block.insert(0, nn.LayerNorm(16))  # has no slope
    assert "dependency_bound" not in sf.measure(block, x, plan=sf.Plan.of(block), names=[""])[""]


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU(), nn.GELU("tanh"), nn.SiLU()])
def test_lipschitz_constants(activation):
    x = torch.linspace(-8, 8, 100_001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(activation(x).sum(), x)
    assert LIPSCHITZ[type(activation)] - 1e-3 < float(slope.abs().max()) <= LIPSCHITZ[type(activation)]


@pytest.mark.parametrize("sizes", [{}, {"kdim": 8, "vdim": 8}])
def test_attention_is_bounded_forward(sizes):
    layer = nn.MultiheadAttention(16, 4, bias=False, batch_first=True, **sizes)
    x = torch.randn(8, 5, 16, generator=torch.Generator().manual_seed(0))
    x /= x.square().mean(-1, keepdim=True).sqrt()
    y = x[..., : sizes.get("kdim", 16)].contiguous()
    measured = sf.measure(layer, {"query": x, "key": y, "value": y}, plan=sf.Plan.of(layer))[""]
    assert 0 < measured["forward"] <= measured["forward_bound"] * largest_rms(y)


def generator_states(model: nn.Module) -> list[Tensor]:
    return [torch.get_rng_state(), *(tensor.clone() for tensor in model.state_dict().values())]


class Restless(nn.Module):
    """Draws random numbers also in eval mode, and may raise."""

    def __init__(self, raises: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.raises = raises

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x + torch.rand_like(x))
        if self.raises:
            raise RuntimeError("on request")
        return y


@pytest.mark.parametrize("raises", [False, True])
def test_nothing_remains(raises):
    model = Restless(raises)
    model.body[2].eval()  # a flag of its own
    before = copy.deepcopy(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    flags, state = [m.training for m in model.modules()], generator_states(model)
    if raises:
        with pytest.raises(RuntimeError, match="on request"):
            sf.measure(model, torch.ones(3, 4), before=before)
    else:
        numbers = sf.measure(model, torch.ones(3, 4), before=before)["body.0"]
        assert numbers["update"] == 0
    for module in (model, before):
        assert [m.training for m in module.modules()] == flags
        assert not any(m._forward_hooks for m in module.modules())
    assert all(map(torch.equal, state, generator_states(model)))
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert torch.is_grad_enabled()


class Twice(nn.Module):
    """One layer used twice, a module never used, keyword arguments, an output in a dictionary, half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.idle = nn.Linear(4, 4, bias=False).bfloat16(), nn.Linear(4, 4)

    def forward(self, *, scale: float, values: Tensor) -> dict[str, Tensor | None]:
        return {"nothing": None, "y": self.layer(scale * values) + self.layer(values)}


def test_odd_models():
    model, x = Twice(), torch.ones(2, 4, dtype=torch.bfloat16)
    measured = sf.measure(model, {"scale": 2.0, "values": x}, names=[""])
    assert measured.keys() == {"layer", ""}
    assert measured["layer"]["input"] == pytest.approx(2.0)
    assert measured["layer"]["forward"] == pytest.approx(rms(model.layer(2 * x)))
    assert "dependency" not in measured["layer"]  # two equal samples
    assert measured[""].keys() == {"input", "input_smallest", "forward"}


def test_a_batch_of_arguments():
    assert sf.measure(nn.Bilinear(2, 3, 4), (torch.rand(5, 2), torch.rand(5, 3)))[""]["forward"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda model: {"names": ["absent"]}, "the model has no such module: .*absent"),
        (lambda model: {"before": nn.Linear(2, 2)}, "before has no such module"),
        (lambda model: {"before": copy.copy(model)}, "before shares parameters with the model: take copy.deepcopy"),
        (lambda model: {"plan": sf.Plan.of(nn.Linear(2, 2))}, "the plan has no parameter '0.weight'"),
    ],
)
def test_wrong_arguments(options: Callable[[nn.Module], dict[str, object]], message: str):
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=message):
        sf.measure(model, torch.ones(2, 2), **options(model))
