"""Signals during training: the step is finished and saved, and nothing is lost."""

import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.distributed.processes import ALONE
from surefoot.experiment.distributed.stop import Stop
from surefoot.experiment.training.checkpoint import Checkpoints, load
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train
from surefoot.experiment.training.run import Run

TINY = TrainConfig(width=16, depth=1, steps=12, batch_size=4, context=16, lr=2.0**-5)


@pytest.fixture(scope="module")
def corpus():
    text = np.frombuffer(b"the quick brown fox jumps over the lazy dog, " * 200, dtype=np.uint8)
    return Corpus(text[:8000], text[8000:], "fox", "fox")


@pytest.fixture
def signals_in(monkeypatch):
    """Sends so many signals in the middle of a step, after its backward pass."""

    def arrange(step, count):
        rows = Run.loss

        def loss(run, split, seed, number, *parts):
            if split == "train" and number == step - 1:
                for _ in range(count):
                    signal.raise_signal(signal.SIGINT)
            return rows(run, split, seed, number, *parts)

        monkeypatch.setattr(Run, "loss", loss)

    return arrange


def test_a_signal_in_the_middle_of_a_step_lets_it_end_and_saves_it(corpus, tmp_path, signals_in, monkeypatch):
    whole = train(TINY, corpus, checkpoints=Checkpoints(tmp_path / "whole", every=5))
    part = Checkpoints(tmp_path / "part", every=5)
    signals_in(7, 1)
    with pytest.raises(KeyboardInterrupt):
        train(TINY, corpus, checkpoints=part)
    assert [path.name for path in part.paths()] == ["step-00000007.pt", "step-00000005.pt"]
    monkeypatch.undo()
    taken = []
    resumed = train(TINY, corpus, on_step=lambda record: taken.append(record["step"]), log_every=1, checkpoints=part)
    assert taken == list(range(8, 13))
    assert replace(whole, seconds=0) == replace(resumed, seconds=0)
    ours, theirs = (load(Checkpoints(tmp_path / name).paths()[0]) for name in ("part", "whole"))
    assert ours["model"].keys() == theirs["model"].keys()
    assert all(torch.equal(ours["model"][name], w) for name, w in theirs["model"].items())


def test_two_signals_at_a_time_are_one(corpus, tmp_path, signals_in):
    signals_in(7, 2)
    with pytest.raises(KeyboardInterrupt):
        train(TINY, corpus, checkpoints=(part := Checkpoints(tmp_path, every=5)))
    assert [path.name for path in part.paths()] == ["step-00000007.pt", "step-00000005.pt"]


def test_a_second_signal_ends_at_once(corpus, tmp_path, signals_in, monkeypatch):
    monkeypatch.setattr("surefoot.experiment.distributed.stop.TOGETHER", -1.0)
    signals_in(7, 2)
    with pytest.raises(KeyboardInterrupt):
        train(TINY, corpus, checkpoints=(part := Checkpoints(tmp_path, every=5)))
    assert [path.name for path in part.paths()] == ["step-00000005.pt"]


def test_a_signal_in_the_last_step_is_obeyed_and_handlers_are_given_back(corpus, tmp_path, signals_in):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    signals_in(12, 1)
    with pytest.raises(KeyboardInterrupt):
        train(TINY, corpus, checkpoints=(part := Checkpoints(tmp_path, every=100)))
    assert [path.name for path in part.paths()] == ["step-00000012.pt"]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Stop(ALONE) as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop.asked()
    finally:
        signal.signal(signal.SIGINT, before)
