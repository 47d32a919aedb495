"""The spectral norm: a linear layer, RMS -> RMS."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.geometry.base import Cache, Geometry
from surefoot.linalg.clip import mclip, spectral_norm
from surefoot.linalg.polar import msign, require_method


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
        return spectral_norm(w) / _unit(w.shape)

    def direction(self, g: Tensor) -> Tensor:
        """`sqrt(d_out/d_in) msign(g)`."""
        return msign(g, self.method).mul_(_unit(g.shape))

    def project(self, w: Tensor, radius: float | Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Singular values clipped at `radius sqrt(d_out/d_in)`."""
        return mclip(w, radius * _unit(w.shape)), cache


def _unit(shape: torch.Size) -> float:
    """`sqrt(d_out/d_in)`, the sigma_max of a linear weight of norm 1."""
    return math.sqrt(max(1, shape[-2]) / max(1, shape[-1]))
