"""What a sweep's worker process runs: one trial on one thread."""

from __future__ import annotations

import functools

import torch
from torch import nn

from surefoot.experiment.data.corpus import Corpus, load
from surefoot.experiment.sweep.config import Trial, TrialResult
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train
from surefoot.experiment.training.run import Run


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
    corpus = unchanged(settings.pop("data", None), settings.pop("corpus", None))
    config = TrainConfig.of(
        method=trial.recipe, width=trial.width, lr=2.0**trial.log2_lr, seed=trial.seed, steps=trial.steps, **settings
    )
    found: list[str | None] = [None]

    def look(run: Run) -> None:
        found.append(first_not_finite(run.model))

    result = train(config, corpus, observe=look, log_every=trial.steps)  # at the start and at the end
    return TrialResult(result.train_loss, result.val_loss, result.seconds, result.diverged, not_finite=found[-1])


def first_not_finite(model: nn.Module) -> str | None:
    """The name of the first parameter whose weight or gradient has a NaN or an infinity; None if there is none."""
    for name, parameter in model.named_parameters():
        if not all(t.isfinite().all() for t in (parameter.detach(), parameter.grad) if t is not None):
            return name
    return None


def unchanged(data: str | None, sha256: str | None) -> Corpus:
    """The data of a sweep, read once per process.

    Args:
        data: as `corpus.load` takes it.
        sha256: of the data when the sweep was started; None if it is not known.

    Returns:
        The corpus.

    Raises:
        ValueError: the data have changed.
    """
    corpus = _corpus(data)
    if sha256 not in (None, corpus.sha256):
        raise ValueError(f"{corpus.name} has changed since the sweep was started: choose another directory")
    return corpus


_corpus = functools.cache(load)
