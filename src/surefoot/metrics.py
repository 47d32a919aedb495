"""Stability numbers of parameters, in natural units."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from surefoot.geometry import AsGiven
from surefoot.plan import Placement


@torch.no_grad()
def stability(weight: Tensor, placement: Placement, lr: float) -> dict[str, float]:
    """Bounds on a layer's three stability numbers, from its weight and its step.

    forward and dependency: `max rms(f(x))` and `max rms(f(x1) - f(x2)) / rms(x1 - x2)` over inputs of RMS at most 1 are
    both the norm of a linear layer; a table of rows has dependency at most twice its norm. update: one step of a
    direction of norm 1 changes the output by at most `lr * lr_scale`.

    Args:
        weight: the parameter.
        placement: its place in a plan.
        lr: the present learning rate of its group.

    Returns:
        `norm_lower`, `norm_upper`, `update_upper`: plain numbers, in natural units; update_upper is
        inf for AdamW parts.
    """
    block = placement.role.view.split(weight.detach().to(torch.promote_types(weight.dtype, torch.float32)))
    geometry = placement.role.geometry
    lower, upper, _ = geometry.bounds(block)
    return {
        "norm_lower": float(lower.max()) if lower.numel() else 0.0,
        "norm_upper": float(upper.max()) if upper.numel() else 0.0,
        "update_upper": math.inf if isinstance(geometry, AsGiven) else lr * placement.role.lr_scale(placement.block),
    }
