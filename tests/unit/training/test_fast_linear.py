"""Linear layers by oneDNN are linear layers: values and gradients, in every memory layout, and in a run."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from surefoot.experiment.data.sources import load
from surefoot.experiment.distributed.processes import Layout
from surefoot.experiment.models import cross_entropy as losses
from surefoot.experiment.models import fast_linear
from surefoot.experiment.models.decoder import reference
from surefoot.experiment.models.fast_linear import use_onednn
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train
from surefoot.linalg.onednn_ops import VARIABLE


@pytest.fixture(autouse=True)
def small_layers_too(monkeypatch):
    monkeypatch.setattr(fast_linear, "LEAST", 0)
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
    monkeypatch.setattr(fast_linear, "LEAST", 4 * 8 * 8 + 1)
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
    config, corpus = TrainConfig.of(width=16, depth=1, steps=4, batch_size=2, context=80), load("markov:64")
    ours = train(config, corpus, layout=Layout(recompute=recompute))
    monkeypatch.setenv(VARIABLE, "torch")
    plain = train(config, corpus)
    assert ours.val_loss == pytest.approx(plain.val_loss, abs=1e-5)
    assert ours != plain, "the same to the last bit: not by oneDNN"
