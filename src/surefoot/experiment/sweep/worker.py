"""What a sweep's worker process runs: one cell, one thread."""

from __future__ import annotations

import functools

import torch

from surefoot.experiment.data.corpus import Corpus, load
from surefoot.experiment.sweep.config import Cell, CellResult
from surefoot.experiment.training.loop import TrainConfig, train


def run_cell(cell: Cell) -> CellResult:
    """Train the cell's model; its `settings` are `TrainConfig`'s fields, "data" (a path or None), "text" and "corpus".

    Raises:
        ValueError: an impossible configuration, or data whose SHA-256 is no longer "corpus".
    """
    torch.set_num_threads(1)
    settings = {key: value for key, value in cell.settings.items() if key != "text"}  # "text" is for people
    corpus = _corpus(settings.pop("data", None))
    if settings.pop("corpus", corpus.sha256) != corpus.sha256:
        raise ValueError(f"{corpus.name} has changed since the sweep was started: choose another directory")
    config = TrainConfig(
        method=cell.recipe, width=cell.width, lr=2.0**cell.log2_lr, seed=cell.seed, steps=cell.steps, **settings
    )
    result = train(config, corpus)
    return CellResult(result.train_loss, result.val_loss, result.seconds, result.diverged)


@functools.cache
def _corpus(path: str | None) -> Corpus:
    """Read once per process."""
    return load(path)
