"""Speed, FLOPs and the optimizer's share: counted right, and without a change to the training."""

import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.training import throughput
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train
from surefoot.experiment.training.run import Run
from surefoot.experiment.training.throughput import Compute, flops_per_token, peak_of

TINY = TrainConfig(width=16, depth=1, steps=12, batch_size=4, context=16, lr=2.0**-5)


@pytest.fixture(scope="module")
def corpus():
    text = np.frombuffer(b"the quick brown fox jumps over the lazy dog, " * 200, dtype=np.uint8)
    return Corpus(text[:8000], text[8000:], "fox", "fox")


@pytest.mark.parametrize("model", ["gpt", "llama", "qwen"])
def test_flops_are_those_of_the_formula(model, corpus):
    config = TrainConfig(model=model, width=32, depth=3, context=24)
    matrices = [
        p for name, p in Run(config, corpus).model.named_parameters() if p.ndim == 2 and "embedding" not in name
    ]
    n = sum(p.numel() for p in matrices if p.shape[0] != 24)  # without gpt's positions
    assert flops_per_token(config, 256) == 6 * n + 12 * 3 * 32 * 24


class Impatient(nn.Module):
    """Its forward pass looks at a number, which takes memory."""

    def __init__(self, width):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, width), nn.Linear(width, 256)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x if float(x.detach().sum()) > 0 else -x)


def test_a_model_that_cannot_be_counted_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "impatient", types.SimpleNamespace(build=Impatient))
    with pytest.warns(UserWarning, match="the FLOPs of impatient:build are not counted"):
        found = flops_per_token(TrainConfig(model="impatient:build"), 256)
    assert found is None
    assert Compute(found, 1e12).at(100.0) == {"flops_per_token": None, "utilisation": None}


def test_speed_and_share_are_of_the_steps_since_the_last_record(corpus, monkeypatch):
    now, advance = [100.0], Run.advance

    def timed(run, keep):
        if run.step == 0:
            run.optimizer.register_step_pre_hook(lambda *_: now.append(now[-1] + (3 if run.step >= 8 else 1)))
        now.append(now[-1] + 1)
        advance(run, keep)

    monkeypatch.setattr(Run, "advance", timed)
    monkeypatch.setattr(throughput, "time", types.SimpleNamespace(perf_counter=lambda: now[-1]))
    records = []
    result = train(TINY, corpus, on_step=lambda record: (records.append(record), now.append(now[-1] + 50)), log_every=4)
    assert [record["tokens_per_second"] for record in records] == [32, 32, 16]
    assert [record["optimizer_share"] for record in records] == [0.5, 0.5, 0.75]
    assert (result.seconds, result.tokens_per_second, result.optimizer_share) == (32, 24, 0.625)


def test_without_a_log_nothing_is_timed(corpus):
    assert train(TINY, corpus).optimizer_share is None


def test_on_a_gpu_the_device_is_asked_only_where_the_timer_is_read(monkeypatch):
    asked, now = [], iter(range(100))
    event = types.SimpleNamespace

    def make(enable_timing):
        one = event(at=None)
        one.record = lambda stream: setattr(one, "at", next(now))
        one.elapsed_time = lambda other: 1000.0 * (other.at - one.at)
        return one

    monkeypatch.setattr(torch.cuda, "Event", make)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", asked.append)
    timer = throughput._Timer(torch.device("cuda"))
    for _ in range(3):
        with timer:
            next(now)
    assert asked == []
    assert timer.read() == 6
    assert len(asked) == 1
    assert timer.read() == 0


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("Other", None),
    ],
)
def test_peaks_go_by_the_name(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_of(torch.device("cuda")) == peak
    assert peak_of(torch.device("cpu")) is None
