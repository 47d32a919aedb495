"""`Recipe`: a role for each kind of parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from surefoot.momentum import Smoothing
from surefoot.recipes.rules import DepthRule, HorizonRule
from surefoot.roles import NATURAL, Role, derive
from surefoot.scaling import LAWS, Run


@dataclass(frozen=True)
class Recipe:
    """A role for each kind of parameter. Initial values are the natural ones, whatever the step's norm.

    Args:
        name: for tables and records.
        table: kind -> Role; missing kinds derive from these (conv and experts from linear).
        depth: changes rates and initial values of weights that write into a residual stream; None: no change.
        horizon: changes decay by the run's length, in `over`; None: no change.

    >>> Recipe("mine", {"linear": NATURAL["linear"]}).role("experts").name
    'experts'
    """

    name: str
    table: Mapping[str, Role]
    depth: DepthRule | None = None
    horizon: HorizonRule | None = None

    def over(self, steps: Run | int) -> Recipe:
        """The recipe for a run of this length: its decay follows `horizon`, all else stays.

        Args:
            steps: the run, or its number of optimizer steps.

        Returns:
            A recipe that `over` changes no more; this one if `horizon` is None.

        Raises:
            ValueError: `horizon` is a rule, and steps is no positive whole number.

        >>> from surefoot.recipes import steady
        >>> steady().over(4000).role("linear").stabiliser.rate
        0.008
        """
        if self.horizon is None:
            return self
        count = steps.steps if isinstance(steps, Run) else steps
        table = {kind: self.horizon.of(role, count) for kind, role in self.table.items()}
        return replace(self, table=table, horizon=None)

    def rate(self, run: Run) -> float:
        """The peak learning rate for a run of this length under `Run.schedule`, at every width and depth.

        Args:
            run: the run.

        Returns:
            The rate, in natural units.

        Raises:
            ValueError: this recipe has no rate law.

        >>> from surefoot.recipes import steady
        >>> round(steady().rate(Run(steps=600, tokens=4096)), 3)
        0.107
        """
        if self.name not in LAWS:
            known = f"a sweep finds the rate (surefoot transfer), or take one of {', '.join(LAWS)}"
            raise ValueError(f"recipe {self.name} has no law for its learning rate: give lr=...; {known}")
        return LAWS[self.name](run)

    def role(self, kind: str) -> Role:
        """The role of a kind; ValueError if there is none."""
        return derive(kind, dict(self.table))


def build(name: str, momentum: Smoothing, **changes: Mapping[str, object]) -> Recipe:
    """The natural role table with one momentum, and fields of some roles replaced.

    A role whose geometry is replaced keeps its natural norm as the weight's.

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
