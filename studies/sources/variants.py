"""The methods of this study that are no recipe of the package."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from surefoot import recipes
from surefoot.geometry.base import Cache, Eta, Geometry
from surefoot.recipes.steady import DECAY
from surefoot.scaling import Constant, Scale
from surefoot.stabilise import PostClip
from surefoot.stabilise.base import Moved, Stabiliser

HIDDEN, TABLES = ("linear", "heads", "conv"), ("embedding", "head")
RADIUS = 2.0


@dataclass(frozen=True)
class DecayedClip(PostClip):
    """`PostClip` after the default's decay, `(1 - lr DECAY) w - eta d`, clipped.

    A weight that decays stays inside whatever bound is known of its norm, so all that `PostClip` proves holds.

    Args:
        lr_scale: the role's, by which `eta` is divided for the rate that decay goes by.
    """

    lr_scale: Scale = Constant()

    def scaled(self, unit: float, shape: tuple[int, ...]) -> Stabiliser:
        """The radius in its unit, the scale of this shape."""
        return replace(self, radius=self.radius * unit, lr_scale=Constant(self.lr_scale(shape)))

    def move(self, w: Tensor, m: Tensor, eta: Eta, geometry: Geometry, ball: Geometry, cache: Cache = None) -> Moved:
        """Decay, step, project."""
        keep = 1 - eta * (DECAY / self.lr_scale(tuple(w.shape)))
        return super().move(w * keep, m, eta, geometry, ball, cache)


def bounded(decays: bool = False) -> recipes.Recipe:
    """The default with `PostClip(2)` on every role, on hidden matrices in units of the step's factor.

    Args:
        decays: beside the default's decay of matrices and tables, not in its place.

    Returns:
        The recipe.
    """
    base = recipes.steady()
    table = {kind: replace(role, stabiliser=PostClip(RADIUS)) for kind, role in base.table.items()}
    for kind in HIDDEN:
        table[kind] = replace(table[kind], radius_unit=table[kind].lr_scale)
    if decays:
        for kind in (*HIDDEN, *TABLES):
            table[kind] = replace(table[kind], stabiliser=DecayedClip(RADIUS, lr_scale=table[kind].lr_scale))
    return replace(base, name="bounded_beside_decay" if decays else "bounded", table=table)
