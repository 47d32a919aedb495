"""The fastest matrix products on a CPU: float32 by oneDNN in place of the library behind `torch.bmm`, or bfloat16.

torch sends float32 products to MKL, which takes its AVX2 kernels on processors of other makers; oneDNN, which torch
also ships, takes AVX-512 where there is any: 2.3 times as fast on an AMD EPYC of the fifth generation. Products in
bfloat16 are faster still where the processor has units for them, and four times slower where they are emulated. Only
timing can tell which (`ONEDNN_MAX_CPU_ISA` hides units from oneDNN), so each is timed once per process.
"""

import os
import time
from functools import cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from surefoot.linalg.device import full_precision
from surefoot.linalg.ops import Multiply, Ops

VARIABLE = "SUREFOOT_CPU_PRODUCTS"
"""Environment variable: a comma-separated list of `torch`, `onednn`, `bfloat16` says what is fast; without it, or if it
is `auto`, timing does."""

RATIO = 0.75
"""Time over that of `torch.bmm` in float32 up to which another product is taken: far from what was seen (.25, .45;
.9 and more), so that the next process decides alike, and a resumed run goes on to the last bit."""

MIN_ROWS, BFLOAT16_MIN_ROWS = 128, 192
"""Fewest rows for which they are faster: below, the calls cost as much as the products."""

LAPACK_ROWS = 384
"""Most rows that LAPACK inverts as fast as oneDNN's products do."""


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x wᵀ` in float32 on a CPU, by the operation that `torch.compile` calls for a linear layer; it has no gradient.

    Args:
        x: `(..., k)`.
        weight: `(n, k)`; it or its transpose is contiguous, gaps between rows make it many times slower.

    Returns:
        `(..., n)`.
    """
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return y


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """`a b` of two batches of matrices, in float32 one by one; torch itself sends shorter formats to oneDNN."""
    if a.dtype != torch.float32 or not len(a):
        return torch.bmm(a, b)
    ready = b if b.mT.is_contiguous() else b.contiguous()
    if len(a) == 1:
        return linear(a[0], ready[0].mT)[None]
    products = a.new_empty(len(a), a.shape[-2], b.shape[-1])
    for product, x, y in zip(products, a, ready, strict=True):
        product.copy_(linear(x, y.mT))
    return products


class _OneDNN(Ops):
    """oneDNN's products; a Gram matrix in float32 from rows that lie one behind the other."""

    def gram(self, x: Tensor) -> Tensor:
        """`x xᵀ`; a tall matrix is transposed once, matrix by matrix: torch does that fast, and strips of it slowly."""
        if x.dtype == torch.float32 and self._in_strips(x) and not x.is_contiguous():
            rows = torch.empty_like(x, memory_format=torch.contiguous_format)
            for row, one in zip(rows, x, strict=True):
                row.copy_(one)
            x = rows
        return super().gram(x)


ONEDNN = _OneDNN(multiply, LAPACK_ROWS, strips=256)


def is_fast(product: str) -> bool:
    """Whether `onednn` (in float32) or `bfloat16` takes at most `RATIO` of the time of `torch.bmm` in float32 here.

    Args:
        product: either name.

    Returns:
        What the environment variable says; without it, what a timing once per process says, in 15 ms.

    Raises:
        ValueError: the environment variable has another word than those above, or asks for oneDNN where torch has none.
    """
    words = set((os.environ.get(VARIABLE) or "auto").split(","))
    if unknown := words - {"torch", "onednn", "bfloat16", "auto"}:
        raise ValueError(f"{VARIABLE} has words of torch, onednn, bfloat16, or is auto; unknown: {', '.join(unknown)}")
    if "onednn" in words and not _has_onednn():
        raise ValueError(f"{VARIABLE} asks for onednn, which this torch lacks or has switched off: leave it to auto")
    return product in (_timed() if "auto" in words else words)


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.enabled) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@cache
def _timed() -> frozenset[str]:
    if not _has_onednn():
        return frozenset()
    with torch.no_grad(), full_precision(torch.device("cpu")), _disable_current_modes():  # whatever surrounds the call
        x = torch.ones(1, 256, 512, dtype=torch.float32, device="cpu")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # with several, one may wait for another without a core
        try:
            times = _best(torch=(torch.bmm, x), onednn=(multiply, x), bfloat16=(torch.bmm, x.bfloat16()))
        finally:
            torch.set_num_threads(threads)
    return frozenset(name for name, seconds in times.items() if seconds < RATIO * times["torch"])


def _best(**products: tuple[Multiply, Tensor]) -> dict[str, float]:
    """The least CPU time of `x xᵀ`, in six rounds after a first: this thread's, which other processes hardly change.

    Where that clock is too coarse (Windows) all are 0, and none is faster.
    """
    best = dict.fromkeys(products, float("inf"))
    for attempt in range(7):
        for name, (product, x) in products.items():
            start = time.thread_time()
            product(x, x.mT)
            best[name] = min(best[name], time.thread_time() - start) if attempt else best[name]
    return best
