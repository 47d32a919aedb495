"""The five operations of `Ops` with symmetric products by Triton: only the lower triangle of tiles, and mirrored.

This takes half the multiplications of a full product. Inputs are in half precision, sums in float32; other dtypes, and
`apply` and `inverse`, are computed by torch.
"""

from __future__ import annotations

from collections import Counter

import torch
import triton
import triton.language as tl
from torch import Tensor

from surefoot.linalg.ops import Ops

LAUNCHED: Counter[str] = Counter()
"""Number of kernel launches per operation: lets tests prove that this path was taken."""

TILE, DEPTH, WARPS, STAGES = 128, 64, 8, 3
"""Rows of a tile, columns per partial sum, warps and stages: usual for Hopper; not measured yet."""


@triton.jit
def _lower(
    a, b, c, out, rows, columns, batch_a, row_a, col_a, batch_b, row_b, col_b, batch_c, row_c, col_c, alpha, beta,
    ADDS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """`out = alpha a bᵀ + beta c` for one tile of the lower triangle, written there and mirrored; out is contiguous."""
    number = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    i = ((tl.sqrt(8.0 * number + 1.0) - 1.0) * 0.5).to(tl.int32)  # the last i with i (i + 1) / 2 <= number
    i = tl.where(i * (i + 1) // 2 > number, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= number, i + 1, i)
    j = number - i * (i + 1) // 2
    row = (i * TILE + tl.arange(0, TILE)).to(tl.int64)
    col = (j * TILE + tl.arange(0, TILE)).to(tl.int64)
    depth = tl.arange(0, DEPTH).to(tl.int64)
    left = a + batch * batch_a + row[:, None] * row_a + depth[None, :] * col_a
    right = b + batch * batch_b + col[:, None] * row_b + depth[None, :] * col_b
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, columns, DEPTH):
        within = depth[None, :] < columns - start
        x = tl.load(left, mask=(row[:, None] < rows) & within, other=0.0)
        y = tl.load(right, mask=(col[:, None] < rows) & within, other=0.0)
        total = tl.dot(x, tl.trans(y), total, input_precision="ieee")
        left += DEPTH * col_a
        right += DEPTH * col_b
    total = total * alpha
    below = (row[:, None] >= col[None, :]) & (row[:, None] < rows)
    if ADDS:
        term = tl.load(c + batch * batch_c + row[:, None] * row_c + col[None, :] * col_c, mask=below, other=0.0)
        total += beta * term.to(tl.float32)
    result = total.to(out.dtype.element_ty)
    here = out + batch * rows * rows
    tl.store(here + row[:, None] * rows + col[None, :], result, mask=below)
    tl.store(here + col[None, :] * rows + row[:, None], result, mask=below)


def _launched(name: str, a: Tensor, b: Tensor, c: Tensor, alpha: float, beta: float) -> Tensor:
    """`alpha a bᵀ + beta c`, `(b, m, n)` twice and `(b, m, m)`, where that is symmetric; c is not read for beta = 0."""
    batch, rows, columns = a.shape
    out = torch.empty(batch, rows, rows, dtype=a.dtype, device=a.device)
    tiles = -(-rows // TILE)
    with torch.cuda.device_of(a):  # Triton launches on the current device, whatever its arguments'
        _lower[(tiles * (tiles + 1) // 2, batch)](
            a, b, c, out, rows, columns, *a.stride(), *b.stride(), *c.stride(), alpha, beta,
            ADDS=beta != 0, TILE=TILE, DEPTH=DEPTH, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    LAUNCHED[name] += 1
    return out


_in_a_graph = torch.library.custom_op("surefoot::symmetric", _launched, mutates_args=())
"""`_launched` as an opaque operation of `torch.compile`; eager calls avoid its overhead."""


@_in_a_graph.register_fake
def _shaped(name: str, a: Tensor, b: Tensor, c: Tensor, alpha: float, beta: float) -> Tensor:
    return a.new_empty(a.shape[0], a.shape[1], a.shape[1])


def _symmetric(name: str, a: Tensor, b: Tensor, c: Tensor, alpha: float, beta: float) -> Tensor:
    launch = _in_a_graph if torch.compiler.is_compiling() else _launched
    return launch(name, a, b, c, alpha, beta)


def _takes(x: Tensor) -> bool:
    return x.dtype in (torch.float16, torch.bfloat16) and x.shape[0] < 1 << 16  # batches are the grid's second side


class _Triton(Ops):
    """Symmetric products by the kernel, where it takes them."""

    def gram(self, x: Tensor) -> Tensor:
        return _symmetric("gram", x, x, x, 1.0, 0.0) if _takes(x) else super().gram(x)

    def quadratic(self, a: Tensor, beta: float, gamma: float) -> Tensor:
        return _symmetric("quadratic", a, a, a, gamma, beta) if _takes(a) else super().quadratic(a, beta, gamma)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return _symmetric("product", a, b, a, 1.0, 0.0) if _takes(a) else super().product(a, b)


TRITON = _Triton(torch.bmm)
