"""Roles: what a parameter is, and therefore its norm, initial value, momentum, scale and stabiliser."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_type_hints

import torch
from torch import Tensor

from surefoot.geometry import RMS, Adaptive, Geometry, HeadRMS, MaxNorm, RowRMS, Spectral
from surefoot.geometry.base import ChangeBounds
from surefoot.identity import key
from surefoot.initialise import AsBuilt, Fill, HeadNormal, Initial, LinearNormal, UnitNormal
from surefoot.momentum import Momentum, Smoothing
from surefoot.scaling import Constant, LogRows, Scale
from surefoot.stabilise import Free, Stabiliser
from surefoot.views import Convolution, Matrix, Rows, Stack, Vector, View


@dataclass(frozen=True, eq=False)
class Role:
    """Everything that one step needs to know about a parameter: a frozen value.

    Two roles are equal if their fields are: tensors are compared by content, objects that are no dataclass by their
    attributes.

    Args:
        name: linear, embedding, head, gain, bias, conv, experts, scalar, or your own.
        geometry: the norm of the step, and of the weight unless `weight_norm` says otherwise.
        view: how the parameter is laid out in blocks.
        initial: its initial value.
        momentum: how gradients are smoothed.
        lr_scale: factor on the group's learning rate, a named function of the block's shape.
        radius_unit: unit of a radius that is given for all roles, likewise.
        stabiliser: what bounds its norm.
        weight_norm: the norm that a radius and the stability numbers are of, if not the step's: a linear weight's
            is RMS -> RMS whatever its steps are.

    Raises:
        ValueError: a part of the wrong kind, such as a direction's change in the stabiliser's place.

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
        """The norm that a stabiliser bounds and the stability numbers are of."""
        norm = self.weight_norm or self.geometry
        return norm.plain if isinstance(norm, Adaptive) else norm

    def step_norm_bound(self, shape: tuple[int, ...], norm: Geometry | None = None) -> float:
        """Upper bound on the norm of a step of rate 1.

        Args:
            shape: of a block, `(n, out, in)` or `(n, size)`.
            norm: default the weight's.

        Returns:
            The bound; inf if there is none.
        """
        sizes = self.momentum.sizes(shape[1:])
        return ChangeBounds.of(self.geometry).direction_norm_bound(norm or self.weight_geometry, shape[1:], sizes)

    @cached_property
    def smoothed(self) -> frozenset[str]:
        """Names of the state's entries that are momentum's; all others are the stabiliser's, or counts."""
        block = torch.zeros(1, 1, 1)
        return frozenset(self.momentum.init_state(block)) | frozenset(self.momentum.init_memory(block))

    @cached_property
    def remembered(self) -> frozenset[str]:
        """Names of the state's entries that are the direction's."""
        return frozenset(self._memory(torch.zeros(1, 1, 1)))

    @cached_property
    def owned(self) -> frozenset[str]:
        """Names of the state's entries that only the process keeps which steps a matrix, where several hold it."""
        changes = self.geometry.changes if isinstance(self.geometry, Adaptive) else ()
        return frozenset(self.momentum.owned).union(*(change.owned for change in changes))

    def init_memory(self, block: Tensor, stabiliser: Stabiliser) -> dict[str, Tensor]:
        """What momentum, direction and stabiliser keep of a block before the first step."""
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

_LINEAR = Role("linear", Spectral(), initial=LinearNormal())
_EMBEDDING = Role("embedding", RowRMS(), initial=UnitNormal())
_HEAD = Role("head", HeadRMS(), initial=HeadNormal(), radius_unit=LogRows())

NATURAL: dict[str, Role] = {
    "linear": _LINEAR,
    "embedding": _EMBEDDING,
    "head": _HEAD,
    "gain": Role("gain", MaxNorm(), view=Vector(), initial=Fill(1.0)),
    "bias": Role("bias", RMS(), view=Vector(), initial=Fill(0.0)),
    "scalar": Role("scalar", MaxNorm(), view=Vector()),
}
"""The role table of the specification: natural scale, no bound. Recipes replace parts of it."""

DERIVED: dict[str, tuple[str, View]] = {
    "conv": ("linear", Convolution()),
    "experts": ("linear", Stack()),
    "router": ("head", Matrix()),
    "positions": ("embedding", Rows()),
    "tied_positions": ("head", Rows()),
}
"""Kinds that take another kind's role in a layout of their own; tied positions are added to a tied table."""


def derive(kind: str, table: dict[str, Role]) -> Role:
    """The role of a kind under a table of roles.

    Args:
        kind: of the table, or of `DERIVED`.
        table: kind -> role.

    Returns:
        The table's role, or the one that it derives from in the kind's own layout.

    Raises:
        ValueError: an unknown kind; the message lists the known ones.

    >>> derive("experts", NATURAL).geometry
    Spectral(method='auto')
    """
    if kind in table:
        return table[kind]
    if kind not in DERIVED:
        raise ValueError(f"unknown role {kind!r}; choose one of {', '.join([*NATURAL, *DERIVED])}, or give a Role")
    base, view = DERIVED[kind]
    role = replace(table[base], name=kind, view=view)
    return replace(role, initial=AsBuilt()) if kind == "positions" else role


def by_name(role: str | Role) -> Role:
    """A role by its name, with natural scale and no bound; a Role passes through."""
    return role if isinstance(role, Role) else derive(role, NATURAL)
