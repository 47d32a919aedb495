"""Roles: what a parameter is, and therefore its norm, initial value, momentum, scale and stabiliser; `Placement`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_type_hints

import torch
from torch import Tensor

from surefoot.geometry import RMS, Adaptive, Geometry, HeadRMS, Identity, MaxNorm, RowRMS, Spectral
from surefoot.geometry.base import ChangeBounds
from surefoot.identity import digest, key, label
from surefoot.initialise import AsBuilt, Fill, HeadNormal, Initial, LinearNormal, UnitNormal, generator_for
from surefoot.momentum import Momentum, Smoothing
from surefoot.scaling import Constant, LogRows, Scale
from surefoot.stabilise import Free, Stabiliser
from surefoot.views import Convolution, Matrix, Rows, Shape, Stack, Vector, View


@dataclass(frozen=True, eq=False)
class Role:
    """Everything that one step needs to know about a parameter: a frozen value.

    Two roles are equal if their fields are: tensors by content, objects that are not dataclasses by attributes.

    Args:
        name: linear, embedding, head, gain, bias, conv, experts, scalar, or your own.
        geometry: the norm of the step, and of the weight unless `weight_norm` says otherwise.
        view: how the parameter is laid out in blocks.
        initial: its initial value.
        momentum: how gradients are smoothed.
        lr_scale: factor on the group's learning rate, a function of the block's shape.
        radius_unit: unit of the stabiliser's radius, likewise.
        stabiliser: what bounds its norm.
        weight_norm: norm that the radius and the stability numbers refer to; default: `geometry`'s.

    Raises:
        ValueError: a field of the wrong type, such as a direction's change as the stabiliser.

    >>> Role("gain", MaxNorm(), view=Vector()) == Role("gain", MaxNorm(), view=Vector())
    True
    """

    name: str
    geometry: Geometry
    view: View = field(default_factory=Matrix)
    initial: Initial = field(default_factory=AsBuilt)
    momentum: Smoothing = field(default_factory=Momentum)
    lr_scale: Scale = field(default_factory=Constant)
    radius_unit: Scale = field(default_factory=Constant)
    stabiliser: Stabiliser = field(default_factory=Free)
    weight_norm: Geometry | None = None

    def __post_init__(self) -> None:
        for part, kind in _KINDS.items():
            if not isinstance(value := getattr(self, part), kind):
                raise ValueError(f"role {self.name!r}: {part} must be a {Role.__annotations__[part]}, not {value!r}")

    @property
    def weight_geometry(self) -> Geometry:
        """The norm that a stabiliser bounds and the stability numbers report."""
        norm = self.weight_norm or self.geometry
        return norm.plain if isinstance(norm, Adaptive) else norm

    def step_norm_bound(self, shape: tuple[int, ...], norm: Geometry | None = None) -> float:
        """Upper bound, or inf, on the norm (default: the weight's) of a step of rate 1 of a block of this shape."""
        sizes = self.momentum.sizes(shape[1:])
        return ChangeBounds.of(self.geometry).direction_norm_bound(norm or self.weight_geometry, shape[1:], sizes)

    @cached_property
    def shaped(self) -> frozenset[str]:
        """Names of momentum's entries that have the parameter's shape."""
        like = self.momentum.init_state(torch.zeros(2, 3))
        return frozenset(name for name, x in like.items() if x.shape == (2, 3))

    @cached_property
    def smoothed(self) -> frozenset[str]:
        """Names of the momentum's entries in the state; all others are the stabiliser's, or counts."""
        block = torch.zeros(1, 1, 1)
        return frozenset(self.momentum.init_state(block)) | frozenset(self.momentum.init_memory(block))

    @cached_property
    def remembered(self) -> frozenset[str]:
        """Names of the direction's entries in the state."""
        return frozenset(self._memory(torch.zeros(1, 1, 1)))

    @cached_property
    def owned(self) -> frozenset[str]:
        """Names of the state's entries that only the process stepping a matrix keeps, where several hold it."""
        changes = self.geometry.changes if isinstance(self.geometry, Adaptive) else ()
        return frozenset(self.momentum.owned).union(*(change.owned for change in changes))

    def init_memory(self, block: Tensor, stabiliser: Stabiliser) -> dict[str, Tensor]:
        """What momentum, direction and stabiliser keep for a block before the first step."""
        kept = stabiliser.init_state(block, self.geometry, self.weight_geometry)
        return {**self.momentum.init_memory(block), **self._memory(block), **kept}

    def _memory(self, block: Tensor) -> dict[str, Tensor]:
        return self.geometry.init_memory(block) if isinstance(self.geometry, Adaptive) else {}

    @cached_property
    def _key(self) -> Hashable:
        return key(self)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Role) and self._key == other._key)

    def __hash__(self) -> int:
        return hash(self._key)


_KINDS: dict[str, Any] = get_type_hints(Role)

_ROLES = (
    Role("linear", Spectral(), initial=LinearNormal()),
    Role("embedding", RowRMS(), initial=UnitNormal()),
    Role("head", HeadRMS(), initial=HeadNormal(), radius_unit=LogRows()),
    Role("gain", MaxNorm(), view=Vector(), initial=Fill(1.0)),
    Role("bias", RMS(), view=Vector(), initial=Fill(0.0)),
    Role("scalar", MaxNorm(), view=Vector()),
)
NATURAL: dict[str, Role] = {role.name: role for role in _ROLES}
"""The role table of the specification: natural scale, no bound. Recipes replace parts of it."""

DERIVED: dict[str, tuple[str, View | None]] = {
    "conv": ("linear", Convolution()),
    "patches": ("conv", None),
    "experts": ("linear", Stack()),
    "router": ("head", Matrix()),
    "positions": ("embedding", Rows()),
    "tied_positions": ("head", Rows()),
    "last_gain": ("gain", None),
}
"""Kinds that take another's role under their own name and with their own layout, or with None the whole role."""


def derive(kind: str, table: dict[str, Role]) -> Role:
    """The role of a kind under a table of roles.

    Args:
        kind: of the table, or of `DERIVED`.
        table: kind -> role.

    Returns:
        The table's role, or the one that it derives from with the kind's own layout.

    Raises:
        ValueError: an unknown kind; the message lists the known ones.

    >>> derive("experts", NATURAL).geometry
    Spectral(method='auto')
    """
    base, view = DERIVED.get(kind, (kind, Matrix()))
    if kind in table or view is None:
        return table[kind] if kind in table else derive(base, table)
    if kind not in DERIVED and kind not in NATURAL:
        raise ValueError(f"unknown role {kind!r}; choose one of {', '.join([*NATURAL, *DERIVED])}, or give a Role")
    if base not in table:
        raise ValueError(f"the recipe has no role {base!r}: give it a row of that name")
    role = replace(table[base], name=kind, view=view)
    return replace(role, initial=AsBuilt()) if kind == "positions" else role


def by_name(role: str | Role) -> Role:
    """A role by its name, with natural scale and no bound; a Role passes through."""
    return role if isinstance(role, Role) else derive(role, NATURAL)


@dataclass(frozen=True)
class Placement:
    """One parameter's role and the reason for it.

    Args:
        role: the role, or that of the first block where blocks differ; all share its layout, norms and momentum.
        why: the reason, in words.
        shape: of the parameter.
        by_block: the role of each block where they differ in rate, initial values or stabiliser, else empty.
        parts: names of what is fused in the parameter, in order, for a plan's table.

    Raises:
        ValueError: the view does not fit the shape, the geometry does not fit its blocks, or a scale is no number.

    >>> Placement(NATURAL["linear"], "as given", (8, 4)).blocks
    ((1, 8, 4),)
    """

    role: Role
    why: str
    shape: tuple[int, ...]
    by_block: tuple[Role, ...] = ()
    parts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.lr_scales)  # raises where a scale is no positive number
        assert len(self.by_block) in (0, count)
        for geometry in (self.role.geometry, self.role.weight_geometry):
            if not isinstance(geometry, Identity) and len(self.blocks[0]) - 1 != geometry.ndim:
                takes = f"{type(geometry).__name__} takes {('vectors', 'matrices')[geometry.ndim - 1]}, the view"
                raise ValueError(f"{takes} {type(self.role.view).__name__} gives blocks of shape {self.blocks[0]}")

    @cached_property
    def blocks(self) -> tuple[Shape, ...]:
        """The shapes of the blocks that the norm is taken over."""
        return self.role.view.blocks(self.shape)

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        """A role for each block."""
        return self.by_block or (self.role,) * len(self.blocks)

    def with_roles(self, change: Callable[[Role], Role]) -> Placement:
        """The same place with every role changed."""
        return replace(self, role=change(self.role), by_block=tuple(map(change, self.by_block)))

    @cached_property
    def lr_scales(self) -> tuple[float, ...]:
        """The factor on the learning rate for each block."""
        return tuple(Constant(role.lr_scale(x)).value for role, x in zip(self.roles, self.blocks, strict=True))

    @property
    def projections(self) -> tuple[Shape, ...]:
        """`blocks`, before they were cut into heads."""
        return self.role.view.whole.blocks(self.shape)

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits of shape and roles, the same in every process; a checkpoint carries it."""
        return digest((self.shape, self.by_block or self.role))

    @property
    def promise(self) -> str:
        """What holds for the weight's norm, in words; the norm is named where it is not the step's."""
        return _once(map(self._promise, range(len(self.blocks))))

    def _promise(self, i: int) -> str:
        """What holds for a block's norm."""
        name = "norm" if self.role.weight_norm is None else f"{type(self.role.weight_norm).__name__} norm"
        told = self.stabilisers[i].by(self.lr_scales[i])
        return told.describe(name, self.role.step_norm_bound(self.blocks[i]))

    @cached_property
    def stabilisers(self) -> tuple[Stabiliser, ...]:
        """The stabiliser of each block, with its radius in plain numbers."""
        pairs = zip(self.roles, self.blocks, strict=True)
        return tuple(role.stabiliser.scaled(role.radius_unit(block), block) for role, block in pairs)

    @torch.no_grad()
    def fill_(self, parameter: Tensor, name: str, seed: int) -> None:
        """Write the parameter's initial value: that of its role, deterministic in (name, seed)."""
        view, generator = self.role.view, generator_for(name, seed)
        blocks = [block.clone() for block in view.split(parameter)]  # also of strides no view follows
        for role, block in zip(self.roles, blocks, strict=True):
            role.initial.fill_(block, generator)
        parameter.copy_(view.join(blocks, self.shape))

    def rows(self, name: str) -> Iterator[dict[str, str]]:
        """Lines of a plan's table: one, or one per fused part where their roles differ.

        Args:
            name: of the parameter.

        Yields:
            Column -> text.
        """
        count, projections = len(self.blocks), [block[1:] for block in self.projections for _ in range(block[0])]
        if not self.by_block:
            yield self._row(name, range(count), projections)
            return
        parts = self.parts if len(self.parts) == len(projections) else range(len(projections))
        for i, part in enumerate(parts):  # heads of several parts may be one block; the part left whole is the last
            block = count - 1 if i == len(parts) - 1 else min(i, count - 2)
            row = self._row(f"{name}[{part}]", [block], projections[i : i + 1])
            yield {**row, "shape": f"{_sizes(projections[i])} of {row['shape']}"}

    def _row(self, name: str, blocks: Sequence[int], projections: Sequence[Shape]) -> dict[str, str]:
        return {
            "name": name,
            "shape": _sizes(self.shape),
            "layout": label(self.role.view),
            "role": self.role.name,
            "fan in": _once(str(shape[-1]) for shape in projections),
            "fan out": _once(str(shape[0]) if len(shape) > 1 else "-" for shape in projections),
            "norm": label(self.role.geometry),
            "init": _once(self.roles[i].initial.describe(self.blocks[i]) for i in blocks),
            "lr scale": _once(f"{self.lr_scales[i]:.4g}" for i in blocks),
            "promise": _once(map(self._promise, blocks)),
            "why": self.why,
        }


def _sizes(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _once(texts: Iterable[str]) -> str:
    """The texts of a parameter's blocks, equal ones once."""
    return ", ".join(dict.fromkeys(texts))
