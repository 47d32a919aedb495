"""Named recipes: a role table each. Known optimizers as points of one space."""

from surefoot.recipes.depth import DepthRule
from surefoot.recipes.horizon import HorizonRule
from surefoot.recipes.known import (
    beyond_mup,
    frobenius_sphere,
    hyperball,
    lion,
    moga_column,
    moga_row,
    muon,
    scion,
    sign_natural,
    sign_sgd,
)
from surefoot.recipes.recipe import Recipe
from surefoot.recipes.related import (
    mano,
    moonlight,
    muon_squared,
    normalised_sgd,
    normuon,
    rmnp,
    scale,
    shampoo_muon,
    signum,
    wion,
)
from surefoot.recipes.steady import steady, steady_bounded, steady_soap

__all__ = [
    "DepthRule", "HorizonRule", "Recipe", "beyond_mup", "frobenius_sphere", "hyperball", "lion", "mano", "moga_column",
    "moga_row", "moonlight", "muon", "muon_squared", "normalised_sgd", "normuon", "rmnp", "scale", "scion",
    "shampoo_muon", "sign_natural", "sign_sgd", "signum", "steady",
    "steady_bounded", "steady_soap", "wion",
]  # fmt: skip
