"""The spectral norm: a linear layer, RMS -> RMS."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.geometry.base import Cache, Eta, Geometry, expand
from surefoot.geometry.entrywise import RMS
from surefoot.linalg import device
from surefoot.linalg.bounds import is_below, upper_bound
from surefoot.linalg.clip import mclip, mshrink, spectral_norm
from surefoot.linalg.polar import msign, require_method
from surefoot.linalg.power_iteration import clip_leading, power_iteration, random_vectors
from surefoot.linalg.spectral_sphere import tangent_msign

LONGEST = {"newton_schulz": 1.25}
"""Bounds on `msign`'s largest singular value in float32 that exceed the others'."""

MARGIN, MARGIN_STEPS = 0.25, 16
"""How far inside its ball a matrix is projected by default: this part of the radius, or this many steps if less."""

MARGIN_ASKED = 0.5
"""The part of the radius for a period that was asked for: all of it would leave nothing of the matrix."""

SQUARINGS = 8
"""Of an accelerator's certificates: at most 1.3 % above the norm for 768 rows, 1.5 % for 2048, rounding aside."""


@dataclass(frozen=True)
class Spectral(Geometry):
    """Linear layer: `sqrt(d_in/d_out) sigma_max(W)`, direction `sqrt(d_out/d_in) msign(G)`; Muon's norm.

    The direction's norm is at most 1 + 5e-4 in float32 with every method but `newton_schulz` (1.22); its
    alignment `<G, d> / dual(G)` is about .98 with `auto` and .998 or more with `qdwh`; see `surefoot.msign`.

    Args:
        method: how `msign` is computed, see `surefoot.msign`.

    Source: "Beyond MuP 2"; MOGA's (2, 2).

    >>> w = torch.zeros(8, 2); w[0, 0] = 2.0
    >>> Spectral().norm(w)
    tensor(1.)
    """

    method: str = "auto"

    def __post_init__(self) -> None:
        require_method(self.method)

    @property
    def couples(self) -> frozenset[int]:
        """Both dimensions."""
        return frozenset({-2, -1})

    def norm(self, w: Tensor) -> Tensor:
        """`sqrt(d_in/d_out) sigma_max`, to a relative error of 1e-7."""
        return spectral_norm(w) / self.unit(w.shape)

    def direction(self, g: Tensor) -> Tensor:
        """`sqrt(d_out/d_in) msign(g)`."""
        return msign(g, self.method).mul_(self.unit(g.shape))

    def project(self, w: Tensor, radius: float | Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Singular values clipped at `radius sqrt(d_out/d_in)`."""
        return mclip(w, radius * self.unit(w.shape)), cache

    def unit(self, shape: torch.Size) -> float:
        """`sqrt(d_out/d_in)`, the sigma_max of a linear weight of norm 1."""
        return math.sqrt(max(1, shape[-2]) / max(1, shape[-1]))

    @property
    def direction_norm_bound(self) -> float:
        """1.001, or 1.25 for `newton_schulz`; inf for a subclass with a direction of its own."""
        return LONGEST.get(self.method, 1.001) if type(self).direction is Spectral.direction else math.inf

    def init_state(self, w: Tensor) -> dict[str, Tensor]:
        """`upper`, a number per matrix that is never below its norm: none is known yet, or an accelerator's proof."""
        return {"upper": w.new_full(w.shape[:-2], math.inf) if device.on_cpu(w) else self.certificate(w)}

    def revalidate(self, w: Tensor, cache: dict[str, Tensor]) -> dict[str, Tensor]:
        """Keeps `upper` where it is proven to bound w; one Cholesky factor a matrix. An accelerator proves another."""
        limit = expand(cache["upper"], self) * (1 + 1e-6) * self.unit(w.shape)
        other = math.inf if device.on_cpu(w) else self.certificate(w)
        return {**cache, "upper": torch.where(is_below(w, limit), cache["upper"], other)}

    def enforce(
        self,
        w: Tensor,
        radius: float,
        eta: Eta,
        period: int | None = 1,
        cache: Cache = None,
        longest: float | None = None,
    ) -> tuple[Tensor, Cache]:
        """Only matrices whose running bound exceeds the radius are looked at; they are projected, and bounded anew.

        The bound grows by `eta * longest` and rounding at every step. On an accelerator nothing is read on the host:
        each matrix is scaled by `min(1, radius / upper)` instead, and `upper` is then the radius at most.
        """
        if not cache or not w.numel():
            return self.project(w, radius, cache)
        eta = device.scalar_like(eta, w, w.dtype)
        eta = (eta.amax((-2, -1)) if eta.ndim else eta).expand(w.shape[:-2])
        longest = self.direction_norm_bound if longest is None else longest
        reach = eta * longest
        rounding = math.sqrt(min(w.shape[-2:])) * torch.finfo(w.dtype).eps
        upper = torch.where(eta > 0, cache["upper"] * (1 + 2 * rounding) + reach, cache["upper"])
        look = (upper > radius) & (eta > 0)
        if not device.on_cpu(w):
            upper = torch.minimum(self._frobenius(w), upper if math.isfinite(longest) else self.certificate(w))
            scaled = w * expand(torch.where(eta > 0, radius / upper.clamp_min(radius), 1), self)
            held = torch.where(upper > radius, radius * (1 + 4 * rounding), upper)
            return scaled, {**cache, "upper": torch.where(eta > 0, held, cache["upper"])}
        if not bool(look.any()):
            return w, {**cache, "upper": upper}
        steps, most = (MARGIN_STEPS, MARGIN) if period is None else (period, MARGIN_ASKED)
        margin = torch.where(reach.isfinite(), reach * (steps - 1), 0)  # steps of unknown length are all looked at
        inside = radius - margin.clamp(max=most * radius)
        limit = expand(inside, self) * self.unit(w.shape)
        w = w.index_put((look,), mclip(w[look], limit[look]))
        return w, {**cache, "upper": torch.where(look, inside * (1 + 4 * rounding), upper)}

    def init_vectors(self, w: Tensor, vectors: int) -> dict[str, Tensor]:
        """Leading right singular vectors: pseudo-random ones to start with."""
        return {"vectors": random_vectors(w, vectors)}

    def estimate_norm(self, w: Tensor, cache: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The largest Ritz value after one power iteration."""
        vectors, values = power_iteration(w, cache["vectors"])
        top = values[..., 0] if values.numel() else w.new_zeros(w.shape[:-2])
        return top / self.unit(w.shape), {**cache, "vectors": vectors}

    def clip_leading(
        self, w: Tensor, radius: float | Tensor, cache: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One power iteration, then the Ritz values above the radius cut to it."""
        vectors, values = power_iteration(w, cache["vectors"])
        return clip_leading(w, vectors, values, radius * self.unit(w.shape)), {**cache, "vectors": vectors}

    def tangent(self, w: Tensor, m: Tensor, cache: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """`sqrt(d_out/d_in) msign(m + x u vᵀ)`, orthogonal to w's leading pair as the vectors see it."""
        vectors, values = power_iteration(w, cache["vectors"])
        if not w.numel():
            return self.direction(m), cache
        v = vectors[..., 0].to(m.dtype)
        u = (w @ v[..., None])[..., 0] / torch.where(values[..., :1] == 0, 1, values[..., :1]).to(m.dtype)
        start = cache.get("multiplier", u.new_zeros(u.shape[:-1]))
        d, x = tangent_msign(m, u, v, start, self.method)
        return d.mul_(self.unit(w.shape)), {**cache, "vectors": vectors, "multiplier": x}

    def bounds(self, w: Tensor, cache: Cache = None) -> tuple[Tensor, Tensor, Cache]:
        """The norm twice, on an accelerator a certificate of it; with vectors in the cache the Ritz value, and the
        running bound or the Frobenius norm.
        """
        if not cache or "vectors" not in cache:
            if device.on_cpu(w):
                return super().bounds(w, cache)
            return self._frobenius(w) / math.sqrt(max(1, min(w.shape[-2:]))) * (1 - 2e-5), self.certificate(w), cache
        lower, seen = self.estimate_norm(w, cache)
        upper = self._frobenius(w)
        return lower, torch.minimum(upper, cache.get("upper", upper)), {**cache, **seen}

    def certificate(self, w: Tensor) -> Tensor:
        """A number per matrix, proven not to be below its norm, from float32 products: nothing waits for the host."""
        return upper_bound(w, SQUARINGS) * ((1 + 1e-6) / self.unit(w.shape))

    def _frobenius(self, w: Tensor) -> Tensor:
        """The Frobenius norm in natural units, rounded up."""
        size = math.sqrt(w.shape[-2] * w.shape[-1]) / self.unit(w.shape)
        return RMS().norm(w.flatten(-2)) * (size * (1 + 1e-5))

    def shrink(self, w: Tensor, factor: float | Tensor) -> tuple[Tensor, Tensor]:
        """One eigendecomposition for both."""
        shrunk, top = mshrink(w, factor)
        return shrunk, top / self.unit(w.shape)
