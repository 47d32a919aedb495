"""Linear layers on a CPU by the fastest products, forward and backward: float32 by oneDNN, or bfloat16 if asked for.

Only products are in bfloat16 then. Under `torch.autocast` attention would be, too, whose backward pass takes a CPU
several times as long as in float32.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from surefoot.experiment.models.decoder import Decoder
from surefoot.experiment.models.layers import MLP
from surefoot.linalg import onednn_ops
from surefoot.linalg.device import is_plain

LEAST = {torch.float32: 1 << 22, torch.bfloat16: 1 << 24}
"""Multiplications of a layer from which oneDNN, and bfloat16, are faster: 2048 tokens of 64 features to 64, and of 64
to 256."""


def use_onednn(model: nn.Module) -> None:
    """Let a model's `nn.Linear` layers multiply by oneDNN where that is fast (decision 28); the same to rounding.

    Torch computes what does not fit: another device or dtype, autocast, `torch.compile`, `torch.func`, a sharded
    or small weight. Gradients of gradients are refused.

    Args:
        model: its layers' `forward` is replaced; parameters, names and state stay.
    """
    if onednn_ops.is_fast("onednn"):
        _replace(model, torch.float32)


def use_bfloat16(model: nn.Module) -> bool:
    """Let large linear layers (`LEAST`) of a decoder on a CPU multiply in bfloat16, and all else compute in float32.

    Activations between the two layers of `MLP` stay as the products round them, which changes no number.

    Args:
        model: its layers' `forward` is replaced.

    Returns:
        False, and nothing is changed, where other layers multiply by weight matrices, too (experts, a user's own), or
        where the model is compiled or sharded: those need `torch.autocast`.
    """
    others = (m for m in model.modules() if type(m) not in (nn.Linear, nn.Embedding))
    weights = [p for m in others for p in m.parameters(recurse=False) if p.ndim > 1]
    whole = all(p.device.type == "cpu" and is_plain(p) and not hasattr(p, "placements") for p in model.parameters())
    if not isinstance(model, Decoder) or weights or not whole or model._compiled_call_impl is not None:
        return False
    _replace(model, torch.bfloat16)
    return True


def dtype_of(layer: nn.Module) -> torch.dtype:
    """The dtype of a layer's products."""
    dtype: torch.dtype = getattr(layer.forward, "keywords", {}).get("dtype", torch.float32)
    return dtype


def product(a: Tensor, b: Tensor) -> Tensor:
    """`a b` of two matrices on a CPU, without a gradient, in their dtype by what is fast."""
    return onednn_ops.linear(a, b.T) if a.dtype == torch.float32 and onednn_ops.is_fast("onednn") else a @ b


def _replace(model: nn.Module, dtype: torch.dtype) -> None:
    short = {module.up for module in model.modules() if type(module) is MLP}
    for module in model.modules():
        if type(module) is nn.Linear:
            out = dtype if module in short else torch.float32
            module.forward = partial(_forward, module, dtype=dtype, out=out)  # type: ignore[method-assign]


def _forward(module: nn.Linear, x: Tensor, dtype: torch.dtype, out: torch.dtype) -> Tensor:
    if not _fits(x, module.weight, dtype):
        return F.linear(x, module.weight, module.bias)
    y: Tensor = _Linear.apply(x, module.weight, dtype, out)  # type: ignore[no-untyped-call]
    return y if module.bias is None else y + module.bias


def _fits(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    if x.ndim < 2 or not (is_plain(x) and is_plain(weight)):
        return False
    small = x.numel() * len(weight) < LEAST[dtype]
    elsewhere = torch.is_autocast_enabled("cpu") or hasattr(weight, "placements")
    return x.dtype in (torch.float32, dtype) and weight.dtype == torch.float32 and not elsewhere and not small


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype, out: torch.dtype) -> Tensor:
        """`x wᵀ` of factors in a dtype, returned in another."""
        ctx.dtypes = x.dtype, weight.dtype
        x, weight = x.to(dtype), weight.to(dtype)
        ctx.save_for_backward(x, weight)
        return product(x.flatten(0, -2), weight.T).view(*x.shape[:-1], len(weight)).to(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """`g w` and `gᵀ x`, over all tokens."""
        x, weight = ctx.saved_tensors
        rows, g = x.flatten(0, -2), gradients[0].flatten(0, -2).to(x.dtype)
        to_x, to_weight, *_ = ctx.needs_input_grad
        of_x, of_weight = ctx.dtypes
        return (
            product(g, weight).view_as(x).to(of_x) if to_x else None,
            _of_weight(g, rows).to(of_weight) if to_weight else None,
            None,
            None,
        )


def _of_weight(g: Tensor, rows: Tensor) -> Tensor:
    """`gᵀ x`; oneDNN copies its transposed first factor, so that is the smaller of the two."""
    return product(g.T, rows) if g.numel() < rows.numel() else product(rows.T, g).T
