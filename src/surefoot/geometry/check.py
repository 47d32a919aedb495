"""`check`: the laws of a geometry, runnable on your own."""

import torch
from torch import Tensor

from surefoot.geometry.base import Geometry, NormBounds, expand
from surefoot.geometry.returned import direction_of


def check(geometry: Geometry, *, shape: tuple[int, ...] | None = None, tolerance: float = 1e-3) -> dict[str, float]:
    """Test the laws that bind a geometry's methods, on random float64 data with a fixed seed.

    - shapes: `norm` reduces the last ndim dimensions, `direction` and `project` none
    - unit: `norm(direction(g)) = 1`
    - maximal: no competitor of norm 1 has a larger product with g
    - feasible: `norm(project(w, r)) <= r`
    - nearest: `<w - P(w), z - P(w)> <= 0` for feasible z
    - inside: a point inside the ball stays, bit for bit
    - homogeneous: `norm(c w) = |c| norm(w)`, and projections likewise
    - scale-free: `direction(c g) = direction(g)`
    - zero-safe: direction, norm and projection of 0 are 0
    - untouched: no method writes to its argument
    - own: a direction may be written to
    - batch: all three of a batch, with a radius for each, equal a loop
    - bounds: `lower <= norm <= upper`, `norm <= certificate`, and `is_below` agrees
    - independent: other problems, by `couples`, do not change a direction
    - coupled: other entries of the same problem do
    - cut: independent rows keep their direction in a part of the table

    Args:
        geometry: yours.
        shape: shape of the data; a batch first. Default `(1, 3, 12, 8)`, for norms of vectors `(1, 3, 12)`.
        tolerance: largest violation allowed, relative.

    Returns:
        The violation of each law, 0 being perfect.

    Raises:
        ValueError: a law is broken (the message says which and by how much); a dimension in `couples` that is not among
            the norm's; a shape without a batch or entries.

    >>> from surefoot.geometry import RowRMS
    >>> max(check(RowRMS()).values()) < 1e-6
    True
    """
    shape = ((1, 3, 12, 8) if geometry.ndim == 2 else (1, 3, 12)) if shape is None else shape
    if len(shape) <= geometry.ndim or min(shape) < 1:
        raise ValueError(f"shape {shape} has no batch and {geometry.ndim} dimensions of at least one entry each")
    if foreign := [dim for dim in geometry.couples if not -geometry.ndim <= dim < 0]:
        raise ValueError(f"{geometry} couples dimension {foreign[0]}; its norm is over {-geometry.ndim} to -1")
    with torch.device("cpu"):  # whatever the default device is
        violations = _violations(geometry, shape)
    if broken := {law: size for law, size in violations.items() if not size <= tolerance}:
        raise ValueError(f"{geometry} breaks " + ", ".join(f"{law} by {size:.2g}" for law, size in broken.items()))
    return violations


def _violations(geometry: Geometry, shape: tuple[int, ...]) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    g, w, z = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    before = [x.clone() for x in (g, w, z)]
    results = geometry.norm(w), direction_of(geometry, g), geometry.project(w, 1.0, None)[0]
    right = [getattr(x, "shape", None) for x in results] == [w.shape[: -geometry.ndim], g.shape, w.shape]
    violations = {"shapes": float(not right)}
    if right:
        violations |= _direction_laws(geometry, g, w) | _ball_laws(geometry, w, z) | _problem_laws(geometry, g)
        violations["batch"] = _worst(*_of_batch(geometry, g, w))
    return violations | {"untouched": float(not all(map(torch.equal, before, (g, w, z))))}


def _problem_laws(geometry: Geometry, g: Tensor) -> dict[str, float]:
    """Whether `couples` is true: of what lies outside a problem, of what lies inside, and of a part of the rows."""
    d, dims = geometry.direction(g), range(-g.ndim, 0)
    size = d.abs().max()
    problem = tuple(slice(None) if dim in geometry.couples else 0 for dim in dims)
    outside, moved = torch.ones_like(g, dtype=torch.bool), []
    outside[problem] = False
    for factor in (-3, -1e3, -1e-3):
        other = g.clone()
        other[problem] = factor * g[problem].flip(tuple(range(g[problem].ndim)))
        moved.append((geometry.direction(other) - d).abs() * outside / size)
    laws = {"independent": _worst(*moved), "coupled": 0.0}
    for dim in geometry.couples:
        start, rest = g.tensor_split([1], dim)
        others = [geometry.direction(torch.cat([factor * start, rest], dim)) for factor in (1e3, 1e-3)]
        changes = torch.stack([(other - d).tensor_split([1], dim)[1] for other in others]).abs()
        if rest.numel() and not changes.max() > 1e-9 * size:
            laws["coupled"] = 1.0
    rows, half = -geometry.ndim, g.shape[-geometry.ndim] // 2
    if half and rows not in geometry.couples:
        part = geometry.direction(g.narrow(rows, 0, half))
        laws["cut"] = _worst((part - d.narrow(rows, 0, half)).abs() / size)
    return laws


def _direction_laws(geometry: Geometry, g: Tensor, w: Tensor) -> dict[str, float]:
    d = geometry.direction(g)
    dims = tuple(range(-geometry.ndim, 0))
    best = (g * d).sum(dims)
    competitors = [w, g, _ascent(geometry, g, d)]
    reached = torch.stack([(g * c / expand(geometry.norm(c), geometry)).sum(dims) for c in competitors])
    zero = torch.zeros_like(g)
    stay = geometry.direction(zero), geometry.norm(zero), geometry.project(zero, 1.0)[0]
    return {
        "unit": _worst((geometry.norm(d) - 1).abs()),
        "maximal": _worst((reached - best) / reached.abs()),
        "scale-free": _worst(*((geometry.direction(c * g) - d).abs() / d.abs().max() for c in (1e-30, 1e30))),
        "zero-safe": _worst(*(x.abs() for x in stay)),
        "own": float(not _is_own(geometry, g)),
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
    gains = [((w - nearest) * (c - nearest)).sum(dims) / (w * w).sum(dims) for c in competitors]
    scaled = [geometry.norm(c * w) / (abs(c) * norm) - 1 for c in (-1, 1e-6, 1e6)]
    scaled += [(geometry.project(c * w, c * radius)[0] / c - nearest) / nearest.abs().max() for c in (1e-6, 1e6)]
    stays, _ = geometry.project(w, 2 * float(norm.max()))
    bounds = NormBounds.of(geometry)
    lower, upper, _ = bounds.bounds(w)
    ratios = torch.stack([lower / norm, norm / upper, norm / bounds.certificate(w)])
    certain = bounds.is_below(w, 2 * norm).all() and not bounds.is_below(w, norm / 2).any()
    return {
        "feasible": _worst(geometry.norm(nearest) / radius - 1),
        "nearest": _worst(*gains),
        "inside": float(not torch.equal(stays, w)),
        "homogeneous": _worst(*(x.abs() for x in scaled)),
        "bounds": _worst(ratios - 1) if certain else 1.0,
    }


def _of_batch(geometry: Geometry, g: Tensor, w: Tensor) -> list[Tensor]:
    """How direction, norm and projection of a stack, with radii of which some bind, differ from those of each alone."""
    one, norm = (-1, *w.shape[-geometry.ndim :]), geometry.norm(w)
    radii = norm * (torch.arange(norm.numel()) % 2 * 1.5 + 0.5).reshape(norm.shape)
    whole = geometry.direction(g), norm, geometry.project(w, expand(radii, geometry))[0]
    alone = zip(g.reshape(one), w.reshape(one), radii.flatten().tolist(), strict=True)
    each = [(geometry.direction(x), geometry.norm(y), geometry.project(y, r)[0]) for x, y, r in alone]
    pairs = zip(map(torch.stack, zip(*each, strict=True)), whole, strict=True)
    return [(x.reshape(y.shape) - y).abs() / y.abs().max() for x, y in pairs]


def _worst(*violations: Tensor) -> float:
    """The largest entry, at least 0; NaN if one is."""
    return float(torch.tensor([float(x.max()) for x in violations]).clamp_min(0).max())
