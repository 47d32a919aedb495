"""What a sweep's worker process runs: one trial on one thread."""

import functools
import math

import torch

from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.data.sources import load
from surefoot.experiment.errors import DataError, OtherDirectory, with_remedy
from surefoot.experiment.sweep.config import Trial, TrialResult
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train
from surefoot.experiment.training.run import Record, Run


def run_trial(trial: Trial) -> TrialResult:
    """Train one model.

    Args:
        trial: its `settings` are those of `TrainConfig`, "data" (a path, or None for the default corpus), "corpus"
            (the data's SHA-256), "text" (the data's name, for people) and "evaluations" (how often the validation loss
            is measured on the way; none by default).

    Returns:
        Losses and time; with evaluations, `facts["curve"]` has the lists "step", "val_loss" and "seconds", from step 0.

    Raises:
        ValueError: an impossible configuration.
        DataError: data that cannot be read, or whose SHA-256 is no longer "corpus".
    """
    torch.set_num_threads(1)
    settings = {key: value for key, value in trial.settings.items() if key != "text"}
    corpus = unchanged(settings.pop("data", None), settings.pop("corpus", None))
    evaluations = settings.pop("evaluations", 0)
    config = TrainConfig(
        method=trial.recipe, width=trial.width, lr=2.0**trial.log2_lr, seed=trial.seed, steps=trial.steps, **settings
    )
    every = math.ceil(trial.steps / evaluations) if evaluations else 0
    records: list[Record] = []
    not_finite = None

    def look(run: Run) -> None:  # at the start and at the end
        nonlocal not_finite
        not_finite = run.not_finite()
        if evaluations and run.step == 0:
            records.append({"step": 0, "val_loss": run.validate(), "seconds": 0.0})

    result = train(config, corpus, observe=look, on_step=records.append, log_every=trial.steps, eval_every=every)
    measured = [record for record in records if "val_loss" in record]  # a run that diverged between two has one without
    curve = {name: [record[name] for record in measured] for name in ("step", "val_loss", "seconds")}
    facts = {"curve": curve} if evaluations else {}
    return TrialResult(result.train_loss, result.val_loss, result.seconds, result.diverged, facts, not_finite)


def unchanged(data: str | None, sha256: str | None) -> Corpus:
    """The data of a sweep, read once per process.

    Args:
        data: as `sources.load` takes it.
        sha256: of the data when the sweep was started; None if it is not known.

    Returns:
        The corpus.

    Raises:
        DataError: they cannot be read, or have changed.
    """
    corpus = _corpus(data)
    if sha256 not in (None, corpus.sha256):
        message = f"{corpus.name} has changed since the sweep was started: choose another directory"
        raise with_remedy(DataError(message), OtherDirectory())
    return corpus


_corpus = functools.cache(load)
