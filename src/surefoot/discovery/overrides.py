"""Overrides: changes that a user makes to the roles that discovery gives parameters."""

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from surefoot.discovery.kinds import Change, Kind, Kinds, Search
from surefoot.identity import plain_name
from surefoot.recipes import Recipe
from surefoot.recipes.rules import Branches
from surefoot.roles import Placement, Role
from surefoot.stabilise import Stabiliser
from surefoot.views import Matrix, PerHead, Transposed

Where = str | nn.Module | Callable[[str, nn.Parameter], bool]
Override = tuple[Where, Change]
"""`(where, change)`: where is a name pattern, a module or a predicate of `(name, parameter)`; change is a role's name
(the recipe's role, without a layout, heads or branches that were found), a `Role`, or a function from the role that
all rules together give to another. The function is applied to the role of each block where they differ; if it changes
the layout, the first block's role then holds for all. No rule follows, and no other parameter's role changes, except
those of tables that are added to a tied table: they follow its name."""

_CHANGES = "a role's name, a Role, or a function of the role found: `lambda role: replace(role, stabiliser=...)`"


def per_head(head_dim: int) -> Callable[[Role], Role]:
    """Change for the `overrides` of `Plan.of`: one norm per head, within the discovered layout.

    For W_q, W_k, W_v and their biases, fused or not. Not for the output projection, whose heads are columns.

    Args:
        head_dim: number of rows of a head.

    Returns:
        A function from a role to the same role with its view cut into heads.

    Raises:
        ValueError: head_dim is no positive whole number. `Plan.of` raises it where the number of rows is no multiple of
            head_dim.

    >>> from surefoot.plan import Plan
    >>> plan = Plan.of(nn.ModuleDict({"query": nn.Linear(8, 16)}), overrides=[("query.*", per_head(4))])
    >>> [placement.blocks for placement in plan.placements.values()]
    [((4, 4, 8),), ((4, 4),)]
    """
    if type(head_dim) is not int or head_dim < 1:
        raise ValueError(f"head_dim must be a positive integer, not {head_dim!r}")
    return lambda role: replace(role, view=PerHead(head_dim, role.view.whole))


def match(model: nn.Module, overrides: Sequence[Override]) -> dict[str, tuple[Change, str]]:
    """Match overrides with the parameters of a model.

    Args:
        model: any module.
        overrides: pairs `(where, change)`, see `Override`.

    Returns:
        Parameter name -> (change, reason), for the parameters that an override matches.

    Raises:
        ValueError: an override that is no such pair or matches no parameter, a parameter that two match.
    """
    changes, first = dict[str, tuple[Change, str]](), {p: name for name, p in model.named_parameters()}
    every = [*model.named_parameters(remove_duplicate=False)]  # a tied one by each of its names
    for override in overrides:
        where, change = override if isinstance(override, tuple | list) and len(override) == 2 else (None, None)
        if not (isinstance(where, str) or callable(where)):
            wanted = "overrides must be pairs (where, change), as [('weight', 'linear')], with where"
            raise ValueError(f"{wanted} a pattern, a module or a function of (name, parameter), not {override!r}")
        label = where if isinstance(where, str) else getattr(where, "__name__", type(where).__name__)
        if isinstance(change, type) or not (isinstance(change, str | Role) or callable(change)):
            raise ValueError(f"the override {label!r} cannot be {change!r}: give {_CHANGES}")
        matched = dict.fromkeys(first[p] for name, p in every if _matches(where, name, p))
        if not matched:
            raise ValueError(f"the override {label!r} matches no parameter")
        for name in matched:
            if name in changes:
                raise ValueError(f"{name} has two overrides: {changes[name][1]} and override {label!r}")
            changes[name] = (change, f"override {label!r}")
    return changes


def _matches(where: Where, name: str, parameter: nn.Parameter) -> bool:
    if isinstance(where, nn.Module):
        return any(parameter is p for p in where.parameters())
    if isinstance(where, str):
        return any(fnmatch.fnmatchcase(one, where) for one in (name, plain_name(name)))
    return where(name, parameter)


def overrides(search: Search, kinds: Kinds) -> Kinds:
    """Apply overrides to the kinds: a named kind, `given` for a Role, for a function the found kind with its reason."""
    found = dict(kinds)
    tables = {tuple(p.shape) for name, p in search.parameters.items() if search.said(name) == "embedding"}
    tables |= {(m.num_embeddings, m.embedding_dim) for m in search.own if isinstance(m, nn.Embedding)}
    for name, override in search.changes.items():
        kind, said, why = kinds.get(name), search.said(name), override[1]
        if said and name in kinds:
            shape = tuple(search.parameters[name].shape)
            turned = said == "head" and shape[::-1] in tables - {shape}  # (d, V), beside a table (V, d)
            view = Transposed(Matrix()) if turned else None
            # a kernel that is named one keeps its groups
            new = kind if kind and {kind.name, said} <= {"conv", "patches"} else Kind(said, why, view)
            found[name] = replace(new, name=said, why=f"{why}, stored (in, out)" if turned else why, override=override)
        elif kind:
            found[name] = replace(kind, why=f"{why}, a function of what was found: {kind.why}", override=override)
        elif name in kinds and search.parameters[name].requires_grad:
            raise ValueError(f"{name}: no role was found for the override's function; give a role's name or a Role")
    return found


def decide(name: str, parameter: nn.Parameter, kind: Kind, recipe: Recipe, stabiliser: Stabiliser | None) -> Placement:
    """Place a parameter by its kind and the kind's override.

    Args:
        name: the parameter's name, for error messages.
        parameter: the parameter.
        kind: the discovered kind, or that of an override.
        recipe: role table.
        stabiliser: replaces the role's, except in a `Role` given by an override; an override's function comes after.

    Returns:
        Its role, another one for values fused with queries and keys, and the reason.

    Raises:
        ValueError: an override that is a function and returns no role; a role that the recipe lacks, or that does not
            fit the parameter.
    """
    change, label = kind.override or (None, "")
    if isinstance(change, Role):
        return _placed(name, parameter, [change], kind.why)
    why, parts = kind.why, kind.heads.parts if kind.heads else ()
    try:
        roles = [kind.adapt(recipe.role(kind.name))]
        if kind.heads and kind.heads.dim and "heads" in recipe.table:
            why += f"; {kind.heads}"
            roles = _in_heads(kind.adapt(recipe.table["heads"]), roles[0], kind.heads.dim)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if kind.branches and recipe.depth and not isinstance(change, Branches):
        roles = [recipe.depth.of(kind.branches)(role) for role in roles]
    if stabiliser:
        roles = [replace(role, stabiliser=stabiliser) for role in roles]
    if callable(change):
        before, roles = roles[0].view, [change(role) for role in roles]
        if wrong := [each for each in roles if not isinstance(each, Role)]:
            raise ValueError(f"{name}: the function of {label} returned {wrong[0]!r}: give {_CHANGES}")
        roles = roles if roles[0].view == before else roles[:1]  # in a new layout the first holds for all
    return _placed(name, parameter, roles, why, parts)


def _placed(name: str, parameter: nn.Parameter, roles: list[Role], why: str, parts: tuple[str, ...] = ()) -> Placement:
    """The placement under one role, or under one for queries and keys and another for values fused with them."""
    try:
        why = why if parameter.requires_grad else f"frozen; {why}"
        placement = Placement(roles[0], why, tuple(parameter.shape), parts=parts)
    except ValueError as error:
        raise ValueError(f"{name} cannot be {roles[0].name}: {error}") from None
    if roles[0] == roles[-1] or sum(block[0] for block in placement.projections) == 1:
        return placement
    return replace(placement, by_block=(*roles[:1] * (len(placement.blocks) - 1), roles[-1]))


def _in_heads(role: Role, linear: Role, dim: int) -> list[Role]:
    """The role of queries and keys, and one for values fused with them, which start and move as a linear layer."""
    role = replace(role, view=PerHead(dim, role.view, values=False))
    own = {name: getattr(linear, name) for name in ("lr_scale", "radius_unit", "initial", "stabiliser")}
    return [role, replace(role, **own)]
