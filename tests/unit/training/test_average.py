"""The average of the weights: torch's numbers, no trace in the training, exact resumption."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.training.checkpoint import Checkpoints, load
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train
from surefoot.experiment.training.run import Run

TINY = TrainConfig(width=16, depth=1, steps=12, batch_size=4, context=16, lr=2.0**-5, stabiliser="post_clip:2")
AVERAGED = TINY.replace(average=0.8)
LAST = TINY.replace(average="last:0.5")


@pytest.fixture(scope="module")
def corpus():
    text = np.frombuffer(b"the quick brown fox jumps over the lazy dog, " * 200, dtype=np.uint8)
    return Corpus(text[:8000], text[8000:], "fox", "fox")


def test_the_average_is_torchs_and_so_is_its_loss(corpus):
    run = Run(AVERAGED, corpus)
    torchs = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for _ in range(5):
        run.advance()
        torchs.update_parameters(run.model)
    for name, p in torchs.module.named_parameters():
        assert torch.equal(run.average.weights[name], p), name
    losses = run.evaluate()
    own, run.model = run.model, torchs.module
    assert losses["val_loss_average"] == run.validate() != losses["val_loss"]
    run.model = own
    assert losses["val_loss"] == run.validate()


def test_the_mean_of_the_last_weights_is_torchs(corpus):
    """Of steps 7 to 12; until the seventh it is the weights themselves."""
    run, torchs = Run(LAST, corpus), None
    for step in range(12):
        run.advance()
        if step == 6:
            torchs = AveragedModel(run.model, multi_avg_fn=get_swa_multi_avg_fn())
        if torchs is not None:
            torchs.update_parameters(run.model)
        for name, p in (run.model if torchs is None else torchs.module).named_parameters():
            assert torch.equal(run.average.weights[name], p), (step, name)
    assert torchs.n_averaged == 6
    losses = run.evaluate()
    assert losses["val_loss_average"] not in (None, losses["val_loss"])


def test_training_is_that_without_an_average(corpus):
    records = {config.average: [] for config in (TINY, AVERAGED)}
    results = [
        train(config, corpus, on_step=records[config.average].append, log_every=3, eval_every=4)
        for config in (TINY, AVERAGED)
    ]
    assert replace(results[0], seconds=0) == replace(results[1], seconds=0, val_loss_average=None)
    assert [r["loss"] for r in records[0.0]] == [r["loss"] for r in records[0.8]]
    assert ["val_loss_average" in r for r in records[0.8]] == ["val_loss" in r for r in records[0.8]]
    assert not any("val_loss_average" in r for r in records[0.0])
    assert records[0.8][-1]["val_loss_average"] == results[1].val_loss_average != results[1].val_loss


def test_evaluating_counts_as_no_write_to_the_weights(corpus):
    run = Run(AVERAGED, corpus)
    run.advance()
    before = [(p._version, p.detach().clone()) for p in run.model.parameters()]
    run.evaluate()
    for p, (version, w) in zip(run.model.parameters(), before, strict=True):
        assert p._version == version
        assert torch.equal(p, w)


@pytest.mark.parametrize("averaged", [AVERAGED, LAST], ids=lambda config: str(config.average))
def test_the_average_goes_on_bit_for_bit(averaged, corpus, tmp_path):
    whole = train(averaged, corpus, checkpoints=Checkpoints(tmp_path / "whole", every=5))
    (tmp_path / "part").mkdir()
    for path in (tmp_path / "whole").glob("step-00000010.pt*"):
        path.rename(tmp_path / "part" / path.name)
    part = train(averaged, corpus, checkpoints=Checkpoints(tmp_path / "part"))
    assert replace(part, seconds=0) == replace(whole, seconds=0)
    ours, theirs = (load(tmp_path / name / "step-00000012.pt")["average"] for name in ("part", "whole"))
    assert all(torch.equal(ours[name], w) for name, w in theirs.items())
    with pytest.raises(ValueError, match=r"another run.*average \((0.8|last:0.5), now 0.0\)"):
        train(TINY, corpus, checkpoints=Checkpoints(tmp_path / "part"))


@pytest.mark.parametrize("kind", [1.0, -0.1, float("nan"), "0.9", "last", "last:0", "last:1.5", "last:some"])
def test_an_average_that_is_none_is_refused(kind):
    with pytest.raises(ValueError, match=f"average must be at least 0 and below 1, or last:PART.*, got {kind}"):
        TINY.replace(average=kind)
