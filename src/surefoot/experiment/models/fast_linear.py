"""Linear layers on a CPU by oneDNN, forward and backward, where it multiplies float32 much faster than torch does."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from surefoot.linalg import onednn_ops
from surefoot.linalg.device import is_plain

LEAST = 1 << 22
"""Multiplications of a layer from which it is faster: 2048 tokens of 64 features to 64, not of 32 to 32."""


def use_onednn(model: nn.Module) -> None:
    """Let a model's `nn.Linear` layers multiply by oneDNN where that is fast (decision 28); the same to rounding.

    What does not fit goes to torch: another device or dtype, autocast, `torch.compile`, `torch.func`, a sharded
    or small weight. Gradients of gradients are refused.

    Args:
        model: its layers' `forward` is replaced; parameters, names and state stay.
    """
    for module in model.modules() if onednn_ops.is_fast("onednn") else ():
        if type(module) is nn.Linear:
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def product(a: Tensor, b: Tensor) -> Tensor:
    """`a b` of two matrices in float32 on a CPU, without a gradient, by what is fast."""
    return onednn_ops.linear(a, b.T) if onednn_ops.is_fast("onednn") and a.dtype == torch.float32 else a @ b


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    if not _fits(x, module.weight):
        return F.linear(x, module.weight, module.bias)
    y: Tensor = _Linear.apply(x, module.weight)  # type: ignore[no-untyped-call]
    return y if module.bias is None else y + module.bias


def _fits(x: Tensor, weight: Tensor) -> bool:
    if x.ndim < 2 or x.numel() * len(weight) < LEAST or not (is_plain(x) and is_plain(weight)):
        return False
    elsewhere = torch.is_autocast_enabled("cpu") or hasattr(weight, "placements")
    return x.dtype == weight.dtype == torch.float32 and not elsewhere


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """`x wᵀ`."""
        ctx.save_for_backward(x, weight)
        return onednn_ops.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """`g w` and `gᵀ x`, over all tokens."""
        x, weight = ctx.saved_tensors
        rows, g = x.flatten(0, -2), gradients[0].flatten(0, -2)
        to_x, to_weight = ctx.needs_input_grad
        return onednn_ops.linear(g, weight.T).view_as(x) if to_x else None, _of_weight(g, rows) if to_weight else None


def _of_weight(g: Tensor, rows: Tensor) -> Tensor:
    """`gᵀ x`; oneDNN copies its transposed first factor, so that is the smaller of the two."""
    return onednn_ops.linear(g.T, rows.T) if g.numel() < rows.numel() else onednn_ops.linear(rows.T, g.T).T
