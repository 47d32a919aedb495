"""What a sweep's worker process runs: one trial on one thread."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from surefoot.experiment.data.corpus import Corpus, load
from surefoot.experiment.sweep.config import Trial, TrialResult
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train
from surefoot.experiment.training.run import Record, Run


def run_trial(trial: Trial) -> TrialResult:
    """Train one model.

    Args:
        trial: its `settings` are those of `TrainConfig.of`, "data" (a path, or None for the default corpus), "corpus"
            (the data's SHA-256), "text" (the data's name, for people) and "evaluations" (how often the validation loss
            is measured on the way; none by default).

    Returns:
        Losses and time; with evaluations, `facts["curve"]` has the lists "step", "val_loss" and "seconds", from step 0.

    Raises:
        ValueError: an impossible configuration, or data whose SHA-256 is no longer "corpus".
    """
    torch.set_num_threads(1)
    settings = {key: value for key, value in trial.settings.items() if key != "text"}
    evaluations = settings.pop("evaluations", 0)
    corpus = _corpus(settings.pop("data", None))
    if settings.pop("corpus", corpus.sha256) != corpus.sha256:
        raise ValueError(f"{corpus.name} has changed since the sweep was started: choose another directory")
    config = TrainConfig.of(
        method=trial.recipe, width=trial.width, lr=2.0**trial.log2_lr, seed=trial.seed, steps=trial.steps, **settings
    )
    curve: dict[str, list[Any]] = {}
    result = train(config, corpus, **(_watch(curve, math.ceil(trial.steps / evaluations)) if evaluations else {}))
    facts = {"curve": curve} if evaluations else {}
    return TrialResult(result.train_loss, result.val_loss, result.seconds, result.diverged, facts)


def _watch(curve: dict[str, list[Any]], every: int) -> dict[str, Any]:
    """Arguments of `train` that measure the validation loss before the first step, every so many, and at the end."""

    def add(record: Record) -> None:
        if "val_loss" in record:  # a run that diverges ends between two evaluations
            for name in ("step", "val_loss", "seconds"):
                curve.setdefault(name, []).append(record[name])

    def begin(run: Run) -> None:
        if run.step == 0:
            add({"step": 0, "val_loss": run.validate(), "seconds": 0.0})

    return {"observe": begin, "on_step": add, "log_every": 0, "eval_every": every}


@functools.cache
def _corpus(path: str | None) -> Corpus:
    """Read the data once per process."""
    return load(path)
