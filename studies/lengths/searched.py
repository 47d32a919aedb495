"""The recipes whose rate and decay are searched at each length, and where each search starts."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from surefoot import recipes
from surefoot.experiment.training.methods import Method, Steepest, moonlight_tuned
from surefoot.recipes import Recipe
from surefoot.recipes.rules import with_decay
from surefoot.stabilise import DecoupledWeightDecay

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "search")]
from families import FAMILIES
from winners import winner

LAW = "steady_law"
"""The default as its users have it: at the rate and decay that the length of a run gives."""


def muon_tuned() -> Recipe:
    """`moonlight_tuned` with Keller Jordan's factor on matrices in place of Moonlight's."""
    recipe, scale = moonlight_tuned(), recipes.muon().role("linear").lr_scale
    linear = replace(recipe.role("linear"), lr_scale=scale, stabiliser=DecoupledWeightDecay(0.085, scale))
    return replace(recipe, name="muon_tuned", table={**recipe.table, "linear": linear})


def at_decay(recipe: Recipe, decay: float) -> Method:
    """A recipe with this decay in the place of that of its hidden matrices, the others' in proportion."""
    factor = decay / recipe.role("linear").stabiliser.rate
    table = {kind: with_decay(role, factor) for kind, role in recipe.table.items()}
    return Steepest(replace(recipe, table=table, horizon=None))


def _adamw(decay: float) -> Method:
    return FAMILIES["adamw"].method({**winner("adamw"), "decay": decay})


def _scion(factor: float) -> Method:
    point = winner("scion")
    radii = {kind: factor * point[kind] for kind in ("radius", "embedding", "head", "gain")}
    return FAMILIES["scion"].method({**point, **radii})


@dataclass(frozen=True)
class Searched:
    """A recipe: its method for a decay (Scion: a factor on radii), and where its search starts.

    Args:
        method: makes it.
        rate: log2 of the rate at the centre.
        total: log2 of the total decay there, of the factor for Scion.
        decays: whether the second number is a total decay.
    """

    method: Callable[[float], Method]
    rate: float
    total: float = 0.0
    decays: bool = True

    def at(self, log2_lr: float, second: float, steps: int) -> Method:
        """The method at a point of the search."""
        return self.method(2.0 ** (second + 1 - log2_lr) / steps if self.decays else 2.0**second)


RECIPES: Mapping[str, Searched] = {
    **dict.fromkeys((LAW, "steady"), Searched(functools.partial(at_decay, recipes.steady()), -3.5)),
    "moonlight": Searched(functools.partial(at_decay, recipes.moonlight()), -4.5),
    "moonlight_tuned": Searched(functools.partial(at_decay, moonlight_tuned()), -4.0),
    "muon_tuned": Searched(functools.partial(at_decay, muon_tuned()), -4.0),
    "adamw": Searched(_adamw, -7.0),
    "scion": Searched(_scion, -12.0, decays=False),
}
