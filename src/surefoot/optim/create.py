"""An optimizer by the name of its recipe."""

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
    """The recipe of a name, with its defaults; ValueError if there is none."""
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
    """The optimizer of a model by the name of a recipe: for trainers and configurations that select one by name.

    Args:
        model: any module.
        recipe: a name of `surefoot.recipes` or `surefoot.contrib`, whose defaults are taken; or a `Recipe`.
        run: the length of the run, which decay follows, and the rate if the recipe has a law.
        lr: learning rate; default: that of the run.
        **options: of `SteepestDescent`: `precision`, `step`, `maximize`, `replicas`.

    Returns:
        The optimizer, with the recipe's plan.

    Raises:
        ValueError: an unknown name; what `Plan.of` and `SteepestDescent` refuse.

    >>> create_optimizer(nn.Linear(4, 2), "muon", lr=0.02).param_groups[0]["lr"]
    0.02
    """
    recipe = named(recipe) if isinstance(recipe, str) else recipe
    return SteepestDescent(model, Plan.of(model, recipe, run=run), lr=lr, **options)
