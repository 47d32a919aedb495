"""Where the three parts of a step run (smooth, direct, move), of a parameter that several processes hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from surefoot.geometry.adaptive import Adaptive
from surefoot.geometry.base import Extent
from surefoot.mesh.slabs import Slab
from surefoot.plan import Placement
from surefoot.roles import Role
from surefoot.scaling import Constant
from surefoot.step import Step, descend, direct, step, turned_by_row
from surefoot.views import OneBlock, Shape, Stack, Vector


@dataclass(frozen=True)
class Way:
    """How a part takes its step. Parts of the step that no owner takes run where the part lies.

    Args:
        name: of the way.
        sent: what the owner of a matrix is sent: gradient g, smoothed gradient m, weight w.
        take: what it runs of the step: all of it where it is sent g, else the last two parts, or the second alone.
        back: what it returns: direction d, weight w.
    """

    name: str
    sent: tuple[str, ...] = ()
    take: Step | None = None
    back: tuple[str, ...] = ()


HERE = Way("here")
ROWS = Way("rows")  # the norms of all rows are reduced before the move
DIRECTION = Way(
    "direction", ("m",), lambda role, how, w, m, kept, eta, active: direct(role, how, w, m, kept, active), ("d",)
)
WEIGHT = Way("weight", ("m", "w"), descend, ("w",))
ALL = Way("all", ("g", "w"), step, ("w",))  # and the state of momentum, both ways
REPLICAS = Way("replicas", ("m", "w"), descend, ("w",))  # the owner has its own copies of m and w: nothing is sent


def chosen(placement: Placement, slabs: Sequence[Slab], local: tuple[int, ...]) -> tuple[Way, Placement]:
    """The way of a parameter cut into slabs, and the own slab's placement where it takes its step here."""
    cut = {d for d, n in enumerate(placement.shape) if any(slab.size[d] != n for slab in slabs)}
    role, shape = placement.role, placement.shape
    view, momentum, ball = role.view, role.momentum, role.weight_geometry
    stabiliser, block = placement.stabilisers[0], placement.blocks[0]
    if not cut:
        return HERE, placement
    even = all(slab.size == slabs[0].size for slab in slabs)  # else numbers of several matrices an expert are cut apart
    own = of_any_size(placement)
    if cut == {0} and len(block) == 3 and block == shape and isinstance(view, OneBlock):  # a stack by another name
        return HERE, Placement(replace(own, view=Stack()), placement.why, local)
    if cut == {0} and view.stacked and (block[0] == shape[0] or even):
        return HERE, Placement(own, placement.why, local)
    if isinstance(view, OneBlock):
        columns = block[-1] if len(block) == 3 else 1
        first = next((d for d in range(len(shape) + 1) if math.prod(shape[d:]) == columns), len(shape))
        rows = all(d < first for d in cut) and turned_by_row(role.geometry)
        table = len(block) == 3 and block[0] == 1 and cut == {0}  # a vector is one row
        if rows and momentum.extent <= (Extent.ROW if table else Extent.ENTRY):
            lines = AsRows(columns) if len(block) == 3 else Vector()
            here = Placement(replace(own, view=lines), placement.why, local)
            if stabiliser.extent == Extent.ENTRY:
                return HERE, here
            if stabiliser.extent <= Extent.NORM and -ball.ndim not in ball.couples and block[0] == 1:
                return ROWS, here
    if momentum.extent > Extent.ENTRY:
        return ALL, placement
    reads = isinstance(role.geometry, Adaptive) and any("w" in change.reads for change in role.geometry.changes)
    entrywise = all(scheme.extent == Extent.ENTRY for scheme in placement.stabilisers)
    return (DIRECTION if entrywise and not reads else WEIGHT), placement


def shared(placement: Placement) -> bool:
    """Whether a step takes a matrix sign that copies divide among them, and each can go on from the others' results."""
    return placement.role.geometry.couples == {-2, -1} and not placement.role.owned


def of_any_size(placement: Placement) -> Role:
    """A placement's role with the scale and the radius that it has there, whatever size a part is."""
    scale = Constant(placement.lr_scales[0])
    return replace(placement.role, lr_scale=scale, stabiliser=placement.stabilisers[0], radius_unit=Constant())


@dataclass(frozen=True)
class AsRows(OneBlock):
    """All rows of a part of a table, `(..., columns)` flattened, as one matrix.

    Args:
        columns: entries of a row.
    """

    columns: int

    def block(self, shape: Shape) -> Shape:
        """`(1, rows, columns)`."""
        return (1, math.prod(shape) // max(1, self.columns), self.columns)
