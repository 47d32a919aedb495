"""Named recipes, each a role table: known optimizers as points of one space."""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from surefoot.recipes.natural import beyond_mup, moga_column, moga_row
from surefoot.recipes.published import (
    hyperball,
    lion,
    mano,
    moonlight,
    muon,
    normalised_sgd,
    normuon,
    rmnp,
    scale,
    scion,
    sign_sgd,
    wion,
)
from surefoot.recipes.recipe import Recipe
from surefoot.recipes.rules import DepthRule, HorizonRule
from surefoot.recipes.steady import steady, steady_bounded, steady_soap

__all__ = [
    "DepthRule", "HorizonRule", "Recipe", "beyond_mup", "hyperball", "lion", "mano", "moga_column", "moga_row",
    "moonlight", "muon", "normalised_sgd", "normuon", "rmnp", "scale", "scion", "sign_sgd", "steady",
    "steady_bounded", "steady_soap", "wion",
]  # fmt: skip

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """A recipe that moved to `surefoot.contrib`, which lies above: asked for by name, with a warning."""
        if name not in ("frobenius_sphere", "muon_squared", "shampoo_muon", "sign_natural", "signum"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
        warnings.warn(f"surefoot.recipes.{name} moved: surefoot.contrib.{name}", DeprecationWarning, stacklevel=2)
        return getattr(import_module("surefoot.contrib"), name)
