"""The stability numbers of an optimizer's parameters: each measured once, by the process that has it or is sent it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from surefoot.identity import by_plain_name
from surefoot.linalg.device import widened
from surefoot.momentum import State
from surefoot.monitor.weights import by_name, measured_change, stability
from surefoot.optim.batching import by_block, stack_blocks
from surefoot.optim.param_groups import is_dtensor, whole_of
from surefoot.plan import Placement, Plan
from surefoot.stabilise.running_bound import RunningBound
from surefoot.views.state import join_blocks

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
    """The numbers of all parameters, with sharded ones a collective: each is sent whole to one process.

    Args:
        parameters: by name, each with its placement, learning rate and state; the next step leaves frozen ones.
        before: weights before the last step, of some of them, by these names or without what wrappers add; others
            are left out.
        bounds: the optimizer's running bounds.
        vectors: singular vectors, remembered here from one time to the next; they are no part of the state.
        sharding: of those that are `DTensor`.

    Returns:
        See `SteepestDescent.stability`; the same on every process.

    Raises:
        ValueError: weights before of which none is one of the parameters, or one has another shape.
    """
    before = _by_parameter(before, {name: p for name, (p, *_) in parameters.items()})
    found: dict[str, Numbers] = {}
    for name, (p, placement, lr, state) in parameters.items():
        then = before.get(name)
        if sharding and p in sharding.shards and is_dtensor(p):
            if (whole := sharding.at_owner(p, then)) is None:
                continue
            weight, kept, then = whole
        else:
            weight, kept = whole_of(p), _kept_norms(p, placement, state, bounds)
            then = None if then is None else whole_of(then)
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
    """The numbers of a model's weights under a plan, whatever optimizer trains it: what bounds the next step is 0.

    Args:
        model: not on the meta device.
        plan: of the model.
        before: as in `report`.
        vectors: as in `report`; None where the weights are measured once.

    Returns:
        See `SteepestDescent.stability`.
    """
    parameters: dict[str, tuple[Tensor, Placement, float, State]] = {
        name: (model.get_parameter(name), placement, 0.0, {}) for name, placement in plan.placements.items()
    }
    return report(parameters, before or {}, RunningBound(), {} if vectors is None else vectors, None)


def _by_parameter(before: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights before by the parameters' own names; buffers and frozen parameters may be among them."""
    known = {name: w for name in parameters if (w := by_plain_name(before, name)) is not None}
    if before and not known:
        raise ValueError(f"before has no parameter of this optimizer, but {', '.join([*before][:3])}")
    for name, w in known.items():
        if w.shape != (shape := parameters[name].shape):
            raise ValueError(f"before has {name} with shape {tuple(w.shape)}, the parameter has {tuple(shape)}")
    return known


def _kept_norms(p: Tensor, placement: Placement, state: State, bounds: RunningBound) -> State:
    """What the stabiliser keeps of a norm: singular-vector estimates and a revalidated upper bound."""
    cache: State = {name: state[name] for name in ("vectors", "upper") if name in state and p.numel()}
    if "upper" in cache:
        weights = stack_blocks([widened(p)], placement.role.view)
        known = by_block([{"upper": cache["upper"]}], placement, {})
        known = bounds.revalidate([p], weights, known, placement.role.weight_geometry, False)
        cache |= join_blocks([{"upper": x["upper"][0]} for x in known])
    return cache
