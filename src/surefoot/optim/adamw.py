"""`from_adamw`: a run that AdamW began, continued from its weights, its averages and the length of its steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import singledispatch
from numbers import Real
from statistics import fmean
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from surefoot.conversion import Setting, convert
from surefoot.linalg.device import whole_of, widened
from surefoot.momentum import Adam, RowAdam, State
from surefoot.optim.batching import advance, init_state
from surefoot.optim.optimizer import SteepestDescent
from surefoot.optim.precision import SCALES, Leaf, Precision
from surefoot.plan import Placement, Plan
from surefoot.stabilise import Free, Hyperball, Stabiliser
from surefoot.stabilise.running_bound import RunningBound
from surefoot.step import step
from surefoot.views.state import join_blocks

_KEPT = ("exp_avg", "exp_avg_sq", "step")
_log = logging.getLogger("surefoot")

Histories = Mapping[str, tuple[State, dict[str, Any]]]
"""Parameter name -> AdamW's state and group of it."""


@singledispatch
def from_adamw(
    model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan | None = None, **options: Any
) -> SteepestDescent:
    """Continue a run that `torch.optim.AdamW`, or Adam, began: at any step, with the weights as they are.

    Momentum starts as AdamW's mean gradient, bias-corrected. Tables take the mean of AdamW's squares over each row as
    its history. Parts that stay with Adam keep all their state. Other state of a role starts anew.

    Each role gets its own rate, at which its steps go as far as AdamW's do at their present rate. It is the geometric
    mean, over the role's parameters, of a ratio: AdamW's last update over the plan's step of rate 1 along the same mean
    gradient, each as its Frobenius norm times its reach. Reach is how far steps of length 1 go, per root of their
    number, if gradients are independent: `(c^2 (1 - b)/(1 + b) + (1 - c)^2)^(-1/2)` along an average with memory b and
    look-ahead c, which is 4.4 for AdamW's .9, 1.9 for .9 with .5. One rate for all roles, as for a run from its start,
    would tear tables that began small, as GPT-2's do.

    Call it between two steps, after the scheduler's; the same schedule then goes on, as a factor. Decay and bounds are
    the plan's; weights that a bound would cut at once are logged.

    Args:
        model: the model that AdamW trains, sharded or not.
        optimizer: AdamW over the model's trainable parameters. It is only read, and may be deleted afterwards.
        plan: roles of the parameters; default: `Plan.of(model, run=run)`.
        **options: of `SteepestDescent`: run, precision, lr (one rate for all roles), and so on.

    Returns:
        The optimizer for the rest of the run.

    Raises:
        ValueError: parameters of other models, trainable ones that AdamW lacks, a state that is not AdamW's, groups of
            which only some maximize; or no lr while AdamW has taken no step, or has rate 0 for part of a role.

    >>> model = nn.Linear(4, 4, bias=False)
    >>> adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    >>> model(torch.eye(4)).square().sum().backward()
    >>> adamw.step()
    >>> optimizer = from_adamw(model, adamw)
    >>> torch.allclose(optimizer.state[model.weight]["momentum"], model.weight.grad)
    True
    """
    plan = plan or Plan.of(model, run=options.pop("run", None))
    groups = _checked(model, optimizer)
    options = {"maximize": any(group["maximize"] for group in groups.values()), **options}
    trained: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    histories = {name: (optimizer.state[p], groups[p]) for name, p in trained.items() if optimizer.state.get(p)}
    rates = _rates(plan, trained, histories) if options.get("lr") is None else {}
    _announce_cuts(plan, trained)
    ours = SteepestDescent(model, plan, **{**options, **({"lr": rates[""]} if rates else {})})
    for group in ours.param_groups:
        group["lr"] = rates.get(group["role"], group["lr"])
    return _take_over(ours, plan, trained, histories)


@from_adamw.register(Real)
def _(lr: float, weight_decay: float, d_in: int, d_out: int) -> Setting:  # type: ignore[misc]
    """This name's former meaning."""
    warn('from_adamw of numbers is convert(Setting(lr, wd), "adamw", "natural", ...)', DeprecationWarning, stacklevel=3)
    return convert(Setting(lr, weight_decay), "adamw", "natural", d_in, d_out)


def _checked(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, Any]]:
    """The group of each of AdamW's parameters, which are the model's; ValueError for any other, by name."""
    if isinstance(optimizer, torch.optim.NAdam | torch.optim.RAdam):
        raise ValueError(f"from_adamw reads AdamW or Adam, not {type(optimizer).__name__}: its step length is unknown")
    names = {p: name for name, p in model.named_parameters()}
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    if foreign := [p for p in groups if p not in names]:
        what = f"the optimizer has a parameter of shape {tuple(foreign[0].shape)} that is not the model's"
        remedy = "pass the model it was made from; a wrapper that replaces parameters must come first"
        raise ValueError(f"{what}: {remedy}")
    if late := [name for p, name in names.items() if p.requires_grad and p not in groups]:
        raise ValueError(f"{late[0]} is trainable but not in the optimizer: freeze it, or add it to AdamW first")
    if len({bool(group.get("maximize")) for group in groups.values()}) > 1:
        raise ValueError("the optimizer's groups differ in maximize, and a plan's roles cannot: make them equal")
    for p, group in groups.items():
        state = optimizer.state.get(p) or dict.fromkeys(_KEPT if "betas" in group else ())  # before a first step
        if missing := [key for key in _KEPT if key not in state]:
            remedy = "after another method, keep the weights alone: SteepestDescent(model, plan, lr=...)"
            what = f"{type(optimizer).__name__} keeps no {missing[0]!r} for {names[p]}"
            raise ValueError(f"{what}: from_adamw reads torch.optim.AdamW or Adam; {remedy}")
    return groups


def _take_over(ours: SteepestDescent, plan: Plan, trained: dict[str, Tensor], histories: Histories) -> SteepestDescent:
    """Load what each role keeps of AdamW's state, beside what is new."""
    saved = ours.state_dict()
    for group in saved["param_groups"]:
        for index, name in zip(group["params"], group["param_names"], strict=True):
            if name in histories:
                initial = saved["state"].get(index) or init_state(plan[name], trained[name])
                kept = {key: x for key, x in initial.items() if key not in SCALES.values()}
                saved["state"][index] = kept | _taken(plan[name], *histories[name])
    ours.load_state_dict(saved)
    return ours


def _taken(placement: Placement, old: State, group: Mapping[str, Any]) -> State:
    """What a role keeps of AdamW's means and count, with the bias that its own correction takes away.

    Squares that AdamW has forgotten more slowly than the role does are raised to where its own bound on a step holds.
    """
    momentum, count = getattr(placement.role.momentum, "of", placement.role.momentum), float(old["step"])
    kept = {"step": old["step"].clone()}
    for name, ours, theirs in zip(_KEPT, ("beta1", "beta2"), group["betas"], strict=False):
        bias = 1 - getattr(momentum, ours, 0.0) ** count  # 1 for Momentum, which corrects nothing
        kept[name] = widened(old[name]) * (bias / (1 - float(theirs) ** count))
    least = kept["exp_avg"].square() * (momentum.least(count) if isinstance(momentum, Adam | RowAdam) else 0.0)
    squares = (placement.role.view.split(whole_of(x)) for x in (kept["exp_avg_sq"], least))
    rows = [{"row_sq": x.mean(-1).maximum(y.mean(-1))} for x, y in zip(*squares, strict=True)]
    kept["exp_avg_sq"] = kept["exp_avg_sq"].maximum(least)
    kept |= {"momentum": kept["exp_avg"]} | join_blocks(rows, placement.role.owned)
    return {name: x for name, x in kept.items() if name in placement.role.smoothed}


def _rates(plan: Plan, trained: Mapping[str, Tensor], histories: Histories) -> dict[str, float]:
    """The rate of each role, by name, at which its steps lead as far as AdamW's; of "", that of all its parameters."""
    logs: dict[str, list[float]] = {}
    resting = _resting(plan, histories)
    for name, history in histories.items():
        if ratio := _ratio(plan[name], trained[name], *history):
            for key in ("", plan[name].role.name):
                logs.setdefault(key, []).append(math.log(ratio))
    if not logs:
        remedy = "give lr=..., or call from_adamw after a step, before the schedule has ended"
        raise ValueError(f"AdamW's step length is unknown: it has taken no step, or its rate is 0 now; {remedy}")
    return {role: math.exp(fmean(own)) for role, own in logs.items()} | dict.fromkeys(resting, 0.0)


def _resting(plan: Plan, histories: Histories) -> set[str]:
    """The roles whose rate AdamW has at 0; ValueError for one of which it is for a part."""
    still = {name for name, (_, group) in histories.items() if not float(group["lr"])}
    for name in still if len(still) < len(histories) else ():
        role = plan[name].role.name
        if moving := [other for other in histories.keys() - still if plan[other].role.name == role]:
            what = f"AdamW's rate is 0 for {name} but not for {min(moving)}, both {role}"
            raise ValueError(f"{what}: freeze {name}, or give lr")
    return {plan[name].role.name for name in still}


def _ratio(placement: Placement, weight: Tensor, old: State, group: Mapping[str, Any]) -> float:
    """How far AdamW's steps lead at its present rate, over the plan's of rate 1, in Frobenius norms; 0 for none."""
    old = {name: widened(whole_of(x)) for name, x in old.items()}
    b1, b2 = (1 - float(beta) ** float(old["step"]) for beta in group["betas"])
    mean = old["exp_avg"] / b1
    update = mean / ((old.get("max_exp_avg_sq", old["exp_avg_sq"]) / b2).sqrt() + group["eps"])
    free = placement.with_roles(lambda role: replace(role, stabiliser=Free()))
    moved = torch.zeros_like(mean)
    state = init_state(free, moved) | _taken(free, old, group)
    advance([Leaf(moved, mean, free, state, {"lr": 1.0, "maximize": False})], Precision(), RunningBound(), step)
    length = float(group["lr"]) * float(update.norm()) * _reach(theirs := float(group["betas"][0]))
    momentum = getattr(placement.role.momentum, "of", placement.role.momentum)
    beta = getattr(momentum, "beta", getattr(momentum, "beta1", theirs))
    split, whole = placement.role.view.split, widened(whole_of(weight.detach()))
    blocks = zip(split(moved), split(whole), placement.stabilisers, placement.lr_scales, strict=True)
    ours = math.hypot(*(_length(*block) for block in blocks)) * _reach(beta, getattr(momentum, "lookahead", None))
    return length / ours if ours else 0.0


def _length(moved: Tensor, weight: Tensor, stabiliser: Stabiliser, scale: float) -> float:
    """The Frobenius norm of a step of rate 1; Hyperball's is the weight's own, whatever the direction."""
    if isinstance(stabiliser, Hyperball) and bool(moved.any()):
        return scale * float(weight.norm())
    return float(moved.norm())


def _reach(beta: float, lookahead: float | None = None) -> float:
    """How far steps of length 1 lead, per root of their number, along averages of gradients that are independent."""
    ahead = beta if lookahead is None else lookahead
    return 1 / math.hypot(ahead * math.sqrt((1 - beta) / (1 + beta)), 1 - ahead)


def _announce_cuts(plan: Plan, trained: Mapping[str, Tensor]) -> None:
    """Log, in one line, which weights are longer than the plan's bounds, and the remedy."""
    cut = []
    for name, p in trained.items():
        place = plan[name]
        bounds = [getattr(stabiliser, "radius", None) or math.inf for stabiliser in place.stabilisers]
        if min(bounds) < math.inf:
            blocks = place.role.view.split(widened(whole_of(p.detach())))
            norms = [float(place.role.weight_geometry.norm(x).amax()) if x.numel() else 0.0 for x in blocks]
            over = max(zip(norms, bounds, strict=True), key=lambda pair: pair[0] / pair[1])
            cut += [f"{name} from {over[0]:.3g} to {over[1]:.3g}"] if over[0] > over[1] else []
    if cut:
        _log.warning(f"the first step cuts norms: {', '.join(cut)}; plan.relative_to(model) scales the bounds to them")
