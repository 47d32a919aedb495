"""A run's state as a checkpoint folder, which every mesh and one process alone can read."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from surefoot.experiment.distributed import folders
from surefoot.experiment.distributed.processes import agree
from surefoot.experiment.training.run import Run


def save(run: Run, path: Path, more: Mapping[str, Any], background: bool) -> Future[Any]:
    """Save a run: a collective.

    Args:
        run: between two steps.
        path: of the new folder.
        more: further facts.
        background: whether to write while the run goes on.

    Returns:
        Its result is there when the folder is; an `OSError` if it cannot be written.
    """
    return folders.save(path, _tensors(run), {**run.facts(), **more}, run.layout.processes.group, background)


def load_(run: Run, path: Path) -> None:
    """Go on from a folder: a collective.

    Args:
        run: of the same configuration, on any mesh.
        path: of the folder.

    Raises:
        CheckpointError: on every process, if one finds it damaged.
        ValueError: it is of another run.
    """
    processes = run.layout.processes
    ranks = len(processes.together(None))
    agree(processes, partial(folders.damage, path, processes.rank, ranks))
    facts = folders.facts_of(path, run.facts())
    run.require_same_run(facts)
    tensors = _tensors(run)
    folders.load_(path, tensors, processes.group)
    set_model_state_dict(run.model, tensors["model"])
    set_optimizer_state_dict(run.model, run.optimizer, tensors["optimizer"])
    run.losses.copy_(tensors["losses"])
    if run.average is not None:
        run.average.load_(tensors["average"])
    run.go_on(facts)


def _tensors(run: Run) -> dict[str, Any]:
    """The run's tensors by names that are the same on every mesh; the optimizer's state complete."""
    optimizer = get_optimizer_state_dict(run.model, run.optimizer)
    average = {} if run.average is None else {"average": run.average.weights}
    return {"model": get_model_state_dict(run.model), "optimizer": optimizer, "losses": run.losses, **average}
