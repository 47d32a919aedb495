"""Runs as CUDA graphs, several at once, are the training loop's: on a CPU to rounding, there without the graphs."""

import importlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train
from surefoot.experiment.training.methods import method

GPU = pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])


@pytest.fixture(scope="module")
def captured():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "studies"))
        yield importlib.import_module("captured")


@pytest.fixture(scope="module")
def corpus():
    text = np.random.default_rng(0).integers(0, 12, 4000).astype(np.uint8)
    return Corpus(text[:3600], text[3600:], "noise", "noise", vocab=12, ends=np.arange(100, 3601, 100))


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_each_run_is_the_loop_s(captured, corpus, device):
    sizes = {"width": 16, "depth": 1, "batch_size": 2, "context": 16, "steps": 8, "device": device}
    jobs = []
    for seed, (name, lr) in enumerate((("steady", 0.1), ("moonlight_tuned", 0.1), ("adamw", 0.01))):
        config = TrainConfig(**sizes, method=name, lr=lr, seed=seed)
        jobs.append(captured.Job(name, config, method(name), corpus))
    done = list(captured.train_all(jobs, at_once=2))
    assert [job.key for job, _ in done] == [job.key for job in jobs]
    for job, result in done:
        alone = train(job.config, corpus, method=job.method)
        assert result.train_loss == pytest.approx(alone.train_loss, abs=1e-5 if device == "cpu" else 1e-2)
        assert result.val_loss == pytest.approx(alone.val_loss, abs=1e-5 if device == "cpu" else 1e-2)


def test_a_role_s_rate_can_be_changed_alone(captured, corpus):
    config = TrainConfig(width=16, depth=1, batch_size=2, context=16, steps=2, lr=0.1)
    plain = captured.Job(0, config, method("steady"), corpus)
    held = replace(plain, scale={"embedding": 0.0})
    weights = [captured.Captured(job).run.model.state_dict() for job in (plain, held)]
    first = captured.Run(config, corpus, method("steady")).model.state_dict()
    assert torch.equal(weights[1]["embedding.weight"], first["embedding.weight"])
    assert not torch.equal(weights[0]["embedding.weight"], first["embedding.weight"])
    assert not torch.equal(weights[1]["head.weight"], first["head.weight"])


def test_a_loss_that_is_not_finite_is_divergence(captured, corpus):
    """At any step: the loop asks at every tenth, and ends there."""
    config = TrainConfig(width=16, depth=1, batch_size=2, context=16, steps=24, lr=0.1)
    run = captured.Captured(captured.Job(0, config, method("steady"), corpus))
    run.run.losses[1] = torch.inf
    assert run.result().diverged
