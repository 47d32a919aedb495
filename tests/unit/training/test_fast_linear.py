"""Linear layers by oneDNN are linear layers: values and gradients, in every memory layout, and in a run."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from surefoot.experiment.data.sources import load
from surefoot.experiment.distributed.processes import Layout
from surefoot.experiment.models import cross_entropy as losses
from surefoot.experiment.models import fast_linear
from surefoot.experiment.models.configs import LlamaConfig
from surefoot.experiment.models.decoder import Decoder, reference
from surefoot.experiment.models.fast_linear import use_bfloat16, use_onednn
from surefoot.experiment.models.layers import Mixture
from surefoot.experiment.models.sizes import Size
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train
from surefoot.experiment.training.run import Run
from surefoot.linalg.onednn_ops import VARIABLE


@pytest.fixture(autouse=True)
def small_layers_too(monkeypatch):
    monkeypatch.setattr(fast_linear, "LEAST", {torch.float32: 0, torch.bfloat16: 0})
    monkeypatch.setenv(VARIABLE, "onednn")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(24, 56), (56, 24)])
def test_values_and_gradients(inputs, outputs, bias):
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias)
    exact = copy.deepcopy(layer).double()
    use_onednn(layer)
    wide = torch.randn(3, 5, 2 * inputs)
    for x in (wide[..., :inputs], wide[..., ::2], wide[..., :inputs].transpose(0, 1)):
        x, true = x.detach().requires_grad_(), x.detach().double().requires_grad_()
        y = layer(x)
        assert "_LinearBackward" in {type(fn).__name__ for fn in (y.grad_fn, *(f for f, _ in y.grad_fn.next_functions))}
        direction = torch.randn_like(y)
        got = torch.autograd.grad((y * direction).sum(), [x, *layer.parameters()])
        wanted = torch.autograd.grad((exact(true) * direction).sum(), [true, *exact.parameters()])
        for a, b in zip((y.detach(), *got), (exact(true).detach(), *wanted), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_a_gradient_that_nobody_asked_for_is_not_made():
    layer, x = nn.Linear(8, 8, bias=False), torch.randn(4, 8)
    use_onednn(layer)
    layer(x).sum().backward()
    assert x.grad is None
    assert layer.weight.grad.shape == (8, 8)
    frozen, x = copy.deepcopy(layer).requires_grad_(False), x.requires_grad_()
    frozen(x).sum().backward()
    assert frozen.weight.grad is None
    assert x.grad.shape == (4, 8)


def test_what_does_not_fit_goes_to_torch(monkeypatch):
    """float64, autocast, one vector, `torch.func`, a small layer; and no layer is touched where oneDNN is not fast."""
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    plain = F.linear(x, layer.weight, layer.bias)
    use_onednn(layer)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert type(copy.deepcopy(layer).double()(x.double()).grad_fn).__name__ == "AddmmBackward0"
    one = torch.randn(8)
    assert torch.equal(layer(one), F.linear(one, layer.weight, layer.bias))
    assert torch.func.vmap(layer)(x).shape == (4, 8)
    monkeypatch.setattr(fast_linear, "LEAST", {torch.float32: 4 * 8 * 8 + 1})
    assert torch.equal(layer(x), plain)
    monkeypatch.setenv(VARIABLE, "torch")
    untouched = nn.Linear(8, 8)
    use_onednn(untouched)
    assert "forward" not in vars(untouched)


def test_the_loss_in_parts(monkeypatch):
    monkeypatch.setattr(losses, "FEW", 0)
    torch.manual_seed(0)
    model = reference("gpt", 32, 1, 16, 100)
    tokens, targets = torch.randint(100, (2, 3, 67))
    plain = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    ours = losses.cross_entropy(model, tokens, targets)
    assert float(ours.detach()) == pytest.approx(float(plain.detach()), rel=1e-6)
    expected = torch.autograd.grad(plain, list(model.parameters()))
    for gradient, wanted in zip(torch.autograd.grad(ours, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_run_has_the_same_losses(recompute, monkeypatch):
    config, corpus = TrainConfig(width=16, depth=1, steps=4, batch_size=2, context=80), load("markov:64")
    ours = train(config, corpus, layout=Layout(recompute=recompute))
    monkeypatch.setenv(VARIABLE, "torch")
    plain = train(config, corpus)
    assert ours.val_loss == pytest.approx(plain.val_loss, abs=1e-5)
    assert ours != plain, "the same to the last bit: not by oneDNN"


@pytest.mark.parametrize("few", [0, 1 << 20])
def test_in_bfloat16_factors_of_products_are_rounded_and_nothing_else_is(few, monkeypatch):
    """Loss and gradients beside float32 ones: off by a few units of bfloat16's last place, 2^-8; all are float32."""
    monkeypatch.setattr(losses, "FEW", few)
    torch.manual_seed(0)
    model = reference("gpt", 32, 2, 16, 100)
    tokens, targets = torch.randint(100, (2, 3, 67))
    parameters, seen = list(model.parameters()), []
    plain = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    expected = torch.autograd.grad(plain, parameters)
    assert use_bfloat16(model)
    for name, module in model.named_modules():
        module.register_forward_hook(partial(lambda name, _, inputs, output: seen.append((name, output.dtype)), name))
    ours = losses.cross_entropy(model, tokens, targets)
    short = {f"blocks.{i}.mlp.up" for i in (0, 1)}
    assert {name for name, dtype in seen if dtype == torch.bfloat16} == short
    assert {dtype for name, dtype in seen if name not in short} == {torch.float32} == {ours.dtype}
    assert float(ours.detach()) == pytest.approx(float(plain.detach()), rel=1e-2)
    assert float(ours.detach()) != pytest.approx(float(plain.detach()), rel=1e-7)
    for gradient, wanted in zip(torch.autograd.grad(ours, parameters), expected, strict=True):
        assert gradient.dtype == torch.float32
        assert (gradient - wanted).norm() <= 0.03 * wanted.norm()


def test_short_numbers_between_the_layers_of_an_mlp_change_nothing(monkeypatch):
    torch.manual_seed(0)
    model = reference("gpt", 32, 2, 16, 100)
    tokens, targets = torch.randint(100, (2, 3, 67))
    results = []
    for between in (fast_linear.MLP, type(None)):
        monkeypatch.setattr(fast_linear, "MLP", between)
        assert use_bfloat16(model)
        loss = losses.cross_entropy(model, tokens, targets)
        results.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    assert all(map(torch.equal, *results))


def test_a_layer_in_bfloat16():
    """Its value and gradients are products of rounded factors, each rounded once."""
    torch.manual_seed(0)
    model = reference("gpt", 32, 1, 16, 100)
    assert use_bfloat16(model)
    x, direction = torch.randn(3, 7, 32, requires_grad=True), torch.randn(3, 7, 100)
    y = model.head(x)
    got = torch.autograd.grad((y * direction).sum(), [x, model.head.weight])
    rows, weight, g = (t.detach().bfloat16().double().flatten(0, -2) for t in (x, model.head.weight, direction))
    for a, b in zip((y.detach(), *got), (rows @ weight.T, g @ weight, g.T @ rows), strict=True):
        torch.testing.assert_close(a.double(), b.view_as(a), rtol=2**-8, atol=1e-3)


def test_a_small_layer_stays_in_float32(monkeypatch):
    """Rounding its input and results takes longer than bfloat16 gains."""
    monkeypatch.setattr(fast_linear, "LEAST", {torch.bfloat16: 7 * 32 * 32 + 1})
    torch.manual_seed(0)
    model, x = reference("gpt", 32, 1, 16, 100), torch.randn(7, 32)
    plain = {
        name: layer(x)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and x.shape[1] == layer.in_features
    }
    assert use_bfloat16(model)
    same = {name for name, y in plain.items() if torch.equal(model.get_submodule(name)(x), y)}
    assert same == {f"blocks.0.attention.{name}" for name in ("query", "key", "value", "output")}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_bfloat16_needs_autocast_for():
    """Experts, a model of one's own, a compiled one: nothing of them is changed."""
    experts = Decoder(LlamaConfig(Size(32, 1, 16, 50), mixture=Mixture(2, 1)))
    compiled = reference("gpt", 32, 1, 16, 50)
    compiled.compile()
    for model in (experts, nn.Sequential(nn.Linear(4, 4)), compiled):
        assert not use_bfloat16(model)
        assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_autocast_of_a_run_on_a_cpu(model, monkeypatch):
    """By linear layers, not by `torch.autocast`."""
    monkeypatch.setattr(losses, "FEW", 0)
    config, corpus = (TrainConfig(width=32, depth=1, steps=4, batch_size=2, context=80, model=model), load("markov:64"))
    exact, rounded = (Run(config.replace(autocast=kind), corpus) for kind in ("none", "bfloat16"))
    asked = []
    monkeypatch.setattr(torch, "autocast", lambda *args, enabled: asked.append(enabled) or nullcontext())
    for run in (exact, rounded):
        for _ in range(4):
            run.advance()
    assert asked
    assert not any(asked)
    assert rounded.losses.tolist() == pytest.approx(exact.losses.tolist(), rel=1e-2)
    assert rounded.losses.tolist() != pytest.approx(exact.losses.tolist(), rel=1e-6)
