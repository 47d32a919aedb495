"""Row rules for tables `(V, d)`: embeddings, whose input is one-hot, and the LM head, responsible for the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from surefoot.geometry.lp_base import MeanGeometry, VectorGeometry


class _Table(VectorGeometry):
    """A norm of tables whose input is one-hot: the layer's output is a row."""

    def lipschitz(self, w: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        """The largest difference of two rows: at least that from the first row, at most twice the norm."""
        return (self.norm(w - w[..., :1, :]) if w.numel() else lower), 2 * upper


@dataclass(frozen=True)
class RowMean(MeanGeometry, _Table):
    """Embedding: `max_i mean_q(E_i)`, one-hot -> q-mean; each token moves by a full step of its own.

    Args:
        q: exponent of the mean, `mean_q(x) = mean(|x|**q)**(1/q)`; 2 is the RMS, inf the largest entry.

    Raises:
        ValueError: an exponent below 1.

    Source: MOGA, Algorithm 1 (embedding rule).

    >>> RowMean(2.0).norm(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))  # 5 / sqrt(2)
    tensor(3.5355)
    """

    q: float = 2.0


@dataclass(frozen=True)
class RowRMS(_Table):
    """Embedding: `max_i rms(E_i)`, direction `G_i / rms(G_i)` for each row; the same as `RowMean(2)`.

    Source: "Beyond MuP 3", embedding.

    >>> RowRMS().direction(torch.tensor([[2.0, -2.0], [0.0, 0.0]]))
    tensor([[ 1., -1.],
            [ 0.,  0.]])
    """

    exponent: ClassVar[float] = 2.0

    def scale(self, shape: torch.Size) -> float:
        """`1 / sqrt(d)`."""
        return 1 / math.sqrt(max(1, shape[-1]))


@dataclass(frozen=True)
class HeadRMS(VectorGeometry):
    """LM head: `d * max_i rms(w_i)`, the Lipschitz bound of the loss; the same as `MeanOperator(2, inf)`.

    Source: "Beyond MuP 3", LM head.

    >>> HeadRMS().norm(torch.tensor([[3.0, 4.0], [0.0, 0.5]]))  # 2 * 5 / sqrt(2)
    tensor(7.0711)
    """

    exponent: ClassVar[float] = 2.0

    def scale(self, shape: torch.Size) -> float:
        """`sqrt(d)`: with the row's Euclidean length it makes `d * rms`."""
        return math.sqrt(max(1, shape[-1]))
