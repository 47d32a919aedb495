"""Directions that remember: rows divided by their own history, rows and columns in turn."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.geometry.adaptive.base import Adaptive, Taken
from surefoot.geometry.base import ChangeBounds, Geometry
from surefoot.geometry.sizes import UNKNOWN, Sizes
from surefoot.geometry.spectral import Spectral
from surefoot.linalg.bounds import max_abs_or_one

ROUNDED = 1 + 1e-5


@dataclass(frozen=True)
class NormalisedRows(Adaptive):
    """The direction with rows of about equal length: `d_i / sqrt(v_i)`, v_i the running mean of row i's mean square.

    All of it is then scaled to the Frobenius norm that the direction has. State: 4 bytes a row, cut over ranks with the
    rows.

    Args:
        norm_of: the norm.
        beta: kept fraction of v.

    Raises:
        ValueError: a fraction outside [0, 1).

    Source: Z. Li et al., "NorMuon", 2025, arXiv:2510.05491, algorithm 1.

    >>> rows, m = NormalisedRows(Spectral("svd")), torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]])
    >>> d, memory = rows.take(m, m, 1.0, rows.init_memory(m))
    >>> d.square().sum(-1)  # the direction's rows have squares 1, 1 and 1
    tensor([[1.0000, 1.0000, 1.0000]])
    """

    norm_of: Geometry = Spectral()  # noqa: RUF009
    beta: float = 0.95

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ValueError(f"NormalisedRows keeps a fraction in [0, 1) of its rows' mean squares, not {self.beta}")

    def init_memory(self, w: Tensor) -> dict[str, Tensor]:
        """Zeros, one for each row."""
        return {**super().init_memory(w), "row_mean": w.new_zeros(w.shape[:-1])}

    def take(self, w: Tensor, m: Tensor, active: Tensor | float, memory: dict[str, Tensor]) -> Taken:
        """The direction over the root of its rows' history, at its own Frobenius norm."""
        d, memory = self.inner(w, m, active, memory)
        rate = (1 - self.beta) * active
        history = torch.lerp(memory["row_mean"][..., : m.shape[-2], None], d.square().mean(-1, keepdim=True), rate)
        even = d / torch.where(history == 0, 1, history).sqrt()
        before, after = (torch.linalg.matrix_norm(x, keepdim=True) for x in (d, even))
        return even * (before / torch.where(after == 0, 1, after)), {**memory, "row_mean": history[..., 0]}

    def direction_norm_bound(self, norm: Geometry, shape: tuple[int, ...], smoothed: Sizes = UNKNOWN) -> float:
        """From the Frobenius norm alone: a row that was short may now have all of it."""
        whole = ChangeBounds.of(self.norm_of).direction_sizes(shape, smoothed).within(shape).whole * ROUNDED
        return ChangeBounds.of(norm).norm_bound(Sizes(whole=whole).within(shape), shape)


@dataclass(frozen=True)
class Oblique(Adaptive):
    """Columns and rows in turn, without their part along the weight: `0.2 sqrt(n_k) t / |t|_k`, no maximiser of a norm.

    At even steps k is the columns, at odd ones the rows; `t = m - <m, w>_k w / |w|_k^2` is tangent to the sphere that a
    column (row) of w lies on, and `|t|_k` its length, so that the entries have RMS 0.2. State: a step count.

    Args:
        norm_of: the norm of the weight.

    Source: Y. Gu, Z. Xie, "Mano", 2026, arXiv:2601.23000, algorithm 1.

    >>> w, m = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    >>> Oblique().take(w, m, 1.0, Oblique().init_memory(w))[0]  # 0.2 sqrt(2) by columns; diagonals are along w
    tensor([[[0.0000, 0.2828],
             [0.2828, 0.0000]]])
    """

    norm_of: Geometry = Spectral()  # noqa: RUF009

    def init_memory(self, w: Tensor) -> dict[str, Tensor]:
        """The number of steps taken."""
        return {"turn": w.new_zeros(w.shape[:-2])}

    def take(self, w: Tensor, m: Tensor, active: Tensor | float, memory: dict[str, Tensor]) -> Taken:
        """Both, and the one whose turn it is."""
        turn = memory["turn"][..., None, None]
        columns, rows = (_tangent(w, m, dim) for dim in (-2, -1))
        return torch.where(turn % 2 == 0, columns, rows), {**memory, "turn": (turn + active)[..., 0, 0]}

    def direction_norm_bound(self, norm: Geometry, shape: tuple[int, ...], smoothed: Sizes = UNKNOWN) -> float:
        """From rows or columns of entries of RMS 0.2."""
        length = [0.2 * math.sqrt(n) * ROUNDED for n in shape[-2:]]
        sizes = (Sizes(column=length[0]), Sizes(row=length[1]))
        return max(ChangeBounds.of(norm).norm_bound(size.within(shape), shape) for size in sizes)


def _tangent(w: Tensor, m: Tensor, dim: int) -> Tensor:
    """`0.2 sqrt(n) t / |t|` for vectors along a dimension of length n."""
    m, w = (x / max_abs_or_one(x) for x in (m, w))
    square = w.square().sum(dim, keepdim=True)
    t = m - (m * w).sum(dim, keepdim=True) / torch.where(square == 0, 1, square) * w
    length = torch.linalg.vector_norm(t, dim=dim, keepdim=True)
    return t * (0.2 * math.sqrt(w.shape[dim]) / torch.where(length == 0, 1, length))
