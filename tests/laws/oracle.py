"""Independent float64 mathematics: what the library is judged by.

Nothing here imports the library. Every function takes one matrix `(out, in)` (or one vector
`(n,)`) and works by the most generic means at hand: SVD for spectral quantities, bisection for
projections. `batched` lifts such a function to leading dimensions by a plain loop.
"""

from collections.abc import Callable

import numpy as np
import torch

Array = np.ndarray


def batched(function: Callable[..., Array], ndim: int, w: Array) -> Array:
    """`function` of each of the trailing `ndim`-dimensional blocks of w, stacked by a loop."""
    lead = w.shape[: w.ndim - ndim]
    results = {index: np.asarray(function(w[index]), dtype=np.float64) for index in np.ndindex(*lead)}
    if not results:
        probe = np.asarray(function(np.zeros(w.shape[w.ndim - ndim :])))
        return np.zeros(lead + probe.shape)
    inner = next(iter(results.values())).shape
    out = np.empty(lead + inner)
    for index, value in results.items():
        out[index] = value
    return out


# --- norms -------------------------------------------------------------------------------------


def conjugate(p: float) -> float:
    """p' with 1/p + 1/p' = 1."""
    if p == 1:
        return np.inf
    return 1.0 if np.isinf(p) else p / (p - 1)


def lp(x: Array, p: float, axis: int = -1) -> Array:
    """The l_p norm along an axis, 0 for an empty one; scaled first, so that no power overflows."""
    x = np.abs(np.asarray(x, dtype=np.float64))
    if x.shape[axis] == 0:
        return np.zeros(np.delete(np.array(x.shape), axis))
    top = x.max(axis=axis, keepdims=True)
    safe = np.where(top == 0, 1, top)
    total = np.max(x / safe, axis=axis) if np.isinf(p) else ((x / safe) ** p).sum(axis=axis) ** (1 / p)
    return total * np.squeeze(top, axis)


def largest(x: Array) -> float:
    """The largest entry, 0 if there is none."""
    return float(np.max(x)) if np.size(x) else 0.0


def singular_values(w: Array) -> Array:
    """Largest first, by LAPACK in float64 (through torch, whose threads the tests limit to one)."""
    return torch.linalg.svdvals(torch.tensor(w, dtype=torch.float64)).numpy() if w.size else np.zeros(0)


def polar(w: Array, relative_rank: float = 1e-12) -> Array:
    """U V^T over the singular directions that are not numerically zero."""
    if not w.size:
        return np.zeros(w.shape)
    u, s, vt = np.linalg.svd(np.asarray(w, np.float64), full_matrices=False)
    positive = s > relative_rank * s[0]
    return (u * positive) @ vt


def clip_spectrum(w: Array, threshold: float) -> Array:
    """U min(S, threshold) V^T."""
    if not w.size:
        return np.zeros(w.shape)
    u, s, vt = np.linalg.svd(np.asarray(w, np.float64), full_matrices=False)
    return (u * np.minimum(s, threshold)) @ vt


def amplification(w: Array, p: float, q: float, rng: np.random.Generator, restarts: int = 12) -> float:
    """max mean_q(W x) over mean_p(x) <= 1, by the definition: fixed-point ascent from many starts.

    Only ever a lower bound, which the closed form must never be below and must attain.
    """
    d_out, d_in = w.shape
    starts = np.concatenate([rng.standard_normal((restarts, d_in)), np.eye(d_in), w])
    best = 0.0
    for x in starts:
        x = x / max(lp(x, p), 1e-300) * d_in ** (1 / p)
        for _ in range(30):
            y = w @ x
            best = max(best, float(lp(y, q) / d_out ** (1 / q)))
            x = lp_maximiser(w.T @ lp_maximiser(y, conjugate(q)), p) * d_in ** (1 / p)
    return best


def lp_maximiser(g: Array, p: float) -> Array:
    """argmax <g, x> over ||x||_p <= 1 for a vector g."""
    top = largest(np.abs(g))
    if top == 0:
        return np.zeros_like(g)
    if p == 1:
        hot = np.zeros_like(g)
        hot[np.argmax(np.abs(g))] = np.sign(g[np.argmax(np.abs(g))])
        return hot
    if np.isinf(p):
        return np.sign(g)
    x = np.sign(g) * (np.abs(g) / top) ** (conjugate(p) - 1)
    return x / lp(x, p)


# --- projections by bisection --------------------------------------------------------------------

HALVINGS = 60  # float64 has 53 bits


def bisect(below: Callable[[Array], Array], low: Array, high: Array, steps: int) -> Array:
    """The crossing of a monotone predicate between low (where it holds) and high, elementwise."""
    for _ in range(steps):
        middle = (low + high) / 2
        holds = below(middle)
        low, high = np.where(holds, middle, low), np.where(holds, high, middle)
    return (low + high) / 2


def shrunk(y: Array, mu: float, s: float) -> Array:
    """x >= 0 with x + mu*s*x**(s-1) = y, elementwise, y >= 0."""
    if s == 1:
        return np.maximum(y - mu, 0)
    return bisect(lambda x: x + mu * s * x ** (s - 1) <= y, np.zeros_like(y), y, HALVINGS)


def onto_ball(y: Array, radius: float, s: float) -> Array:
    """The point of the l_s ball of that radius nearest to the vector y."""
    y = np.asarray(y, np.float64)
    if lp(y, s) <= radius:
        return y.copy()
    if radius == 0:
        return np.zeros_like(y)
    if np.isinf(s):
        return np.clip(y, -radius, radius)
    if s == 2:
        return y * (radius / lp(y, 2))
    unit = np.abs(y) / radius

    def outside(mu: Array) -> Array:
        return np.asarray(lp(shrunk(unit, float(mu), s), s) >= 1)

    high = np.asarray(1.0)
    while outside(high):
        high = high * 2
    mu = float(bisect(outside, np.asarray(0.0), high, HALVINGS))
    return radius * np.sign(y) * shrunk(unit, mu, s)


def rows_onto_ball(w: Array, radius: float, s: float) -> Array:
    return np.stack([onto_ball(row, radius, s) for row in w]) if w.size else np.zeros(w.shape)


def columns_onto_ball(w: Array, radius: float, s: float) -> Array:
    return rows_onto_ball(w.T, radius, s).T
