"""`Recipe`: a role for each kind of parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from surefoot.momentum import Smoothing
from surefoot.recipes.rules import DepthRule, HorizonRule
from surefoot.roles import NATURAL, Role, derive


@dataclass(frozen=True)
class Recipe:
    """A role for each kind of parameter. Initial values are the natural ones, whatever the increment's norm.

    Args:
        name: for tables and records.
        table: kind -> Role; kinds that are missing derive from these (conv and experts from linear).
        depth: rate and initial values of what writes into a residual stream; None: those of its role.
        horizon: decay by the length of the run, for `over`; None: the same for all.

    >>> Recipe("mine", {"linear": NATURAL["linear"]}).role("experts").name
    'experts'
    """

    name: str
    table: Mapping[str, Role]
    depth: DepthRule | None = None
    horizon: HorizonRule | None = None

    def over(self, steps: int) -> Recipe:
        """The recipe for a run of so many optimizer steps: its decay follows `horizon`, all else stays.

        Args:
            steps: number of optimizer steps of the whole run.

        Returns:
            A recipe that `over` changes no more; this one where it has no rule.

        Raises:
            ValueError: there is a rule, and steps is no positive whole number.

        >>> from surefoot.recipes import steady
        >>> steady().over(4000).role("linear").stabiliser.rate
        0.008
        """
        if self.horizon is None:
            return self
        table = {kind: self.horizon.of(role, steps) for kind, role in self.table.items()}
        return replace(self, table=table, horizon=None)

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
