"""Batches of like parameters (same shape, dtype, roles and group): stacked, stepped block by block, and written back.

Whole parameters, shards, and matrices at their owner rank all take their step in this way: they are stacked,
`Batch.step` steps each block, and the results are split again.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from surefoot.linalg import device, ops
from surefoot.momentum import State, is_finite
from surefoot.optim.param_groups import learning_rate
from surefoot.optim.precision import ADDED, Leaf, Precision, average
from surefoot.plan import Placement
from surefoot.roles import Role
from surefoot.stabilise import Stabiliser
from surefoot.stabilise.running_bound import RunningBound
from surefoot.step import ELSEWHERE, Step, in_pieces
from surefoot.views import OneBlock, Shape, View
from surefoot.views.state import join_blocks, split_by_block

BATCH_BYTES = {"cpu": 1 << 20}
"""Bytes of like parameters stacked at once, by device type: a share of a CPU's cache; others take `ELSEWHERE`."""

FEWEST_BYTES = 4 << 20
"""Up to this many bytes, `ops.BATCH` matrices are stacked where a smaller stack would be inverted more slowly."""

STEPS = "steps_on_device"
"""Key of a group's step count on an accelerator; saved, so that a resumed run certifies bounds at the same steps."""

Rule = tuple[Role, Stabiliser, float]
"""A block's role, its stabiliser (with the radius as a plain number), and the factor on its learning rate."""

T = TypeVar("T")


@dataclass(eq=False)
class Batch:
    """k like parameters or matrices, as the step takes and returns them: each list has one entry per block of the view.

    Args:
        placement: the role and shape that they share.
        group: their parameter group.
        keys: k tensors that identify them in a `RunningBound`.
        weights: `(k, n, out, in)` or `(k, n, size)`, in the dtype that the step computes in.
        gradients: likewise.
        states: of momentum and stabiliser; each tensor's first dimension is k.
        masks: whether each parameter's gradient is finite, `(k, 1, ...)`, bool; for smoothed gradients the active mask.
        shaped: names of the state entries that have the parameter's shape; others are split by block.
    """

    placement: Placement
    group: dict[str, Any]
    keys: list[Tensor]
    weights: list[Tensor]
    gradients: list[Tensor]
    states: list[State]
    masks: list[Any]
    shaped: frozenset[str]

    def step(self, take: Step, bounds: RunningBound, foreign: bool = False) -> Iterator[tuple[Tensor, State]]:
        """Step each block; the results replace the loaded weights and states.

        Args:
            take: the whole step, or only its last parts.
            bounds: running bounds; reset where they do not hold for the loaded weights.
            foreign: whether the weights come from other processes: an accelerator then certifies bounds at every step.

        Returns:
            Each parameter's weights and state, in the optimizer's shapes.
        """
        lr, own = learning_rate(self.group), rules(self.placement)
        if "upper" in self.states[0]:
            period = min(stabiliser.certificate_period(lr * scale) for _, stabiliser, scale in own)
            due, norm = foreign or self.group.get(STEPS, 0) % period == 0, self.placement.role.weight_geometry
            self.states = bounds.revalidate(self.keys, self.weights, self.states, norm, due)
        for i, (role, stabiliser, scale) in enumerate(own):
            w, g, state = self.weights[i], self.gradients[i], self.states[i]
            self.weights[i], self.states[i] = take(role, stabiliser, w, g, state, lr * scale, self.masks[i])
        if foreign:
            self.record(bounds)
        return self.results()

    def record(self, bounds: RunningBound) -> None:
        """Record these weights as those for which the norm bounds hold."""
        if "upper" in self.states[0]:
            bounds.record(self.keys, self.weights)

    def results(self) -> Iterator[tuple[Tensor, State]]:
        """Each parameter's weights and state, in the optimizer's shapes."""
        view, shape = self.placement.role.view, self.placement.shape
        names = self.shaped & self.states[0].keys()
        shaped = {n: split_blocks([own[n] for own in self.states], view, shape) for n in names}
        for i, w in enumerate(split_blocks(self.weights, view, shape)):
            parts = [{n: x[i] for n, x in own.items() if n not in shaped} for own in self.states]
            yield w, join_blocks(parts, self.placement.role.owned) | {n: x[i] for n, x in shaped.items()}


def rules(placement: Placement) -> list[Rule]:
    """The rule of each block."""
    return list(zip(placement.roles, placement.stabilisers, placement.lr_scales, strict=True))


@torch.no_grad()
def init_state(placement: Placement, w: Tensor) -> State:
    """Optimizer state of weights w before their first step: momentum, stabiliser's memory, count of skipped steps."""
    view, w = placement.role.view, w.detach().to(torch.promote_types(w.dtype, torch.float32))
    state = placement.role.momentum.init_state(torch.zeros_like(w))
    blocks = zip(rules(placement), view.split(w), strict=True)
    memories = [role.init_memory(block, stabiliser) for (role, stabiliser, _), block in blocks]
    state |= join_blocks(memories, placement.role.owned)
    return {**state, "skipped": torch.zeros((), dtype=torch.int32, device=w.device)}


def alike(leaf: Leaf) -> tuple[Any, ...]:
    """Key that is equal for parameters that may be stacked together."""
    value, placement = leaf.value, leaf.placement
    return value.device, placement.shape, placement.roles, value.dtype, leaf.agreed is None, id(leaf.group)


def batches(items: Iterable[T], alike: Callable[[T], Any]) -> Iterator[list[T]]:
    """Group like items, and split each group evenly into batches of about `BATCH_BYTES`.

    Args:
        items: parameters or jobs.
        alike: an item's key, equal for items that may be stacked; it starts with device and shape.

    Yields:
        Batches; groups come in the order of their first items.
    """
    buckets: dict[Any, list[T]] = defaultdict(list)
    for item in items:
        buckets[alike(item)].append(item)
    for (where, shape, *_), bucket in buckets.items():
        size = 4 * max(1, math.prod(shape))
        together = ops.LEAF < min(shape[-2:], default=0) <= ops.UNBLOCKED and ops.BATCH * size <= FEWEST_BYTES
        fewest = ops.BATCH if together else 1
        count = max(fewest, BATCH_BYTES.get(where.type, ELSEWHERE) // size)
        pieces = max(1, min(math.ceil(len(bucket) / count), len(bucket) // fewest))
        for piece in range(pieces):
            yield bucket[len(bucket) * piece // pieces : len(bucket) * (piece + 1) // pieces]


def advance(leaves: Sequence[Leaf], precision: Precision, bounds: RunningBound, take: Step) -> None:
    """Step like parameters whose step needs no other process.

    Args:
        leaves: the parameters.
        precision: the formats in which their weights and state are stored.
        bounds: the optimizer's running bounds.
        take: the step of one block.
    """
    batch = load(leaves, precision)
    with named(leaves[0].name):
        store(batch.step(in_pieces(take), bounds), batch, leaves, precision)
    if leaves[0].value.dtype == batch.weights[0].dtype or "master" in leaves[0].state:  # else the stored one is rounded
        batch.record(bounds)


@contextmanager
def named(name: str) -> Iterator[None]:
    """Prefix a ValueError, such as a user's geometry causes, with the parameter's name if it has one."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}".removeprefix(": ")) from error


def load(leaves: Sequence[Leaf], precision: Precision) -> Batch:
    """Stack like parameters into a `Batch`; a single one is not copied."""
    first, placement = leaves[0], leaves[0].placement
    view, dtype = placement.role.view, torch.promote_types(first.value.dtype, torch.float32)
    weights = stack_blocks([precision.read(leaf) for leaf in leaves], view)
    gradients = stack_blocks([leaf.grad.to(dtype) for leaf in leaves], view)
    if first.group["maximize"]:
        gradients = [-g for g in gradients]
    if first.agreed:
        finite = torch.stack([leaf.agreed.finite for leaf in leaves if leaf.agreed])
    else:
        finite = torch.stack([is_finite(g, placement.role.momentum.squares) for g in gradients]).all(0)
    masks = [finite.reshape(-1, *(1,) * len(block)) for block in placement.blocks]
    shaped = {n: _stacked(leaves, n, dtype) for n in placement.role.shaped & first.state.keys()}
    states = by_block([leaf.state for leaf in leaves], placement, shaped)
    keys = [leaf.value for leaf in leaves]
    return Batch(placement, first.group, keys, weights, gradients, states, masks, frozenset(shaped))


def store(results: Iterable[tuple[Tensor, State]], batch: Batch, leaves: Sequence[Leaf], precision: Precision) -> None:
    """Write stepped weights and states back, rounded as precision says; count the gradients that were not finite."""
    for leaf, (w, new) in zip(leaves, results, strict=True):
        precision.write_state_(leaf, new)
        precision.write_(leaf, w)
    finite = batch.masks[0].flatten()
    if not (leaves[0].agreed or (device.on_cpu(finite) and bool(finite.all()))):
        for leaf, own in zip(leaves, finite, strict=True):
            leaf.state["skipped"] += ~own


def by_block(states: Sequence[State], placement: Placement, shaped: Mapping[str, list[Tensor]]) -> list[State]:
    """The stacked states of each block; shaped holds the ready stacks of entries with the parameter's shape."""
    found = [{name: x[i] for name, x in shaped.items()} for i in range(len(placement.blocks))]
    if rest := states[0].keys() - shaped.keys() - {"skipped", *ADDED}:
        split = [split_by_block({name: state[name] for name in rest}, placement.blocks) for state in states]
        for block, parts in zip(found, zip(*split, strict=True), strict=True):
            block |= {name: stack([part[name] for part in parts]) for name in parts[0]}
    return found


def _stacked(leaves: Sequence[Leaf], name: str, dtype: torch.dtype) -> list[Tensor]:
    """Stack a state entry that has the parameters' shape: one stack per block, in the batch's dtype.

    In one process, entries that own their memory are first moved into one buffer, so that the next step stacks them
    without a copy. In a step where some gradient is missing, the others' entries are copied.
    """
    tensors, placement = [leaf.state[name] for leaf in leaves], leaves[0].placement
    first, size = tensors[0], tensors[0].numel() * tensors[0].element_size()
    kept = not leaves[0].agreed and isinstance(placement.role.view, OneBlock)
    if not kept or first.dtype != dtype or not device.on_cpu(first) or len(tensors) == 1:
        return stack_blocks([average(leaf.state, name, dtype) for leaf in leaves], placement.role.view)
    shape = (len(tensors), *placement.blocks[0])
    storages = {x.untyped_storage().data_ptr() for x in tensors}
    places = [x.data_ptr() - first.data_ptr() for x in tensors]
    if len(storages) == 1 and places == [i * size for i in range(len(tensors))] and first.is_contiguous():
        return [first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride())).reshape(shape)]
    together = torch.stack(tensors)
    if all(x.untyped_storage().nbytes() == size for x in tensors):
        for leaf, x in zip(leaves, together.unbind(), strict=True):
            leaf.state[name] = x
    return [together.reshape(shape)]


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors to `(k, ...)`; a single one is not copied."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))


def stack_blocks(tensors: Sequence[Tensor], view: View) -> list[Tensor]:
    """Split like parameters into blocks and stack these: one `(k, n, out, in)` per block."""
    if isinstance(view, OneBlock):  # reshaping the stack reshapes each
        return [stack(tensors).reshape(len(tensors), *view.block(tuple(tensors[0].shape)))]
    return [stack(blocks) for blocks in zip(*map(view.split, tensors), strict=True)]


def split_blocks(stacks: list[Tensor], view: View, shape: Shape) -> list[Tensor]:
    """Join the parameters, of this shape, from their blocks' stacks: the inverse of `stack_blocks`."""
    if isinstance(view, OneBlock):
        return list(stacks[0].reshape(len(stacks[0]), *shape).unbind())
    return [view.join(blocks, shape) for blocks in zip(*(x.unbind() for x in stacks), strict=True)]


def own_memory(state: Any) -> Any:
    """A parameter's state, with tensors that share a larger storage cloned into their own; anything else as it is."""

    def is_part(x: Any) -> bool:
        return isinstance(x, Tensor) and not device.is_dtensor(x) and x.untyped_storage().nbytes() > x.nbytes

    return {n: x.clone() if is_part(x) else x for n, x in state.items()} if isinstance(state, dict) else state


def own_memories(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """The state dictionary of an optimizer, before other hooks change it, with every state in its own memory."""
    return {**saved, "state": {key: own_memory(state) for key, state in saved["state"].items()}}
