"""Parameter groups, each with its role's name and placements, and checks that a saved state fits them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.conversion import SETTINGS, refuse_settings
from surefoot.identity import by_plain_name
from surefoot.linalg import device
from surefoot.momentum import State
from surefoot.optim.precision import Precision, layouts
from surefoot.plan import Placement, Plan, warn_once
from surefoot.roles import Role, by_name
from surefoot.scaling import Run

FORMAT = 3
"""Version of the state dictionary; 2 is still read, but for heads, whose digests were others."""

Group = dict[str, Any]
"""A parameter group, or another dictionary of a saved state."""

Known = Mapping[Tensor, tuple[str, Placement]]
"""The name and the placement of each parameter of an optimizer."""

ROUNDING = 1e-12
"""How far below 0 rounding may take the end of a learning-rate schedule."""

_RESIZED = "resize before making plan and optimizer; use fully_shard, as FullyShardedDataParallel flattens weights"
_NOTHING = "nothing moves: no parameter of the optimizer has a gradient; copy or wrap the model before making it"
_ANEW = "load the model's weights alone and start with a new optimizer"
_THEN = "resume with the version of surefoot that saved it"


def grouped(
    params: nn.Module | Iterable[Any], plan: Plan | None, run: Run | None, others: Mapping[str, object]
) -> tuple[Iterable[Any], dict[Tensor, str], Plan | None]:
    """The groups for torch's constructor: with a plan one per role name, with its placements; else params as given.

    Also returns the names of frozen parameters without a role, which are in no group, and the plan, if any.
    """
    refuse_settings(others.keys())
    if not isinstance(plan, Plan | None):
        raise ValueError(f"plan must be a Plan, such as Plan.of(model, recipe), not {plan!r}")
    if run is not None and (plan is not None or not isinstance(params, nn.Module)):
        raise ValueError("run=... needs a model without a plan: give it to the plan, Plan.of(model, recipe, run=run)")
    if isinstance(params, nn.Module):
        plan = plan or Plan.of(params, run=run)
        every, params = params.named_parameters(remove_duplicate=False), dict(params.named_parameters()).items()
        first = {p: name for name, p in params}
        if tied := [name for name, p in every if name != first[p] and name in plan.placements]:
            raise ValueError(f"{tied[0]} was tied after the plan was made: tie weights first, then Plan.of(model)")
    groups, unplaced = dict[str, Group](), dict[Tensor, str]()
    if plan is None:
        return params, unplaced, None
    for named in params:
        if not (isinstance(named, tuple) and len(named) == 2 and isinstance(named[0], str)):
            raise ValueError("a plan goes by names: pass the model or its named_parameters()")
        name, p = named
        if not p.requires_grad and by_plain_name(plan.placements, name) is None:
            unplaced[p] = name
            continue
        placement = plan[name]
        refuse_shape(p, name, placement)
        group = groups.setdefault(placement.role.name, {"params": [], "role": placement.role.name, "placements": []})
        group["params"].append(named)
        group["placements"].append(placement)
    return list(groups.values()), unplaced, plan


def refuse_shape(p: Tensor, name: str, placement: Placement) -> None:
    """Raise ValueError for a parameter whose shape differs from the plan's."""
    if p.shape != placement.shape:
        raise ValueError(f"{name} has shape {tuple(p.shape)}, but {placement.shape} in the plan: {_RESIZED}")


def refuse_step(groups: list[Group], unplaced: Mapping[Tensor, str], known: Known, precision: Precision) -> None:
    """Raise for rates, settings, shapes, dtypes that no step takes, or a gradient without role; warn of no gradient."""
    for group in groups:
        refuse_rate(group)
        refuse_settings(SETTINGS & group.keys())
        for p in group["params"]:
            if p.grad is not None:
                refuse_shape(p, *known[p])
                precision.check(p, known[p][0])
    if not any(p.grad is not None or device.is_dtensor(p) for group in groups for p in group["params"]):
        warn_once(_NOTHING)  # others may have gradients of a sharded one
    if late := [name for p, name in unplaced.items() if p.grad is not None and p not in known]:
        remedy = f"make the optimizer with Plan.of(model, overrides=[({late[0]!r}, 'linear')])"
        remedy += ", add_param_group it with a role, or freeze it again and set its grad to None"
        raise ValueError(f"{late[0]} has a gradient but no role: it was frozen when the optimizer was made; {remedy}")


def refuse_factors(factors: Mapping[Tensor, Tensor], known: Known) -> None:
    """Raise ValueError for factors of a parameter that is not trained, or of another shape than its own."""
    for p, factor in factors.items():
        if p not in known or not p.requires_grad:
            raise ValueError(f"scale_: this optimizer does not train a parameter of shape {tuple(p.shape)}")
        if factor.shape != p.shape:
            raise ValueError(f"scale_: factors of shape {tuple(factor.shape)} for {known[p][0]}, of {tuple(p.shape)}")


def with_names(params: Any, number: int) -> Any:
    """Name unnamed parameters `group1.0` and so on: torch wants names in every group or in none."""
    if isinstance(params, set):
        return params
    params = [params] if isinstance(params, Tensor) else params
    return [p if isinstance(p, tuple) else (f"group{number}.{i}", p) for i, p in enumerate(params)]


def own_rate(lr: Any) -> Any:
    """A learning rate; a tensor is copied, so that each group has its own."""
    return lr.detach().clone() if isinstance(lr, Tensor) else lr


def learning_rate(group: Mapping[str, Any]) -> float | Tensor:
    """A group's learning rate: a float; for a tensor on an accelerator, a scalar tensor of its own dtype.

    Integers and half precision become float32 there, since their products are rounded. ValueError if it is not one
    real number.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        if lr.is_complex() or lr.dtype == torch.bool:
            raise ValueError(f"Invalid learning rate: {lr}; it must be real, not {lr.dtype}")
        if not device.on_cpu(lr):
            return lr.detach().reshape(()).to(torch.promote_types(lr.dtype, torch.float32))
    return float(lr.detach() if isinstance(lr, Tensor) else lr)


def refuse_rate(group: Mapping[str, Any]) -> None:
    """Raise ValueError for a learning rate that is no number, negative or not finite; an accelerator's is not read."""
    lr = learning_rate(group) if isinstance(group["lr"], Real | Tensor) else -1.0
    if isinstance(lr, float) and not -ROUNDING <= lr < math.inf:
        raise ValueError(f"Invalid learning rate: {group['lr']!r}; if a schedule gave it, has it run past its end?")


def checked_names(group: Group, number: int, known: Known, precision: Precision) -> list[str]:
    """Unique names of a group's parameters: `group1.weight` where another group has a `weight`.

    ValueError for rates, or trained parameters' dtypes, that no step takes; TypeError for other optimizers' settings.
    """
    refuse_settings(SETTINGS & group.keys() if group.get("role") else ())  # the lack of a role is reported first
    taken, names = {name for name, _ in known.values()}, list[str]()
    for i, p in enumerate(group["params"]):
        name = group["param_names"][i] if "param_names" in group else f"group{number}.{i}"
        while name in taken:
            name = f"group{number}.{name}"
        names.append(name)
        taken.add(name)
        if p.requires_grad:
            precision.check(p, name)
    refuse_rate(group)
    if "param_names" in group:
        group["param_names"] = names
    return names


def replaced(groups: list[Group], known: Known, states: Mapping[Tensor, Any]) -> dict[Tensor, Tensor]:
    """Parameters that were written into the groups from outside: new one -> the earlier one of its name.

    ValueError for one without a name, or where the earlier one already has a state.
    """
    new = [(i, p, group) for group in groups for i, p in enumerate(group["params"]) if p not in known]
    before = {name: p for p, (name, _) in known.items()} if new else {}
    found = {}
    for i, p, group in new:
        own = group.get("param_names", [])
        old = before.get(own[i]) if i < len(own) else None  # no name: appended
        if old is None or states.get(old):
            what = f"a group holds a parameter of shape {tuple(p.shape)} unknown to the optimizer"
            remedy = "wrap the model before the first step and make the optimizer from named_parameters()"
            raise ValueError(f"{what}: {remedy}; add a new one with add_param_group")
        found[p] = old
    return found


def place(group: Group, role: str | Role | None, known: Known) -> list[Placement]:
    """Placements of a plain torch group's parameters, which all take the group's role; ValueError without a role.

    A group that was removed from the optimizer, and is added again, whole or in parts, gets its earlier placements.
    """
    before = [known[p][1] for p in group["params"] if p in known]
    alike = len(before) == len(group["params"]) and {placement.role.name for placement in before} == {role}
    if alike and {placement.digest for placement in before} <= {*group.get("plan", ())}:
        return before
    if role is None:
        found = "pass the model instead, to have roles found: SteepestDescent(model, lr=...)"
        raise ValueError(f"a parameter group needs a role, {{'params': [...], 'role': 'linear'}}; or {found}")
    rule, placements = by_name(role), []
    for p in group["params"]:
        try:
            placements.append(Placement(rule, "as given", tuple(p.shape)))
        except ValueError as error:
            raise ValueError(f"role {rule.name!r} cannot take a parameter of shape {tuple(p.shape)}: {error}") from None
    if not before and group.get("plan", now := [placement.digest for placement in placements]) != now:
        remedy = "make the optimizer from the model and that plan, or remove the group's 'plan' to have its role alone"
        raise ValueError(f"a parameter group of role {rule.name!r} is of an optimizer with another plan: {remedy}")
    return placements


def check_saved(saved: Group, present: list[Group], known: Known, new: Callable[[Tensor], State]) -> None:
    """Raise ValueError, naming group or parameter, unless a state dictionary is that of an optimizer like this one.

    Checks each group's format (this or 2), run and plan, and each state's entries; torch counts the groups.

    Args:
        saved: the state dictionary.
        present: the optimizer's parameter groups.
        known: the name and the placement of each parameter.
        new: parameter -> a state with the entries, shapes and dtypes that its own has.
    """
    _check_kinds("", {"state": None, "param_groups": None, **saved})
    parameters: dict[Any, Tensor] = {}
    for index, (theirs, ours) in enumerate(zip(saved["param_groups"], present, strict=False)):
        where = f"parameter group {index} ({ours['role']}) of the checkpoint"
        if (version := theirs.get("format")) not in (2, FORMAT):
            remedy = f"{_THEN}, or {_ANEW}" if version else f"it is another optimizer's; {_ANEW}"
            raise ValueError(f"{where} has format {version}, not SteepestDescent's {FORMAT}: {remedy}")
        _check_kinds(f"'s parameter group {index}", {**ours, "params": None, **theirs})
        refuse_rate({**ours, **theirs})
        if (then := theirs.get("run")) != (now := ours.get("run")):
            remedy = f"make the optimizer with {f'run={then}' if then else 'lr=... alone'}, or {_ANEW}"
            raise ValueError(f"{where} has {then or 'no run'}, the optimizer {now or 'no run'}: {remedy}")
        if (then := len(theirs["params"])) != (now := len(ours["params"])):
            alone = {*theirs.get("param_names", ())} ^ {*ours.get("param_names", ())}
            which = f"; only one of them has {min(alone)}" if alone else ""
            why = f"it is of another model, or of 0.2.0, without frozen parameters; {_ANEW}"
            raise ValueError(f"{where} has {then} parameters, the optimizer has {now}{which}: {why}")
        _refuse_other_plan(theirs, ours, known, saved["state"], where)
        parameters |= zip(theirs["params"], ours["params"], strict=True)
    for index, entries in saved["state"].items() if len(saved["param_groups"]) == len(present) else ():
        if not isinstance(index, int):
            continue  # it is not a parameter's
        if (p := parameters.get(index)) is None:
            raise ValueError(f"the checkpoint has a state of parameter {index!r}, which is in none of its groups")
        if problem := "" if entries == {} else _unfit(entries, new(p), p):
            raise ValueError(f"{known[p][0]}: {problem}; nothing was changed. Load one of this model, or {_ANEW}")


def _refuse_other_plan(theirs: Group, ours: Group, known: Known, states: Mapping[Any, Any], where: str) -> None:
    """Raise ValueError, with the remedy, for a saved parameter of another plan; says so if its shape differs."""
    for p, index, then in zip(ours["params"], theirs["params"], theirs.get("plan", ()), strict=False):
        name, placement = known[p]
        if then != (now := placement.digest):
            averages = [states.get(index, {}).get(key) for key in placement.role.momentum.averages]
            shape = next((tuple(x.shape) for x in averages if isinstance(x, Tensor) and x.shape != p.shape), None)
            what = f"has shape {shape}, here {tuple(p.shape)}" if shape else f"is of another plan ({then}, here {now})"
            made = "the same recipe, overrides, order of parameters and weights in relative_to"
            remedy = _ANEW if shape else f"make the plan as it was ({made}), or {_THEN}"
            raise ValueError(f"{name} in {where} {what}: {remedy}")


def _check_kinds(where: str, entries: Mapping[str, Any]) -> None:
    """Raise ValueError for an entry of a saved dictionary of the wrong type; where says which dictionary."""
    lists = dict.fromkeys(("param_groups", "params", "plan"), list)
    kinds = {"state": dict, "maximize": bool, "steps_on_device": int, **lists}
    for key in kinds.keys() & entries.keys():
        if not isinstance(entries[key], kinds[key]):
            raise ValueError(f"{key!r} of the checkpoint{where} is not a {kinds[key].__name__} but {entries[key]!r}")


def _unfit(entries: Any, new: State, p: Tensor) -> str:
    """What is wrong with a parameter's saved state; empty if it fits."""
    if not isinstance(entries, Mapping):
        return f"its state in the checkpoint is {type(entries).__name__}, not a dictionary"
    needed = layouts(new, entries, p)
    known = {"master": p, "rounds": torch.zeros((), dtype=torch.int64)} | needed
    if missing := needed.keys() - entries.keys():
        return f"the checkpoint lacks {min(missing)!r}"
    for name, x in entries.items():
        like = known.get(name)
        if like is None:
            return f"the checkpoint has an entry {name!r}, which this parameter's role does not keep"
        if not isinstance(x, Tensor):
            return f"{name!r} of the checkpoint is a {type(x).__name__}, not a tensor"
        if x.shape != like.shape:
            return f"{name!r} of the checkpoint has shape {tuple(x.shape)}, not {tuple(like.shape)}"
        if x.layout != like.layout or x.is_meta:
            return f"{name!r} of the checkpoint has no values in memory, but is {x.layout} on {x.device}"
        if x.dtype != like.dtype and not (x.is_floating_point() and like.is_floating_point()):
            return f"{name!r} of the checkpoint has {x.dtype}, not {like.dtype}"
    return ""
