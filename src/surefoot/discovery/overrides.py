"""Overrides: what a user says of parameters, against what was found."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from surefoot.discovery.torch_layers import Kind
from surefoot.recipes import Recipe
from surefoot.roles import Role
from surefoot.stabilise import Stabiliser
from surefoot.views import PerHead

Where = str | nn.Module | Callable[[str, nn.Parameter], bool]
Change = str | Role | Callable[[Role], Role]
Override = tuple[Where, Change]
"""`(where, change)`: where is a name pattern, a module or a test of `(name, parameter)`; change is a role's name, a
`Role`, or a function of the role that was found."""


def per_head(head_dim: int) -> Callable[[Role], Role]:
    """A change for `overrides`: a norm for each head of `head_dim` rows, in whatever layout was found.

    For W_q, W_k, W_v and their biases, fused or not; the heads of the output projection are columns.

    Raises:
        ValueError: no whole number; and of `Plan.of`, where the rows are no whole number of heads.

    >>> from surefoot.plan import Plan
    >>> plan = Plan.of(nn.ModuleDict({"query": nn.Linear(8, 16)}), overrides=[("query.*", per_head(4))])
    >>> [placement.blocks for placement in plan.placements.values()]
    [((4, 4, 8),), ((4, 4),)]
    """
    if type(head_dim) is not int or head_dim < 1:
        raise ValueError(f"head_dim is a positive whole number of rows, not {head_dim!r}")
    return lambda role: replace(role, view=PerHead(head_dim, role.view))


def match(model: nn.Module, overrides: Sequence[Override]) -> dict[str, tuple[Change, str]]:
    """Parameter name -> the change that an override makes, and why; every override must match something."""
    changes: dict[str, tuple[Change, str]] = {}
    for where, change in overrides:
        matched = [name for name, p in model.named_parameters() if p.requires_grad and _matches(model, where, name, p)]
        label = where if isinstance(where, str) else getattr(where, "__name__", type(where).__name__)
        if not matched:
            raise ValueError(f"the override {label!r} matches no trainable parameter")
        for name in matched:
            if name in changes:
                raise ValueError(f"{name} has two overrides: {changes[name][1]} and override {label!r}")
            changes[name] = (change, f"override {label!r}")
    return changes


def _matches(model: nn.Module, where: Where, name: str, parameter: nn.Parameter) -> bool:
    if isinstance(where, str):
        return fnmatch.fnmatchcase(name, where)
    if isinstance(where, nn.Module):
        return any(parameter is p for p in where.parameters())
    return where(name, parameter)


def decide(
    name: str, kind: Kind | None, change: Change | None, recipe: Recipe, stabiliser: Stabiliser | None
) -> Role | None:
    """A parameter's role: the one found, or the override's; None where neither tells one.

    One given in full, or made by a function, keeps its own stabiliser.

    Raises:
        ValueError: a function of the role that was found, where none was; a recipe that has no such role.
    """
    if isinstance(change, Role):
        return change
    if kind is None and callable(change):
        raise ValueError(f"{name}: the override is a function of the role found, but none was; give a name or a Role")
    if isinstance(change, str):
        role = recipe.role(change)
    elif kind is None:
        return None
    else:
        try:
            role = kind.adapt(recipe.role(kind.name))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    role = replace(role, stabiliser=stabiliser) if stabiliser else role
    return change(role) if callable(change) else role
