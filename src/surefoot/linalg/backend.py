"""Which operations a batch of matrices is multiplied by."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from surefoot.linalg.ops import TORCH, Ops

TRITON_LEAST = 256
"""Rows from which Triton's kernels are taken: three tiles of 128 x 128. Not measured yet: benchmarks/gpu.py."""


def choose_ops(x: Tensor) -> Ops:
    """Triton's symmetric products for large matrices on a GPU, where Triton is installed; else torch's.

    Args:
        x: `(b, m, n)`, m <= n, on the device on which it will be multiplied.
    """
    if _large_on_a_gpu(x) and _triton_is_installed():
        from surefoot.linalg.triton_ops import TRITON

        return TRITON
    return TORCH


def _large_on_a_gpu(x: Tensor) -> bool:
    return x.is_cuda and x.shape[-2] >= TRITON_LEAST


_constant: Any = torch.compiler.assume_constant_result
_triton_is_installed: Callable[[], bool] = _constant(lambda: find_spec("triton") is not None)
"""A graph cannot look for modules: it takes the answer."""
