"""A run's state as a checkpoint folder, which every mesh and one process alone can read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from surefoot.experiment.distributed import folders
from surefoot.experiment.distributed.processes import Processes
from surefoot.experiment.errors import Damaged
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
        Damaged: on every process, if one finds it damaged.
        ValueError: it is of another run.
    """
    processes = run.layout.processes
    ranks = len(processes.together(None))
    agree(processes, partial(folders.damage, path, processes.rank, ranks))
    facts = folders.facts_of(path, run.facts())
    run.require_own(facts)
    tensors = _tensors(run)
    folders.load_(path, tensors, processes.group)
    set_model_state_dict(run.model, tensors["model"])
    set_optimizer_state_dict(run.model, run.optimizer, tensors["optimizer"])
    run.losses.copy_(tensors["losses"])
    if run.average is not None:
        run.average.load_(tensors["average"])
    run.go_on(facts)


def agree(processes: Processes, look: Callable[[], str | None]) -> None:
    """Raise on every process what one of them finds: `Damaged` for a sentence, an `OSError` as it is. A collective.

    Args:
        processes: all that call this.
        look: says what is wrong, or raises one of the two.
    """
    found: str | OSError | None
    try:
        found = look()
    except Damaged as error:
        found = str(error)
    except OSError as error:
        found = error
    everybody = [one for one in processes.together(found) if one is not None]
    for one in everybody:
        if isinstance(one, OSError):
            raise one
    if everybody:
        raise Damaged(everybody[0])


def load_whole(run: Run, state: Mapping[str, Any]) -> None:
    """Go on from what one process saved, on a mesh.

    Args:
        run: of the same configuration.
        state: of `Run.state`, whole on every process.

    Raises:
        ValueError: it is of another run.
    """
    run.require_own(state)
    set_model_state_dict(run.model, state["model"], options=StateDictOptions(full_state_dict=True))
    saved, parameters = state["optimizer"], [p for group in run.optimizer.param_groups for p in group["params"]]
    cut = {
        i: {name: _like(x, parameters[int(i)]) for name, x in entries.items()} for i, entries in saved["state"].items()
    }
    run.optimizer.load_state_dict({**saved, "state": cut})
    run.losses.copy_(state["losses"])
    if run.average is not None:
        weights = run.average.weights
        run.average.load_({name: _like(x, weights[name]) for name, x in state["average"].items()})
    run.go_on(state)


def _tensors(run: Run) -> dict[str, Any]:
    """The run's tensors by names that are the same on every mesh; the optimizer's state complete."""
    optimizer = get_optimizer_state_dict(run.model, run.optimizer)
    average = {} if run.average is None else {"average": run.average.weights}
    return {"model": get_model_state_dict(run.model), "optimizer": optimizer, "losses": run.losses, **average}


def _like(x: Any, p: Tensor) -> Any:
    """State of a parameter's shape, cut like the parameter."""
    if not isinstance(p, DTensor) or not isinstance(x, torch.Tensor) or x.shape != p.shape:
        return x
    return distribute_tensor(x.to(p.device), p.device_mesh, p.placements, src_data_rank=None)
