"""What a sweep's worker process runs: one trial on one thread."""

from __future__ import annotations

import functools

import torch

from surefoot.experiment.data.corpus import Corpus, load
from surefoot.experiment.sweep.config import Trial, TrialResult
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train


def run_trial(trial: Trial) -> TrialResult:
    """Train one model.

    Args:
        trial: its `settings` are those of `TrainConfig.of`, "data" (a path, or None for the default corpus), "corpus"
            (the data's SHA-256) and "text" (the data's name, for people).

    Returns:
        Losses and time.

    Raises:
        ValueError: an impossible configuration, or data whose SHA-256 is no longer "corpus".
    """
    torch.set_num_threads(1)
    settings = {key: value for key, value in trial.settings.items() if key != "text"}
    corpus = _corpus(settings.pop("data", None))
    if settings.pop("corpus", corpus.sha256) != corpus.sha256:
        raise ValueError(f"{corpus.name} has changed since the sweep was started: choose another directory")
    config = TrainConfig.of(
        method=trial.recipe, width=trial.width, lr=2.0**trial.log2_lr, seed=trial.seed, steps=trial.steps, **settings
    )
    result = train(config, corpus)
    return TrialResult(result.train_loss, result.val_loss, result.seconds, result.diverged)


@functools.cache
def _corpus(path: str | None) -> Corpus:
    """Read the data once per process."""
    return load(path)
