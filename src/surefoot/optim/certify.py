"""Norm bounds of loaded weights: reset where they no longer hold, remembered where they do."""

from __future__ import annotations

from surefoot.linalg import device
from surefoot.optim.batching import Batch, Blocks
from surefoot.optim.param_groups import learning_rate
from surefoot.stabilise.running_bound import RunningBound

STEPS = "steps_on_device"
"""Entry of a group on an accelerator, saved with it: a resumed run certifies bounds at the same steps."""


def revalidate(bounds: RunningBound, batch: Batch, blocks: Blocks) -> None:
    """Reset norm bounds that no longer hold of the loaded weights."""
    if "upper" not in blocks.states[0]:
        return
    due = False
    if not device.on_cpu(blocks.weights[0]):
        placement, lr = batch.placement, learning_rate(batch.group)
        pairs = zip(placement.stabilisers, placement.blocks, strict=True)
        period = min(scheme.certificate_period(lr * placement.role.lr_scale(shape)) for scheme, shape in pairs)
        due = batch.group.get(STEPS, 0) % period == 0
    norm = batch.placement.role.weight_geometry
    blocks.states = bounds.revalidate(batch.params, blocks.weights, blocks.states, norm, due)


def record(bounds: RunningBound, batch: Batch, blocks: Blocks) -> None:
    """Remember weights whose norm bounds hold; what was rounded to half precision is another weight."""
    exact = batch.params[0].dtype == batch.dtype or "master" in batch.states[0]
    if "upper" in blocks.states[0] and exact:
        bounds.record(batch.params, blocks.weights)
