"""Optimizers by the names of recipes."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

import surefoot.contrib as contrib
import surefoot.recipes as recipes
from surefoot.optim.optimizer import SteepestDescent
from surefoot.plan import Plan
from surefoot.recipes import Recipe
from surefoot.scaling import Run

RECIPES: Mapping[str, Callable[..., Recipe]] = {
    name: getattr(room, name) for room in (recipes, contrib) for name in room.__all__ if name.islower()
}
"""The functions that make recipes, by name."""


def named(name: str) -> Recipe:
    """The recipe of this name, with its defaults; ValueError if there is none."""
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}; choose one of {', '.join(RECIPES)}")
    return RECIPES[name]()


def create_optimizer(
    model: nn.Module,
    recipe: str | Recipe = "steady",
    *,
    run: Run | None = None,
    lr: float | None = None,
    **options: Any,
) -> SteepestDescent:
    """Make a model's optimizer from a recipe's name: for trainers and configurations that select optimizers by name.

    Args:
        model: any module.
        recipe: a name in `surefoot.recipes` or `surefoot.contrib`, used with its defaults; or a `Recipe`.
        run: length of the training run; sets the decay, and the rate if the recipe has a rate law.
        lr: learning rate; default: that of the run.
        **options: passed to `SteepestDescent`: `precision`, `step`, `maximize`, `replicas`.

    Returns:
        The optimizer, with the recipe's plan.

    Raises:
        ValueError: an unknown name; what `Plan.of` or `SteepestDescent` refuses.

    >>> create_optimizer(nn.Linear(4, 2), "muon", lr=0.02).param_groups[0]["lr"]
    0.02
    """
    recipe = named(recipe) if isinstance(recipe, str) else recipe
    return SteepestDescent(model, Plan.of(model, recipe, run=run), lr=lr, **options)
