"""Run directories and checkpoints from before a setting was there go on, with the value that they had then."""

import json
from dataclasses import replace

import numpy as np
import pytest

from surefoot.experiment import configs
from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.training.checkpoint import Checkpoints, load, save
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train

TINY = TrainConfig(width=16, depth=1, steps=4, batch_size=4, context=16, lr=2.0**-5, data_order="random")


@pytest.fixture(scope="module")
def corpus():
    text = np.frombuffer(b"the quick brown fox jumps over the lazy dog, " * 200, dtype=np.uint8)
    return Corpus(text[:8000], text[8000:], "fox", "fox")


def early(settings):
    return {key: value for key, value in settings.items() if key not in configs.LATER}


def test_what_is_missing_is_a_default():
    """But for the order of the data, which was random before there was another."""
    now = {key: TrainConfig().to_json()[key] for key in configs.LATER}
    assert now == {**configs.LATER, "data_order": "documents"}


@pytest.mark.parametrize("place", [lambda settings: settings, lambda settings: {"steps": 4, "settings": settings}])
def test_an_early_directory_goes_on(tmp_path, place):
    (tmp_path / "config.json").write_text(json.dumps(place(early(TINY.to_json()))))
    with configs.claimed(tmp_path, "train", place(TINY.to_json()), "log.jsonl"):
        pass
    with (
        pytest.raises(ValueError, match='cooldown_shape: there "linear", now "sqrt"'),
        configs.claimed(tmp_path, "train", place(TINY.replace(cooldown_shape="sqrt").to_json()), "log.jsonl"),
    ):
        pass


def test_an_early_checkpoint_goes_on(corpus, tmp_path):
    done = train(TINY, corpus, checkpoints=(checkpoints := Checkpoints(tmp_path)))
    state = load(path := checkpoints.paths()[0])
    save(path, {**state, "config": early(state["config"])})
    assert replace(train(TINY, corpus, checkpoints=checkpoints), seconds=0) == replace(done, seconds=0)
    with pytest.raises(ValueError, match=r"cooldown_shape \(linear, now sqrt\)"):
        train(TINY.replace(cooldown_shape="sqrt"), corpus, checkpoints=checkpoints)
