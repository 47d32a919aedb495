"""MOGA: mean-normalised operator norms `(p, mean) -> (q, mean)`."""

import math
from dataclasses import dataclass

import torch

from surefoot.geometry import lp_balls
from surefoot.geometry.base import Delegate, NormBounds, NormEstimates
from surefoot.geometry.spectral import Spectral
from surefoot.geometry.vectors import VectorGeometry


@dataclass(frozen=True)
class MeanOperator(Delegate, NormBounds, NormEstimates):
    """`d_in**(1/p) / d_out**(1/q) * |W|_{p->q}`: the largest q-mean of `W x` over inputs x of p-mean 1.

    | (p, q) | norm | direction |
    |---|---|---|
    | (1, q) column | `d_in / d_out**(1/q) * max_c |W[:, c]|_q` | dual vector of each column |
    | (p, inf) row | `d_in**(1/p) * max_r |W[r, :]|_p'` | dual vector of each row |
    | (1, inf) | `d_in * max |W_ij|` | `sign(G) / d_in` |
    | (2, 2) | `sqrt(d_in/d_out) sigma_max` | `sqrt(d_out/d_in) msign(G)` |

    Since p <= q, `mean_p <= mean_q`: the output of one layer is an input of the next, and the norms of layers multiply.
    The loss's smoothness under these norms (the Lipschitz constant of its gradient) grows as
    `width**max(0, 2/q - 1/p)`: not at all if `q >= 2p`, as the root of the width under (2, 2). The exponent is that of
    Hölder's inequality `mean_p(x * y) <= n**max(0, 2/q - 1/p) mean_q(x) mean_q(y)` for entrywise products.

    Args:
        p: exponent of the input's mean, at least 1.
        q: exponent of the output's mean, at least p.

    Raises:
        ValueError: exponents out of order, or a pair without a closed form.

    Source: MOGA slides, "mean-normalised operator norms".

    >>> MeanOperator(1, math.inf).direction(torch.tensor([[3.0, -1.0], [0.0, 2.0]]))
    tensor([[ 0.5000, -0.5000],
            [ 0.0000,  0.5000]])
    """

    p: float
    q: float

    def __post_init__(self) -> None:
        if not 1 <= self.p <= self.q:
            raise ValueError(f"MeanOperator needs 1 <= p <= q (so that layers compose), not p={self.p}, q={self.q}")
        if not (self.p == 1 or math.isinf(self.q) or self.p == self.q == 2):
            raise ValueError(f"({self.p}, {self.q}) has no closed form; choose (1, q), (p, inf), (1, inf) or (2, 2)")

    @property  # not cached: a graph cannot take functools' lock
    def norm_of(self) -> VectorGeometry | Spectral:  # type: ignore[override]
        """The norm of the table: of rows, of columns, or spectral."""
        if math.isinf(self.q):
            return _Rows(lp_balls.conjugate(self.p))
        return _Columns(self.q) if self.p == 1 else Spectral()

    @property
    def smoothness_exponent(self) -> float:
        """`max(0, 2/q - 1/p)`."""
        return max(0.0, 2 / self.q - 1 / self.p)


@dataclass(frozen=True)
class _Rows(VectorGeometry):
    """(p, inf), by the exponent p' of a row's norm."""

    exponent: float = 2.0

    def scale(self, shape: torch.Size) -> float:
        return float(max(1, shape[-1]) ** (1 / lp_balls.conjugate(self.exponent)))


@dataclass(frozen=True)
class _Columns(VectorGeometry):
    """(1, q)."""

    exponent: float = 2.0
    dim = -2

    def scale(self, shape: torch.Size) -> float:
        return float(shape[-1] / max(1, shape[-2]) ** (1 / self.exponent)) if shape[-1] else 1.0
