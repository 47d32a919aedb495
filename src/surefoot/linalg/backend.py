"""The choice of the `Ops` by which a batch of matrices is multiplied."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from surefoot.linalg.ops import TORCH, Ops

TRITON_MIN_ROWS = 256
"""Fewest rows for which Triton's kernels are used: three tiles of 128 x 128. Not measured yet: benchmarks/gpu.py."""


def choose_ops(x: Tensor) -> Ops:
    """Triton's symmetric products for large matrices on a GPU, if Triton is installed; otherwise torch's.

    Args:
        x: `(b, m, n)`, m <= n, on the device on which it will be multiplied.

    Returns:
        `TRITON` or `TORCH`.
    """
    if _large_on_a_gpu(x) and _triton_is_installed():
        from surefoot.linalg.triton_ops import TRITON

        return TRITON
    return TORCH


def _large_on_a_gpu(x: Tensor) -> bool:
    return x.is_cuda and x.shape[-2] >= TRITON_MIN_ROWS


_constant: Any = torch.compiler.assume_constant_result
_triton_is_installed: Callable[[], bool] = _constant(lambda: find_spec("triton") is not None)
"""Constant for `torch.compile`, which cannot trace an import."""
