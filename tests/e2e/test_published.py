"""Published models as runs: their vocabulary, their shape at another width, and data that does not fit."""

import math
from pathlib import Path

import pytest
import torch

from surefoot.experiment.data.sources import load
from surefoot.experiment.models.configs import published_config
from surefoot.experiment.training.build import build, require_model
from surefoot.experiment.training.config import Architecture, TrainConfig
from surefoot.experiment.training.run import Run

LICENSE = Path(__file__).parents[2] / "LICENSE"


def test_a_run_has_the_published_vocabulary_and_shape():
    config = TrainConfig(model="gpt2_small", width=64, lr=0.02, steps=10, batch_size=1, context=8)
    run = Run(config, load(LICENSE, context=8))
    assert {
        name: tuple(run.model.get_parameter(name).shape) for name in ("embedding.weight", "position_embedding.weight")
    } == {"embedding.weight": (50257, 64), "position_embedding.weight": (1024, 64)}
    assert len(run.model.blocks) == 12
    run.advance()
    spread = math.log(50257) / math.sqrt(64)  # of the first logits of a tied head
    assert float(run.losses[0]) == pytest.approx(math.log(50257) + spread**2 / 2, rel=0.02)
    assert not run.diverged()


def test_a_synthetic_language_of_few_symbols_does_not_look_diverged():
    """The loss starts at log 50257, above twice the entropy of a uniform guess among the data's own tokens."""
    config = TrainConfig(model="gpt2-small", width=64, steps=10, batch_size=1, context=8)
    run = Run(config, load("markov:16", context=8))
    run.losses[0], run.step = math.log(50257), 1
    assert not run.diverged()
    run.losses[0] = 2 * math.log(50257) + 1.1
    assert run.diverged()


def test_sizes_are_the_models_own_unless_they_are_given():
    assert vars(Architecture()) == {"model": "gpt", "width": 64, "depth": 2, "head_dim": 16}
    assert vars(Architecture("gpt2_xl")) == {"model": "gpt2-xl", "width": 1600, "depth": 48, "head_dim": 64}
    config = TrainConfig(model="llama-130m", width=128)
    assert TrainConfig(**config.to_json()) == config.replace(seed=0) == config
    with pytest.raises(ValueError, match="gpt2-xl has depth 48, not 2"):
        TrainConfig().replace(model="gpt2-xl")
    with pytest.raises(ValueError, match=r"width must be at least 1.*, got 0"):
        Architecture("gpt2-xl", width=0)


@pytest.mark.parametrize(("width", "inner"), [(768, 2048), (384, 1024), (64, 168)])
def test_a_published_llama_at_another_width_keeps_its_ratio(width, inner):
    config = published_config("llama-130m", width)
    assert (config.inner, config.size.heads, config.size.vocab) == (inner, width // 64, 32000)


def test_data_with_more_tokens_than_the_model_is_refused():
    with torch.device("meta"), pytest.raises(ValueError, match="llama-130m has 32000 tokens, the data 50257"):
        build(TrainConfig(model="llama-130m"), 50257)


def test_nothing_is_allocated_to_refuse_a_model(monkeypatch):
    made = []
    monkeypatch.setattr(torch.nn.Embedding, "__init__", _recording(torch.nn.Embedding.__init__, made))
    monkeypatch.setattr(torch.Tensor, "normal_", None)  # on the meta device it imports the compiler
    require_model(TrainConfig(model="gpt2-xl"), load(LICENSE))
    assert made
    assert all(weight.is_meta for weight in made)


def _recording(init, made):
    def record(self, *arguments, **options):
        init(self, *arguments, **options)
        made.append(self.weight)

    return record
