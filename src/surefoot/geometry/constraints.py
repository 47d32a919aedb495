"""What a step keeps of a weight to first order: its norm, the lengths of its rows or columns, orthogonality."""

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.linalg.bounds import divisor, max_abs
from surefoot.linalg.device import full_precision, widened
from surefoot.linalg.tangent import tangent_part


class Constraint:
    """Linear conditions on a step d from a weight w, under which `Tangents.tangent` finds the best one."""

    def project(self, w: Tensor, d: Tensor) -> Tensor:
        """The nearest step (Frobenius) that meets the conditions, d's shape; d itself if none are linear."""
        return d


@dataclass(frozen=True)
class SameNorm(Constraint):
    """`norm(w)` under the geometry that is asked: it alone knows which steps these are."""


@dataclass(frozen=True)
class SameLengths(Constraint):
    """`<w_i, d_i> = 0` for each vector along dim: rows for -1, columns for -2.

    Args:
        dim: -1 or -2.

    >>> SameLengths(-1).project(torch.tensor([[2.0, 0.0]]), torch.tensor([[3.0, 4.0]]))
    tensor([[0., 4.]])
    """

    dim: int = -1

    def project(self, w: Tensor, d: Tensor) -> Tensor:
        """Each vector without its part along the weight's; 0 where the rest is rounding."""
        return tangent_part(d, self.unit(w), self.dim)

    def unit(self, w: Tensor) -> Tensor:
        """The weight's vectors at length 1, float32 or float64; 0 where they are 0."""
        w = widened(w)
        w = w / divisor(max_abs(w, self.dim))
        length: Tensor = torch.linalg.vector_norm(w, dim=self.dim, keepdim=True)
        return w / length.clamp_min(1)


@dataclass(frozen=True)
class SameAngles(Constraint):
    """`wᵀ d + dᵀ w = 0` (tall; `w dᵀ + d wᵀ = 0` wide) for a w whose singular values are all sigma: they stay equal.

    Args:
        sigma: the singular values of w.
    """

    sigma: float

    def project(self, w: Tensor, d: Tensor) -> Tensor:
        """`d - w sym(wᵀ d) / sigma²`."""
        if w.shape[-2] < w.shape[-1]:
            return self.project(w.mT, d.mT).mT
        with full_precision(w.device):
            inner = (w / self.sigma).mT @ d.to(w.dtype)
            return d - (w @ (inner + inner.mT) / (2 * self.sigma)).to(d.dtype)
