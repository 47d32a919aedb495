"""The study of long runs: the loss without all logits is the loss, and so are its gradients."""

import importlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from surefoot.experiment.data.corpus import load
from surefoot.experiment.distributed.processes import Layout
from surefoot.experiment.models.decoder import Decoder, reference
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train

STUDIES = Path(__file__).parents[2] / "studies"


@pytest.fixture
def loss():
    """The study's module; not compiled, which takes half a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(STUDIES))
        module = importlib.import_module("pretrain.loss")
        patch.setattr(module, "_hidden", lambda: Decoder.hidden)
        yield module


@pytest.mark.parametrize("scale", [1.0, 300.0])
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_the_loss_in_parts_and_its_gradients_are_those_of_the_whole(loss, kind, scale):
    """Rows that the parts do not divide; logits so far apart that most probabilities are 0."""
    torch.manual_seed(0)
    model = reference(kind, 32, 1, 16, 100).double()
    with torch.no_grad():
        model.head.weight.mul_(scale)
    tokens, targets = torch.randint(100, (2, 3, 67))
    plain = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    ours = loss.cross_entropy(model, tokens, targets)
    assert float(ours.detach()) == pytest.approx(float(plain.detach()), rel=1e-12)
    expected = torch.autograd.grad(2 * plain, list(model.parameters()))
    for gradient, wanted in zip(torch.autograd.grad(2 * ours, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(loss.cross_entropy(model, tokens, targets), plain)


def test_a_run_takes_the_loss_that_its_layout_names(loss):
    config, corpus = TrainConfig.of(width=16, depth=1, steps=4, batch_size=2, context=80), load("markov:64")
    calls = []

    def counted(*arguments):
        calls.append(torch.is_grad_enabled())
        return loss.cross_entropy(*arguments)

    plain, ours = train(config, corpus), train(config, corpus, layout=Layout(loss=counted))
    assert sum(calls) == 4 < len(calls), "validation losses, too"
    assert ours.val_loss == pytest.approx(plain.val_loss, abs=1e-5)
