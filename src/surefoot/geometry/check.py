"""`check`: the laws of a geometry, runnable on your own."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.geometry.base import Geometry, dual_norm, expand


def check(geometry: Geometry, *, shape: tuple[int, ...] | None = None, tolerance: float = 1e-3) -> dict[str, float]:
    """Test the laws that bind a geometry's four methods, on random float64 data with a fixed seed.

    unit: `norm(direction(g)) = 1`; maximal: no competitor of norm 1 has a larger product with g; feasible:
    `norm(project(w, r)) <= r`; nearest: `<w - P(w), z - P(w)> <= 0` for feasible z; inside: a point inside the
    ball stays, bit for bit; homogeneous: `norm(c w) = c norm(w)`; scale-free: `direction(c g) = direction(g)`;
    zero-safe: `direction(0) = 0`; untouched: no method writes to its argument; own: a direction may be written to;
    batch: a batch equals a loop; bounds: `lower <= norm <= upper`.

    Args:
        geometry: yours.
        shape: shape of the data; a batch first. Default `(3, 12, 8)`, for norms of vectors `(3, 12)`.
        tolerance: largest violation allowed, relative.

    Returns:
        The violation of each law, 0 being perfect.

    Raises:
        ValueError: a law is broken; the message names it and by how much.

    >>> from surefoot.geometry import RowRMS
    >>> max(check(RowRMS()).values()) < 1e-6
    True
    """
    shape = shape or ((3, 12, 8) if geometry.ndim == 2 else (3, 12))
    generator = torch.Generator().manual_seed(0)
    g, w, z = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    before = [x.clone() for x in (g, w, z)]
    violations = _direction_laws(geometry, g, w) | _ball_laws(geometry, w, z)
    same = all(torch.equal(x, y) for x, y in zip(before, (g, w, z), strict=True))
    violations["untouched"] = 0.0 if same else 1.0
    broken = {law: size for law, size in violations.items() if not size <= tolerance}
    if broken:
        raise ValueError(f"{geometry} breaks " + ", ".join(f"{law} by {size:.2g}" for law, size in broken.items()))
    return violations


def _direction_laws(geometry: Geometry, g: Tensor, w: Tensor) -> dict[str, float]:
    d = geometry.direction(g)
    best = dual_norm(geometry, g)
    dims = tuple(range(-geometry.ndim, 0))
    competitors = [w, g, _ascent(geometry, g, d)]
    reached = [(g * c / expand(geometry.norm(c), geometry)).sum(dims) for c in competitors]
    excess = max(float(((value - best) / value.abs()).max()) for value in reached)
    scales = (1e-30, 1e30)
    return {
        "unit": float((geometry.norm(d) - 1).abs().max()),
        "maximal": max(0.0, excess),
        "scale-free": max(float((geometry.direction(c * g) - d).abs().max() / d.abs().max()) for c in scales),
        "zero-safe": float(geometry.direction(torch.zeros_like(g)).abs().max()),
        "own": 0.0 if _is_own(geometry, g) else 1.0,
        "batch": float((torch.stack([geometry.direction(x) for x in g]) - d).abs().max() / d.abs().max()),
    }


def _is_own(geometry: Geometry, g: Tensor) -> bool:
    """Whether a direction that is written to changes neither g nor the next direction; unless it is g itself."""
    g = g.clone()
    before, d = g.clone(), geometry.direction(g)
    expected = d.clone()
    if 0 in d.stride():  # one number in several places
        return False
    if d.data_ptr() != g.data_ptr():
        d.zero_()
    return torch.equal(g, before) and torch.equal(geometry.direction(g), expected)


def _ascent(geometry: Geometry, g: Tensor, d: Tensor) -> Tensor:
    """Projected gradient ascent of `<g, z>` over the unit ball: where a direction can be improved, this does."""
    climb = g * (d.norm() / g.norm())
    z = d
    for _ in range(10):
        z, _ = geometry.project(z + climb, 1.0)
    return z


def _ball_laws(geometry: Geometry, w: Tensor, z: Tensor) -> dict[str, float]:
    norm = geometry.norm(w)
    radius = float(norm.min()) / 2
    nearest, _ = geometry.project(w, radius)
    dims = tuple(range(-geometry.ndim, 0))
    competitors = [radius * z / expand(geometry.norm(z), geometry), radius * geometry.direction(w - nearest)]
    gains = [float((((w - nearest) * (c - nearest)).sum(dims) / (w * w).sum(dims)).max()) for c in competitors]
    stays, _ = geometry.project(w, 2 * float(norm.max()))
    lower, upper, _ = geometry.bounds(w)
    return {
        "feasible": max(0.0, float(geometry.norm(nearest).max()) / radius - 1),
        "nearest": max(0.0, *gains),
        "inside": 0.0 if torch.equal(stays, w) else 1.0,
        "homogeneous": float((geometry.norm(3 * w) / (3 * norm) - 1).abs().max()),
        "bounds": max(0.0, float((lower / norm).max()) - 1, 1 - float((upper / norm).min())),
    }
