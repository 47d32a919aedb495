"""Stability numbers of parameters, in natural units."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from surefoot.geometry import HeadRMS
from surefoot.geometry.base import Cache, ChangeBounds, Extent, Geometry, NormBounds, NormEstimates, State
from surefoot.linalg import device
from surefoot.monitor.layer_bounds import loss_bound, spread
from surefoot.plan import Placement
from surefoot.roles import Role
from surefoot.stabilise import WeightDecay
from surefoot.stabilise.base import Known, Stabiliser
from surefoot.views.state import join_blocks, split_by_block

TIGHT = 0.02
"""How far above the lower bound on a norm the upper one is sought, relatively."""

VECTORS, FIRST_ITERATIONS = 4, 4
"""Ritz vectors of a matrix, and the power iterations that give the first ones."""

Report = tuple[list[dict[str, float]], State]
"""A dictionary of numbers per block, and the cache for the next call."""

_BOUNDED = ("forward", "dependency", "update")
_NAMES = [*(f"{number}_{side}" for number in _BOUNDED for side in ("lower", "upper")), "of_bound"]
MAIN = ("forward_lower", "dependency_lower", "update_upper", "of_bound")
"""What `worst` keeps: norm, dependency, the bound on the next step, and the norm over the stabiliser's bound."""


@torch.no_grad()
def stability(weight: Tensor, placement: Placement, lr: float, cache: Cache = None, state: Cache = None) -> Report:
    """Bounds on a layer's three stability numbers, from its weight and its step; a dictionary per block.

    forward: `max rms(f(x))` over inputs of RMS at most 1, the norm of the weight. dependency:
    `max rms(f(x1) - f(x2)) / rms(x1 - x2)`, the norm again for a linear layer and 0 for a bias; of a table, whose
    inputs are discrete, the largest difference of two rows, up to twice the norm. update: the norm of the next step's
    change of the weight, stabiliser included, whatever its gradient, see `Stabiliser.largest_change`; 0 for a gradient
    of zero. of_bound: the norm over the bound to which the stabiliser keeps it or decay brings it; 0 without one.

    An LM head also has loss_forward, bounds on the largest loss (`layer_bounds.loss_bound`); loss_dependency, at most 4
    times the `layer_bounds.spread` of its rows, which a vector added to all rows leaves alone; loss_update, at most
    twice the update, and under weight decay twice the step and what decay takes of the spread.

    Cost: norms with a closed form are computed. For a matrix under the spectral norm, two thin products with the
    cache's vectors give the lower bounds, and one Cholesky factor proves that the upper ones are 2 % above them; where
    it does not, a certificate is computed, which costs about a direction.

    Args:
        weight: the parameter.
        placement: its place in a plan.
        lr: the present learning rate of its group.
        cache: what this function returned for the parameter before.
        state: what the stabiliser keeps for it: a running bound "upper", "vectors".

    Returns:
        `(numbers, cache)`; numbers has `forward_`, `dependency_` and `update_`, each `lower` and `upper`, and
        `of_bound`: plain numbers in natural units, lower bounds to rounding (1e-6). Steps of your own norm have no
        bound on their update: inf. For a weight that is not finite every number is inf.
    """
    blocks = placement.role.view.split(device.widened(weight.detach()))
    if not all(bool(w.isfinite().all()) for w in blocks):  # eigenvalues are not to be had
        return [dict.fromkeys(_NAMES, torch.inf) for w in blocks for _ in range(len(w))], {}
    caches = split_by_block({**(cache or {}), **(state or {})}, placement.blocks)
    parts = zip(blocks, placement.roles, placement.stabilisers, caches, strict=True)
    reports = [_of_block(w, own, stabiliser, lr, known, state or {}) for w, own, stabiliser, known in parts]
    return [numbers for block, _ in reports for numbers in block], join_blocks([new for _, new in reports])


def by_name(name: str, numbers: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """The largest over a parameter's blocks by its name; several blocks also as `name[0]`, ..."""
    largest = {key: max(block[key] for block in numbers) for key in numbers[0]} if numbers else {}
    return {name: largest} | {f"{name}[{i}]": block for i, block in enumerate(numbers) if len(numbers) > 1}


def worst(numbers: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The largest of the main numbers over all parameters, for one line of a log.

    Args:
        numbers: what `SteepestDescent.stability` returned.

    Returns:
        `stability/NAME` -> number, for the names in `MAIN`.

    >>> worst({"a": dict.fromkeys(MAIN, 1.0), "b": dict.fromkeys(MAIN, 2.0)})["stability/of_bound"]
    2.0
    """
    rows = [row for row in numbers.values() if row]  # a parameter without entries has no numbers
    return {f"stability/{name}": max((row[name] for row in rows), default=0.0) for name in MAIN}


@torch.no_grad()
def measured_change(before: Tensor, after: Tensor, placement: Placement) -> float:
    """The largest norm of a parameter's change, over its blocks: what the update number bounds beforehand.

    Args:
        before: the parameter before a step.
        after: the parameter after it.
        placement: its place in a plan.

    Returns:
        In natural units; under a costly norm a Ritz value, at most the norm and within 5 % of it in our tests. inf for
        a change that is not finite.
    """
    largest, role = 0.0, placement.role
    change = (after - before).to(torch.promote_types(after.dtype, torch.float32))
    if not bool(change.isfinite().all()):  # eigenvalues are not to be had
        return torch.inf
    for w in role.view.split(change):
        estimates = NormEstimates.of(role.weight_geometry)
        vectors = estimates.init_vectors(w, VECTORS)
        for _ in range(FIRST_ITERATIONS if vectors and w.numel() else 1):
            norm, vectors = estimates.estimate_norm(w, vectors)
        largest = max(largest, float(norm.max()) if norm.numel() else 0.0)
    return largest


def _of_block(w: Tensor, role: Role, stabiliser: Stabiliser, lr: float, cache: State, kept: State) -> Report:
    """The numbers of each of the n problems of one block, and the cache for the next call."""
    block, geometry = tuple(w.shape), role.weight_geometry
    if not cache.keys() - {"upper"}:
        cache = {**cache, **NormEstimates.of(geometry).init_vectors(w, VECTORS)}
        for _ in range(FIRST_ITERATIONS if w.numel() else 0):
            _, cache = NormEstimates.of(geometry).estimate_norm(w, cache)
    lower, upper, new = NormBounds.of(geometry).bounds(w, cache)
    upper = _tight(w, lower, upper, geometry)
    known = Known(upper, {name: cache[name] for name in kept}, partial(role.step_norm_bound, block))
    eta = lr * role.lr_scale(block)
    nothing = torch.zeros_like(upper)
    change = stabiliser.largest_change(w, eta, geometry, known) if eta > 0 else nothing
    change = torch.where(change.isnan(), torch.inf, change)  # of weights whose squares overflow nothing is known
    dependency = ChangeBounds.of(geometry).lipschitz(w, lower, upper)
    alone = stabiliser.extent == Extent.ENTRY  # decay, and no clip behind it
    decay = stabiliser if isinstance(stabiliser, WeightDecay) and alone else None
    most = role.step_norm_bound(block) / decay.natural(w) if decay else stabiliser.bound
    share = lower / most if 0 < most < math.inf else nothing
    bounds = (lower, upper, *dependency, nothing, change, share)
    rows = torch.stack([_per_block(x, block[0]) for x in bounds], -1).tolist()
    numbers = [dict(zip(_NAMES, row, strict=True)) for row in rows]
    if role.name == "head" and isinstance(geometry, HeadRMS):
        apart = spread(w)
        if eta > 0 and decay:  # one part of all rows: of what they have in common, and of what they differ by
            rounded = torch.finfo(w.dtype).eps * upper  # of the rows, which may be far larger than what they differ by
            change = change.minimum(stabiliser.largest_change(w, eta, geometry, replace(known, upper=apart)) + rounded)
        for own, weight, s, moved in zip(numbers, w, apart.tolist(), change.tolist(), strict=True):
            low, high = loss_bound(weight)
            own |= {"loss_forward_lower": low, "loss_forward_upper": high}
            own |= {"loss_dependency_upper": 4 * s, "loss_update_upper": 2 * moved}
    return numbers, new or {}


def _tight(w: Tensor, lower: Tensor, upper: Tensor, geometry: Geometry) -> Tensor:
    """An upper bound at most 2 % above the lower one where that can be proven, elsewhere at most a certificate."""
    if not geometry.costly or not w.numel():
        return upper
    close = lower * (1 + TIGHT)
    proven = NormBounds.of(geometry).is_below(w, close)
    if not (device.on_cpu(w) and bool(proven.all())):
        close = torch.where(proven, close, NormBounds.of(geometry).certificate(w))
    return torch.minimum(upper, close)


def _per_block(norms: Tensor, blocks: int) -> Tensor:
    """`(blocks,)`: the largest norm of each; 0 of an empty one."""
    return torch.nn.functional.pad(norms.reshape(blocks, norms.numel() // max(1, blocks)), (1, 0)).amax(1)
