"""The spectral norm: a linear layer, RMS -> RMS; a transposed convolution."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from surefoot.geometry.base import Cache, ChangeBounds, NormBounds, NormEstimates, State, Taken, Tangents, expand
from surefoot.geometry.change_bounds import UNKNOWN, Sizes, clipped_change
from surefoot.geometry.constraints import Constraint, SameAngles, SameLengths, SameNorm
from surefoot.geometry.entrywise import RMS
from surefoot.linalg import device
from surefoot.linalg.bounds import divisor, is_below, upper_bound
from surefoot.linalg.clip import mclip, mshrink, spectral_norm
from surefoot.linalg.polar import msign, require_method
from surefoot.linalg.power_iteration import clip_leading, power_iteration, random_vectors
from surefoot.linalg.small_eigh import finite_only
from surefoot.linalg.tangent import rows_msign, stiefel_msign, tangent_msign

LARGEST = 1.001
LARGEST_OF = {"newton_schulz": 1.25}
"""Bounds on the largest singular value of `msign` in float32: of every method, and of those that exceed it."""

SQUARINGS = 8
"""Of an accelerator's certificates: at most 1.3 % above the norm for 768 rows, 1.5 % for 2048, rounding aside."""

TANGENT_VECTORS, TANGENT_ITERATIONS = 2, 8
"""Leading vectors that `tangent` keeps of a matrix, and the power iterations that give the first ones."""


@dataclass(frozen=True)
class Spectral(NormBounds, NormEstimates, Tangents, ChangeBounds):
    """Linear layer: `sqrt(d_in/d_out) sigma_max(W)`, direction `sqrt(d_out/d_in) msign(G)`; Muon's norm.

    The direction's norm is at most 1 + 5e-4 in float32 with every method but `newton_schulz` (1.22); its
    alignment `<G, d> / dual(G)` is about .98 with `auto` and .998 or more with `qdwh`; see `surefoot.msign`.

    Args:
        method: how `msign` is computed, see `surefoot.msign`.

    Raises:
        ValueError: an unknown method.

    Source: "Beyond MuP 2"; MOGA's (2, 2).

    >>> w = torch.zeros(8, 2); w[0, 0] = 2.0
    >>> Spectral().norm(w)
    tensor(1.)
    """

    couples: ClassVar[frozenset[int]] = frozenset({-2, -1})
    costly = True
    smoothness_exponent: ClassVar[float] = 0.5  # that of `MeanOperator(2, 2)`
    method: str = "auto"

    def __post_init__(self) -> None:
        require_method(self.method)

    def unit(self, shape: torch.Size) -> float:
        """`sqrt(d_out/d_in)`, the largest singular value of a weight of norm 1."""
        return math.sqrt(max(1, shape[-2]) / max(1, shape[-1]))

    def norm(self, w: Tensor) -> Tensor:
        """`sigma_max / unit`, to a relative error of 1e-7."""
        return spectral_norm(w) / self.unit(w.shape)

    def direction(self, g: Tensor) -> Tensor:
        """`unit * msign(g)`."""
        return msign(g, self.method).mul_(self.unit(g.shape))

    def dual(self, g: Tensor) -> Tensor:
        """`unit` times the sum of the singular values; a fast direction attains up to 3 % less."""
        nuclear: Tensor = finite_only(torch.linalg.svdvals, g).sum(-1)
        return nuclear * self.unit(g.shape)

    def project(self, w: Tensor, radius: float | Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Singular values clipped at `radius * unit`."""
        return mclip(w, radius * self.unit(w.shape)), cache

    def direction_sizes(self, shape: tuple[int, ...], smoothed: Sizes = UNKNOWN) -> Sizes:
        """Singular values of 1.001 units, or 1.25 for `newton_schulz`; unknown for an overridden direction."""
        most = LARGEST_OF.get(self.method, LARGEST) * self.unit(torch.Size(shape))
        return Sizes() if self._redirected else Sizes(spectral=most).within(shape[-2:])

    def norm_bound(self, sizes: Sizes, shape: tuple[int, ...]) -> float:
        """The largest singular value over `unit`."""
        return sizes.spectral / self.unit(torch.Size(shape))

    def clip_change_bound(self, excess: Tensor, reach: float) -> Tensor:
        """`clipped_change`."""
        return clipped_change(excess, reach)

    def retract(self, w: Tensor) -> Tensor:
        """All singular values become `unit`, to rounding: by QDWH or the SVD, and a Newton step."""
        near = msign(w, self._accurate)
        tall = near.shape[-2] > near.shape[-1]
        with device.full_precision(w.device):
            cubic = near @ (near.mT @ near) if tall else (near @ near.mT) @ near
        return torch.add(1.5 * near, cubic, alpha=-0.5).mul_(self.unit(w.shape))

    def spread(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Singular values over `unit`."""
        if not w.numel():
            return super().spread(w)
        return torch.aminmax(finite_only(torch.linalg.svdvals, w) / self.unit(w.shape), dim=-1)

    def certificate(self, w: Tensor) -> Tensor:
        """From float32 products, at most 1.5 % above the norm for 2048 rows, rounding aside."""
        return upper_bound(w, SQUARINGS) * ((1 + 1e-6) / self.unit(w.shape))

    def is_below(self, w: Tensor, limit: Tensor) -> Tensor:
        """Proven by one Cholesky factor a matrix; False also within rounding (3e-10) of the limit."""
        return is_below(w, expand(limit, self) * self.unit(w.shape))

    def quick_bound(self, w: Tensor) -> Tensor:
        """The Frobenius norm in natural units, rounded up; at most `sqrt(min(out, in))` times the norm."""
        size = math.sqrt(w.shape[-2] * w.shape[-1]) / self.unit(w.shape)
        return RMS().norm(w.flatten(-2)) * (size * (1 + 1e-5))

    def init_vectors(self, w: Tensor, vectors: int) -> State:
        """Pseudo-random estimates of the leading right singular vectors."""
        return {"vectors": random_vectors(w, vectors)}

    def estimate_norm(self, w: Tensor, cache: State) -> Taken:
        """The largest Ritz value after one power iteration."""
        vectors, values = power_iteration(w, cache["vectors"])
        top = values[..., 0] if values.numel() else w.new_zeros(w.shape[:-2])
        return top / self.unit(w.shape), {**cache, "vectors": vectors}

    def clip_leading(self, w: Tensor, radius: float | Tensor, cache: State) -> Taken:
        """One power iteration, then the Ritz values above the radius cut to it."""
        vectors, values = power_iteration(w, cache["vectors"])
        return clip_leading(w, vectors, values, radius * self.unit(w.shape)), {**cache, "vectors": vectors}

    def init_tangent(self, w: Tensor, constraint: Constraint) -> State:
        """Multipliers, all 0: of the norm one and leading right singular vectors, of lengths one for each; else {}."""
        if isinstance(constraint, SameLengths):
            return {"multipliers": w.new_zeros((w if constraint.dim == -1 else w.mT).shape[:-1])}
        if not isinstance(constraint, SameNorm):
            return {}
        cache = self.init_vectors(w, TANGENT_VECTORS)
        for _ in range(TANGENT_ITERATIONS if w.numel() else 0):
            _, cache = self.estimate_norm(w, cache)
        return {**cache, "multiplier": w.new_zeros(w.shape[:-2])}

    def tangent(self, w: Tensor, m: Tensor, constraint: Constraint, cache: State) -> Taken:
        """`unit` times `tangent_msign` at the leading singular pair of w, `stiefel_msign` or `rows_msign`.

        The pair is as the cache estimates it. The last two by QDWH, or the SVD if that is the method.
        """
        if isinstance(constraint, SameAngles):
            return stiefel_msign(m, w / constraint.sigma, self._accurate).mul_(self.unit(w.shape)), cache
        if isinstance(constraint, SameLengths):
            return self._tangent_to_lengths(w, m, constraint, cache)
        if not isinstance(constraint, SameNorm):
            return super().tangent(w, m, constraint, cache)
        vectors, values = power_iteration(w, cache["vectors"])
        if not w.numel():
            return self.direction(m), cache
        v = vectors[..., 0].to(m.dtype)
        with device.full_precision(w.device):
            u = (w @ v[..., None])[..., 0] / divisor(values[..., :1]).to(m.dtype)
            d, x = tangent_msign(m, u, v, cache["multiplier"], self.method)
        return d.mul_(self.unit(w.shape)), {**cache, "vectors": vectors, "multiplier": x}

    def _tangent_to_lengths(self, w: Tensor, m: Tensor, constraint: SameLengths, cache: State) -> Taken:
        unit = constraint.unit(w)  # of fewer vectors than the multipliers are, where a parameter has larger blocks, too
        rows, start = constraint.dim == -1, cache["multipliers"][..., : w.shape[-3 - constraint.dim]].to(unit.dtype)
        g, unit = (x if rows else x.mT for x in (m.to(unit.dtype), unit))
        d, x = rows_msign(g, unit, start, self._accurate)
        kept = {**cache, "multipliers": x.to(cache["multipliers"].dtype)}
        return (d if rows else d.mT).to(m.dtype).mul_(self.unit(w.shape)), kept

    @property
    def _accurate(self) -> str:
        return "svd" if self.method == "svd" else "qdwh"

    def extremes(self, radius: float, shape: torch.Size) -> Constraint:
        """Equal singular values."""
        return SameAngles(radius * self.unit(shape))

    def root_square(self, shape: torch.Size) -> float:
        """`sqrt(d_in) * unit`: every output has RMS 1 over isotropic inputs of RMS 1."""
        return math.sqrt(shape[-1]) * self.unit(shape)

    def bounds(self, w: Tensor, cache: Cache = None) -> tuple[Tensor, Tensor, Cache]:
        """The norm twice; on an accelerator `quick_bound / sqrt(min(out, in))` and the certificate.

        With vectors in the cache: the largest Ritz value; the smaller of the cached "upper" and `quick_bound`.
        """
        if cache and "vectors" in cache:
            lower, vectors = self.estimate_norm(w, cache)
            upper = self.quick_bound(w)
            return lower, torch.minimum(upper, cache.get("upper", upper)), {**cache, **vectors}
        if device.on_cpu(w):
            return super().bounds(w, cache)
        return self.quick_bound(w) / math.sqrt(max(1, min(w.shape[-2:]))) * (1 - 2e-5), self.certificate(w), cache

    def shrink(self, w: Tensor, factor: float | Tensor) -> tuple[Tensor, Tensor]:
        """One eigendecomposition for both."""
        shrunk, top = mshrink(w, factor)
        return shrunk, top / self.unit(w.shape)


@dataclass(frozen=True)
class TransposedConvSpectral(Spectral):
    """`sqrt(d_in / (stride d_out)) sigma_max(W)`: an output entry sums over one in `stride` of the `d_in` columns.

    Its fan-in, and so the width factor, is `d_in / stride`; all else is as in `Spectral`.

    Args:
        method: how `msign` is computed, see `surefoot.msign`.
        stride: number of disjoint sets of columns that make different output entries; `prod(stride)` for transposed
            convolutions with no smaller kernel.

    Raises:
        ValueError: an unknown method.

    >>> w = torch.zeros(2, 8); w[0, 0] = 2.0
    >>> TransposedConvSpectral(stride=4).norm(w)
    tensor(2.)
    """

    stride: int = 1

    def unit(self, shape: torch.Size) -> float:
        """`sqrt(stride d_out/d_in)`."""
        return super().unit(shape) * math.sqrt(self.stride)
