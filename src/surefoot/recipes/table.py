"""`Recipe`: a role for each kind of parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from surefoot.momentum import Smoothing
from surefoot.recipes.depth import DepthRule
from surefoot.roles import NATURAL, Role, derive


@dataclass(frozen=True)
class Recipe:
    """A role for each kind of parameter. Initial values are the natural ones, whatever the increment's norm.

    Args:
        name: for tables and records.
        table: kind -> Role; kinds that are missing derive from these (conv and experts from linear).
        depth: rate and initial values of what writes into a residual stream; None: those of its role.

    >>> Recipe("mine", {"linear": NATURAL["linear"]}).role("experts").name
    'experts'
    """

    name: str
    table: Mapping[str, Role]
    depth: DepthRule | None = None

    def role(self, kind: str) -> Role:
        """The role of a kind; ValueError if there is none."""
        return derive(kind, dict(self.table))


def build(name: str, momentum: Smoothing, **changes: Mapping[str, object]) -> Recipe:
    """The natural role table with one momentum, and fields of some roles replaced.

    A role whose step's norm is replaced keeps its natural norm as the weight's.

    Args:
        name: of the recipe.
        momentum: of every role.
        **changes: kind -> field -> value.

    Returns:
        The recipe.

    >>> from surefoot.momentum import Momentum
    >>> build("mine", Momentum(0.9), bias={"name": "offset"}).role("bias").name
    'offset'
    """
    table = {kind: replace(role, momentum=momentum) for kind, role in NATURAL.items()}
    for kind, change in changes.items():
        natural = table[kind].geometry
        table[kind] = replace(table[kind], **change)  # type: ignore[arg-type]
        if table[kind].geometry != natural:
            table[kind] = replace(table[kind], weight_norm=natural)
    return Recipe(name, table)
