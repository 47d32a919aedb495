"""What a saved state dictionary must fulfil."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from surefoot.momentum import State
from surefoot.optim.param_groups import is_dtensor

FORMAT = 2
"""Version of the state dictionary's layout."""


def refuse_other(saved: list[dict[str, Any]], present: list[dict[str, Any]], names: Mapping[Tensor, str]) -> None:
    """Raise ValueError where a saved group is of another format or plan than the present one."""
    for index, (theirs, ours) in enumerate(zip(saved, present, strict=False)):
        if theirs.get("format") != FORMAT:
            raise ValueError(
                f"parameter group {index} of the checkpoint is not SteepestDescent's format {FORMAT} but "
                f"{theirs.get('format')}: continue it with the version of surefoot that saved it, or load the model's "
                "weights alone and start with a new optimizer"
            )
        for p, then, now in zip(ours["params"], theirs["plan"], ours["plan"], strict=False):
            if then != now:
                raise ValueError(
                    f"{names[p]} in parameter group {index} ({ours['role']}) was saved under another plan: "
                    f"{then}, now {now}; build the optimizer with the recipe and overrides of the checkpoint"
                )


def own_memory(state: State) -> State:
    """The state with tensors that are part of a larger memory copied out of it."""
    return {
        name: x.clone() if not is_dtensor(x) and x.untyped_storage().nbytes() > x.nbytes else x
        for name, x in state.items()
    }
