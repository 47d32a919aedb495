"""The loss of a decoder without all its logits at once is the loss, and so are its gradients."""

import pytest
import torch
import torch.nn.functional as F

from surefoot.experiment.data.sources import load
from surefoot.experiment.models import cross_entropy as module
from surefoot.experiment.models.cross_entropy import cross_entropy
from surefoot.experiment.models.decoder import reference
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train


@pytest.mark.parametrize("scale", [1.0, 300.0])
@pytest.mark.parametrize("kind", ["gpt", "llama", "tied"])
def test_the_loss_in_parts_and_its_gradients_are_those_of_the_whole(kind, scale, monkeypatch):
    """Rows that the parts do not divide; logits so far apart that most probabilities are 0."""
    monkeypatch.setattr(module, "FEW", 0)
    monkeypatch.setattr(module, "ROWS", 64)
    torch.manual_seed(0)
    model = reference(kind, 32, 1, 16, 100).double()
    with torch.no_grad():
        model.head.weight.mul_(scale)
    tokens, targets = torch.randint(100, (2, 3, 67))
    plain = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    ours = cross_entropy(model, tokens, targets)
    assert float(ours.detach()) == pytest.approx(float(plain.detach()), rel=1e-12)
    assert type(ours.grad_fn).__name__ == "_LinearCrossEntropyBackward", "not by way of all logits"
    expected = torch.autograd.grad(2 * plain, list(model.parameters()))
    for gradient, wanted in zip(torch.autograd.grad(2 * ours, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("scale", "steep"), [(1.0, False), (30.0, True), (300.0, True)])
def test_powers_that_could_overflow_are_lowered(scale, steep, monkeypatch):
    """In float32 logits of 30 and of 300 times as much; the largest of each token is asked for only then."""
    monkeypatch.setattr(module, "FEW", 0)
    torch.manual_seed(0)
    model = reference("gpt", 32, 1, 16, 100)
    with torch.no_grad():
        model.head.weight.mul_(scale)
    tokens, targets, asked = *torch.randint(100, (2, 3, 67)), []
    plain = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    largest = torch.Tensor.amax
    monkeypatch.setattr(torch.Tensor, "amax", lambda *args, **options: asked.append(args) or largest(*args, **options))
    ours = cross_entropy(model, tokens, targets)
    assert bool(asked) == steep
    expected = torch.autograd.grad(plain, list(model.parameters()))
    for got, wanted in zip(
        (ours, *torch.autograd.grad(ours, list(model.parameters()))), (plain, *expected), strict=True
    ):
        assert (got - wanted).norm() <= 3e-6 * wanted.norm()


def test_a_model_in_half_precision():
    """Its loss in parts is float32, as that of whole logits; float16, where powers of e overflow, has whole ones."""
    tokens, targets = torch.randint(100, (2, 128, 128))
    for dtype, name in ((torch.bfloat16, "_LinearCrossEntropyBackward"), (torch.float16, "NllLossBackward0")):
        model = reference("gpt", 32, 1, 16, 100).to(dtype)
        loss = cross_entropy(model, tokens, targets)
        assert (loss.dtype, type(loss.grad_fn).__name__) == (torch.float32, name)
        plain = F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())
        assert float(loss.detach()) == pytest.approx(float(plain.detach()), rel=1e-3)


def test_what_is_compiled_has_a_bias_or_few_logits_keeps_its_own_forward_pass():
    tokens, targets = torch.randint(100, (2, 3, 67))
    model = reference("gpt", 32, 1, 16, 100)
    assert torch.equal(
        cross_entropy(model, tokens, targets), F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    )
    model.head.bias = torch.nn.Parameter(torch.randn(100))
    large = torch.randint(100, (2, 128, 128))
    plain = F.cross_entropy(model(large[0]).flatten(0, 1), large[1].flatten())
    assert torch.equal(cross_entropy(model, large[0], large[1]), plain)


def test_a_run_has_the_same_losses_in_parts(monkeypatch):
    config, corpus = TrainConfig(width=16, depth=1, steps=4, batch_size=2, context=80), load("markov:64")
    plain = train(config, corpus)
    monkeypatch.setattr(module, "FEW", 0)
    monkeypatch.setattr(module, "ROWS", 64)
    ours = train(config, corpus)
    assert ours.val_loss == pytest.approx(plain.val_loss, abs=1e-5)
    assert ours.train_loss == pytest.approx(plain.train_loss, abs=1e-5)
    assert ours != plain, "the same to the last bit: not computed in parts"
