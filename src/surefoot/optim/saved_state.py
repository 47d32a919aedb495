"""What a saved state dictionary must fulfil."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from surefoot.momentum import State
from surefoot.optim.param_groups import is_dtensor
from surefoot.optim.precision import ADDED

FORMAT = 2
"""Version of the state dictionary's layout."""


def refuse_other(saved: list[dict[str, Any]], present: list[dict[str, Any]], names: Mapping[Tensor, str]) -> None:
    """Raise ValueError where a saved group is of another format, plan or number of parameters than the present one."""
    for index, (theirs, ours) in enumerate(zip(saved, present, strict=False)):
        if theirs.get("format") != FORMAT:
            raise ValueError(
                f"parameter group {index} of the checkpoint is not SteepestDescent's format {FORMAT} but "
                f"{theirs.get('format')}: continue it with the version of surefoot that saved it, or load the model's "
                "weights alone and start with a new optimizer"
            )
        then, now = len(theirs["params"]), len(ours["params"])
        if then != now:
            alone = {*theirs.get("param_names", ())} ^ {*ours.get("param_names", ())}
            which = f"; {min(alone)} is in one of them only" if alone else ""
            raise ValueError(
                f"parameter group {index} ({ours['role']}) has {then} parameters in the checkpoint and {now} in the "
                f"optimizer{which}: it was saved for another model, or by version 0.2.0, which left frozen parameters "
                "out; load the model's weights alone and start with a new optimizer"
            )
        for p, then, now in zip(ours["params"], theirs.get("plan", ()), ours["plan"], strict=False):
            if then != now:
                raise ValueError(
                    f"{names[p]} in parameter group {index} ({ours['role']}) was saved under another plan: "
                    f"{then}, now {now}; build the optimizer with the recipe and overrides of the checkpoint"
                )


def refuse_unfit(
    saved: Mapping[str, Any], present: list[dict[str, Any]], names: Mapping[Tensor, str], new: Callable[[Tensor], State]
) -> None:
    """Raise ValueError, naming parameter and entry, where a saved state is not the state of a present parameter.

    Args:
        saved: a state dictionary; with other numbers of parameters, which torch refuses, it is not looked at.
        present: the optimizer's parameter groups.
        names: of their parameters.
        new: from a parameter to a state with the entries, shapes and dtypes that its own has.
    """
    theirs, ours = ([group["params"] for group in groups] for groups in (saved["param_groups"], present))
    if [*map(len, theirs)] != [*map(len, ours)]:
        return
    parameters = dict(zip(chain(*theirs), chain(*ours), strict=True))
    for index, entries in saved["state"].items():
        if (p := parameters.get(index)) is None:
            raise ValueError(f"the checkpoint has a state of parameter {index!r}, which is in none of its groups")
        if problem := _unfit(entries, new(p), p) if entries else "":
            raise ValueError(
                f"{names[p]}: {problem}; nothing was changed. Load a checkpoint that was saved for this model, or the "
                "model's weights alone, and start with a new optimizer"
            )


def _unfit(entries: Mapping[str, Any], new: State, p: Tensor) -> str:
    """What is wrong with the entries of a saved state; nothing if they fit."""
    optional = {"master": p, "rounds": torch.zeros((), dtype=torch.int64)}
    assert optional.keys() == {*ADDED}
    if missing := new.keys() - entries.keys() - {*ADDED}:
        return f"the checkpoint lacks {min(missing)!r}"
    for name, x in entries.items():
        like = new.get(name, optional.get(name))
        if like is None:
            return f"the checkpoint has an entry {name!r}, which this parameter's role does not keep"
        if not isinstance(x, Tensor):
            return f"{name!r} of the checkpoint is no tensor but {type(x).__name__}"
        if x.shape != like.shape:
            return f"{name!r} of the checkpoint has shape {tuple(x.shape)}, not {tuple(like.shape)}"
        if x.dtype != like.dtype and not (x.is_floating_point() and like.is_floating_point()):
            return f"{name!r} of the checkpoint is of {x.dtype}, not {like.dtype}"
    return ""


@contextmanager
def all_or_nothing(owners: Mapping[Any, Sequence[str]]) -> Iterator[None]:
    """Let a block work on copies of attributes, owner -> their names, which an error that leaves it takes back."""
    before = [(vars(owner), {name: vars(owner)[name] for name in names}) for owner, names in owners.items()]
    try:
        for attributes, values in before:
            attributes.update({name: copy(value) for name, value in values.items()})
        yield
    except BaseException:
        for attributes, values in before:
            attributes.update(values)
        raise


def own_memory(state: State) -> State:
    """The state with tensors that are part of a larger memory copied out of it."""
    return {
        name: x.clone() if not is_dtensor(x) and x.untyped_storage().nbytes() > x.nbytes else x
        for name, x in state.items()
    }
