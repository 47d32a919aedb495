"""What a worker process of a sweep runs: one trial, which says where it diverged."""

import pytest
import torch

from surefoot.experiment.data.sources import load
from surefoot.experiment.sweep.config import Trial
from surefoot.experiment.sweep.executors import guarded
from surefoot.experiment.sweep.worker import run_trial
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train
from surefoot.experiment.training.run import Run

SMALL = {"depth": 1, "batch_size": 4, "context": 16, "data": "markov:16"}


@pytest.fixture(autouse=True)
def own_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_the_first_parameter_that_is_not_finite_is_named():
    run = Run(TrainConfig(width=16, depth=1, steps=1), load("markov:16"))
    names = list(dict(run.model.named_parameters()))
    assert run.not_finite() is None
    run.model.get_parameter(names[3]).grad = torch.full_like(run.model.get_parameter(names[3]), torch.inf)
    assert run.not_finite() == names[3]
    with torch.no_grad():
        run.model.get_parameter(names[1]).view(-1)[1] = torch.nan
    assert run.not_finite() == names[1]


def test_a_run_whose_weights_overflow_says_where_it_diverged():
    result = run_trial(Trial("lion", 16, 120.0, 0, 30, SMALL))
    assert result.diverged
    assert result.val_loss is None
    assert result.not_finite == "embedding.weight"


def test_a_worker_that_has_loaded_torch_has_one_thread_too(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("MKL_NUM_THREADS", "2")
    torch.set_num_threads(2)
    assert guarded(lambda item: (item, torch.get_num_threads()), "here") == ("here", 1)


def test_looking_changes_no_result():
    result = run_trial(Trial("adamw", 16, -7.0, 0, 12, SMALL))
    settings = {name: value for name, value in SMALL.items() if name != "data"}
    plain = train(TrainConfig(method="adamw", width=16, lr=2.0**-7, steps=12, **settings), load("markov:16"))
    assert (result.train_loss, result.val_loss) == (plain.train_loss, plain.val_loss)
    assert result.not_finite is None
