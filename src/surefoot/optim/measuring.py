"""Stability numbers of an optimizer's parameters: each measured once, by a process that has or receives it whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from surefoot.identity import by_plain_name
from surefoot.linalg.device import is_dtensor, whole_of, widened
from surefoot.momentum import State
from surefoot.monitor.weights import by_name, measured_change, stability
from surefoot.optim.batching import by_block, stack_blocks
from surefoot.plan import Placement, Plan
from surefoot.stabilise.running_bound import RunningBound

if TYPE_CHECKING:
    from surefoot.optim.sharding import Sharding

Numbers = dict[str, dict[str, float]]


def report(
    parameters: Mapping[str, tuple[Tensor, Placement, float, State]],
    before: Mapping[str, Tensor],
    bounds: RunningBound,
    vectors: dict[Tensor, State],
    sharding: Sharding | None,
) -> Numbers:
    """The numbers of all parameters; a collective if some are sharded, each of which is gathered on one process.

    Args:
        parameters: name -> parameter, placement, learning rate and state; the next step does not move frozen ones.
        before: weights of some parameters before the last step, by these names or by those without wrapper prefixes;
            other entries are ignored.
        bounds: the optimizer's running bounds.
        vectors: singular vectors, kept here from one report to the next; not part of the state.
        sharding: of the `DTensor` parameters.

    Returns:
        See `SteepestDescent.stability`; the same on every process.

    Raises:
        ValueError: `before` has none of the parameters, or one in another shape.
    """
    before = _by_parameter(before, {name: p for name, (p, *_) in parameters.items()})
    found: dict[str, Numbers] = {}
    for name, (p, placement, lr, state) in parameters.items():
        then = before.get(name)
        kept: State = {key: whole_of(state[key]) for key in ("vectors", "upper") if key in state and p.numel()}
        if sharding and p in sharding.shards and is_dtensor(p):
            if (whole := sharding.at_owner(p, then)) is None:
                continue
            weight, then = whole
        else:
            weight, then = whole_of(p), None if then is None else whole_of(then)
        if "upper" in kept:
            kept["upper"] = _proven(p, weight, placement, kept["upper"], bounds)
        numbers, cache = stability(weight, placement, lr * p.requires_grad, vectors.get(p), kept)
        vectors[p] = {key: x for key, x in cache.items() if key != "upper"}
        found[name] = by_name(name, numbers)
        if then is not None and numbers:
            found[name][name]["update_measured"] = measured_change(then, weight, placement)
    found = sharding.together(found) if sharding else found
    return {key: numbers for name in parameters for key, numbers in found[name].items()}


def of_weights(
    model: nn.Module, plan: Plan, before: Mapping[str, Tensor] | None = None, vectors: dict[Tensor, State] | None = None
) -> Numbers:
    """The numbers of a model's weights under a plan, whatever optimizer trains it: bounds on the next step are 0.

    Args:
        model: not on the meta device.
        plan: of the model.
        before: as in `report`.
        vectors: as in `report`; None where the weights are measured once.

    Returns:
        See `SteepestDescent.stability`.
    """
    parameters = {name: (model.get_parameter(name), place, 0.0, State()) for name, place in plan.placements.items()}
    return report(parameters, before or {}, RunningBound(), {} if vectors is None else vectors, None)


def _by_parameter(before: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`before` under the parameters' own names; it may also hold buffers and frozen parameters."""
    known = {name: w for name in parameters if (w := by_plain_name(before, name)) is not None}
    if before and not known:
        raise ValueError(f"before names no parameter of this optimizer, only {', '.join([*before][:3])}")
    for name, w in known.items():
        if w.shape != (shape := parameters[name].shape):
            raise ValueError(f"before has {name} with shape {tuple(w.shape)}, the parameter has {tuple(shape)}")
    return known


def _proven(p: Tensor, weight: Tensor, placement: Placement, upper: Tensor, bounds: RunningBound) -> Tensor:
    """A parameter's running bound, where it holds for the present weight; for a gathered weight it is proven anew."""
    weights = stack_blocks([widened(weight)], placement.role.view)
    known = by_block([{"upper": upper}], placement, {})
    known = bounds.revalidate([p], weights, known, placement.role.weight_geometry, False)
    return torch.cat([x["upper"][0] for x in known])
