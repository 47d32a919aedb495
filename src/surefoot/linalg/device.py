"""Code that must not wait for an accelerator: which tensors may be branched on, and numbers made on the device."""

from __future__ import annotations

import torch
from torch import Tensor


def on_cpu(x: Tensor) -> bool:
    """True if `x` is on the CPU, so that branching on its values needs no device synchronisation.

    >>> on_cpu(torch.zeros(2)), on_cpu(torch.zeros(2, device="meta"))
    (True, False)
    """
    return x.device.type == "cpu"


def may_branch(x: Tensor) -> bool:
    """True if a shortcut may depend on `x`'s values: it is on the CPU and `torch.compile` is not tracing."""
    return on_cpu(x) and not torch.compiler.is_compiling()


def scalar_like(value: float | Tensor, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.as_tensor(value)` on the device of `like`, without a copy from the host, which would synchronise.

    Args:
        value: a number, or a tensor, which is converted.
        like: any tensor on the device wanted.
        dtype: of the result; default: torch's default dtype for a number, its own for a tensor.

    Returns:
        A tensor of shape `()` for a number, of its own shape for a tensor; a number too large for dtype becomes inf.

    >>> scalar_like(0.5, torch.zeros(2), torch.float64)
    tensor(0.5000, dtype=torch.float64)
    """
    if isinstance(value, Tensor) or on_cpu(like):
        return torch.as_tensor(value, dtype=dtype, device=like.device)
    wide = torch.full((), value, dtype=torch.float64, device=like.device)  # directly in dtype it would raise
    return wide.to(dtype or torch.get_default_dtype())
