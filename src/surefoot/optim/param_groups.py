"""Parameters into groups: each with its role's name, and beside it the placement of each parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.identity import by_plain_name
from surefoot.linalg import device
from surefoot.optim.precision import Precision
from surefoot.plan import Placement, Plan
from surefoot.roles import Role, by_name


def grouped(params: nn.Module | Iterable[Any], plan: Plan | None) -> tuple[Iterable[Any], Callable[[], None]]:
    """What torch's constructor takes: the parameters of a model or a plan by role, else the groups as they are.

    And what raises ValueError when a frozen parameter without a role, which is in no group, has a gradient.
    """
    if not isinstance(plan, Plan | None):
        raise ValueError(f"plan is a Plan, as Plan.of(model, recipe) makes one, not {plan!r}")
    if isinstance(params, nn.Module):
        return by_role(params.named_parameters(), plan or Plan.of(params))
    return (params, partial(_refuse_late, {})) if plan is None else by_role(params, plan)


def by_role(named: Iterable[Any], plan: Plan) -> tuple[list[dict[str, Any]], Callable[[], None]]:
    """One group per role name, with each parameter's placement beside it; and what `grouped` returns as well."""
    groups: dict[str, dict[str, Any]] = {}
    unplaced: dict[Tensor, str] = {}
    for entry in named:
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
            raise ValueError("with a plan, pass the model or its named_parameters(): the plan goes by names")
        name, p = entry
        if not p.requires_grad and by_plain_name(plan.placements, name) is None:
            unplaced[p] = name
            continue
        placement = plan[name]
        if tuple(p.shape) != placement.shape:
            raise ValueError(f"{name} has shape {tuple(p.shape)}, the plan has it with {placement.shape}")
        group = groups.setdefault(placement.role.name, {"params": [], "role": placement.role.name, "placements": []})
        group["params"].append(entry)
        group["placements"].append(placement)
    return list(groups.values()), partial(_refuse_late, unplaced)


def _refuse_late(unplaced: Mapping[Tensor, str]) -> None:
    """Raise ValueError for a parameter that was frozen when the optimizer was made, has no role, and a gradient."""
    if late := [name for p, name in unplaced.items() if p.grad is not None]:
        raise ValueError(
            f"{late[0]} was frozen when the optimizer was made, and has a gradient but no role: no rule places it, so "
            f"make the optimizer with Plan.of(model, overrides=[({late[0]!r}, 'linear')]), or another role, or freeze "
            "it again and set its grad to None"
        )


def with_names(params: Any, number: int) -> Any:
    """torch wants names in every group or in none; unnamed parameters get `group1.0` and so on."""
    if isinstance(params, Tensor):
        params = [params]
    if isinstance(params, set):
        return params
    return [p if isinstance(p, tuple) else (f"group{number}.{i}", p) for i, p in enumerate(params)]


def learning_rate(group: Mapping[str, Any]) -> float | Tensor:
    """A group's learning rate as the number that it holds: a float, of a tensor on a device a scalar of its own dtype.

    Integers and half precision become float32 there, since a product in these is rounded. ValueError for what is not
    one real number.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        if lr.is_complex() or lr.dtype == torch.bool:
            raise ValueError(f"Invalid learning rate: {lr}; it is a real number, not {lr.dtype}")
        if not device.on_cpu(lr):
            return lr.detach().reshape(()).to(torch.promote_types(lr.dtype, torch.float32))
    return float(lr.detach() if isinstance(lr, Tensor) else lr)


def checked_names(group: dict[str, Any], number: int, taken: Collection[str], precision: Precision) -> list[str]:
    """The names of a group's parameters, each its own: `group1.weight` where another group has a `weight`.

    Raise ValueError for what no step takes: a learning rate that is negative or not finite (one on a device is not
    read), complex parameters, and dtypes that precision does not store.
    """
    names: list[str] = []
    for i, p in enumerate(group["params"]):
        name = group["param_names"][i] if "param_names" in group else f"group{number}.{i}"
        while name in taken or name in names:
            name = f"group{number}.{name}"
        names.append(name)
        if p.is_complex():
            raise ValueError(f"{name} is complex and has no role; give its real and imaginary parts")
        precision.check(p)
    lr = learning_rate(group)
    if isinstance(lr, float) and not 0 <= lr < math.inf:
        raise ValueError(f"Invalid learning rate: {group['lr']}")
    if "param_names" in group:
        group["param_names"] = names
    return names


def is_dtensor(p: Tensor) -> bool:
    """Whether a parameter is a `DTensor`; torch.distributed is not imported for the question."""
    return hasattr(p, "device_mesh") and hasattr(p, "placements")


def whole_of(x: Tensor) -> Tensor:
    """All of a tensor that may be a `DTensor`; a collective then."""
    if not is_dtensor(x):
        return x
    from surefoot.mesh.groups import gather

    return gather(x)


def replaced(
    groups: list[dict[str, Any]], names: Mapping[Tensor, str], states: Mapping[Tensor, Any]
) -> dict[Tensor, Tensor]:
    """Parameters that somebody has written into the groups: new -> the one of its name before.

    ValueError for one without a name, or whose state is that of other entries.
    """
    new = [(i, p, group) for group in groups for i, p in enumerate(group["params"]) if p not in names]
    before = {name: p for p, name in names.items()} if new else {}
    found = {}
    for i, p, group in new:
        own = group.get("param_names", [])
        old = before.get(own[i]) if i < len(own) else None  # no name: appended
        if old is None or states.get(old):
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} was put into a group after the optimizer was made: "
                "wrap the model before its first step, and make the optimizer from its named_parameters(); "
                "a new parameter needs add_param_group"
            )
        found[p] = old
    return found


def place(params: list[Tensor], role: str | Role | None) -> list[Placement]:
    """The placements of a plain torch group's parameters, which all have its role; ValueError without one."""
    if role is None:
        raise ValueError(
            "a parameter group needs a role, {'params': [...], 'role': 'linear'}; or pass the model itself, "
            "SteepestDescent(model, lr=...), and every role is found"
        )
    rule = by_name(role)
    placements = []
    for p in params:
        try:
            placements.append(Placement(rule, "as given", tuple(p.shape)))
        except ValueError as error:
            raise ValueError(f"role {rule.name!r} cannot take a parameter of shape {tuple(p.shape)}: {error}") from None
    return placements
