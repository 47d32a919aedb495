"""Steepest descent along the spectral sphere: `msign` of a matrix moved by a multiple of `u vᵀ`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.linalg import device
from surefoot.linalg.bounds import largest_entry
from surefoot.linalg.polar import msign

TOLERANCE, EVALUATIONS = 0.01, 10
CLOSE = 0.2  # where |h| is below this at both ends of the bracket, their mixture is as good as the root
GROWTH, MARGIN = 4.0, 0.1  # of the steps that look for a bracket; of the bracket, kept from its ends


def tangent_msign(m: Tensor, u: Tensor, v: Tensor, start: Tensor, method: str = "auto") -> tuple[Tensor, Tensor]:
    """The maximiser of `<m, d>` over `|d|_2 <= 1` with `uᵀ d v = 0`: the steepest direction that keeps a norm.

    It is `msign(m + x u vᵀ)` for the x that minimises the convex `|m + x u vᵀ|_*`, whose slope is `h(x) = uᵀ d v`. A
    bracketed secant iteration from the last call's x looks for `|h| <= 0.01`, or for a bracket with `|h| <= 0.2` at
    both ends. The result is the mixture of the ends that has h = 0: a convex combination, hence no longer than 1, and
    the maximiser itself where h jumps past 0 (m of low rank).

    Cost: an `msign` per evaluation, at most 10; about 2 near the last x. An accelerator always evaluates 10 times,
    since to stop early it would have to wait for the host.

    Args:
        m: `(..., out, in)`, float32 or float64.
        u: `(..., out)` and
        v: `(..., in)`: unit vectors, the leading singular pair of the weight.
        start: `(...)`, the x to begin with, in units of `|m|_F`; 0 or the last call's.
        method: of `msign`.

    Returns:
        `(d, x)`; `|uᵀ d v| <= 0.01`, `<m, d>` at least 99.5 % of the best that the method's msign reaches; d = 0 where
        m is 0.

    Source: "Spectral Sphere", 2026; the mixture and the bracket are ours.

    >>> m = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    >>> e = torch.tensor([1.0, 0.0])
    >>> tangent_msign(m, e, e, torch.tensor(0.0), "svd")[0].abs().round(decimals=3) + 0
    tensor([[0., 0.],
            [0., 1.]])
    """
    if m.numel() == 0:
        return m.clone(), start
    a = m / largest_entry(m)
    size = torch.linalg.matrix_norm(a, keepdim=True)
    a = a / torch.where(size == 0, 1, size)
    x = torch.where(size[..., 0, 0] == 0, 0, start)
    pair = u[..., :, None] * v[..., None, :]
    low, high = (
        _End(torch.full_like(x, side), torch.zeros_like(x), torch.zeros_like(a)) for side in (-math.inf, math.inf)
    )
    step = 2 / math.sqrt(min(m.shape[-2:]))  # twice a singular value of a, if all are alike: h changes by about 1
    for _ in range(EVALUATIONS):
        d = msign(a + x[..., None, None] * pair, method)
        h = (u[..., None, :] @ d @ v[..., :, None])[..., 0, 0]
        low, high = low.moved(h <= 0, x, h, d), high.moved(h > 0, x, h, d)
        found = low.x.isfinite() & high.x.isfinite()
        root = torch.where(found, low.h / (low.h - high.h), high.x.isfinite())  # from low to high
        done = (h.abs() <= TOLERANCE) | (found & (torch.maximum(-low.h, high.h) <= CLOSE))
        if device.on_cpu(done) and bool(done.all()):
            break
        inside = low.x + (high.x - low.x) * root.clamp(MARGIN, 1 - MARGIN)
        x = torch.where(done, x, torch.where(found, inside, x - step * h))
        step *= GROWTH
    x = torch.where(found, low.x + (high.x - low.x) * root, x)
    return torch.lerp(low.d, high.d, root[..., None, None]), x


@dataclass(frozen=True)
class _End:
    """One end of the bracket of each matrix: x, infinite while there is none, and h and d there."""

    x: Tensor
    h: Tensor
    d: Tensor

    def moved(self, here: Tensor, x: Tensor, h: Tensor, d: Tensor) -> _End:
        """The end at x where `here`."""
        return _End(
            torch.where(here, x, self.x), torch.where(here, h, self.h), torch.where(here[..., None, None], d, self.d)
        )
