"""The table of the laws: a geometry beside its norm, dual norm and projection from independent maths.

A new norm is one row here. `w` is `(out, in)` or `(n,)`, float64 numpy; an empty array has norm 0.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from surefoot.geometry import (
    RMS,
    Frobenius,
    Geometry,
    HeadRMS,
    MaxNorm,
    MeanOperator,
    RowMean,
    RowRMS,
    Spectral,
    TransposedConvSpectral,
    VectorMean,
)

from . import oracle
from .oracle import Array, columns_onto_ball, conjugate, largest, lp, rows_onto_ball

inf = float("inf")


@dataclass(frozen=True)
class Case:
    """What one geometry must be, by other means."""

    name: str
    geometry: Geometry
    ndim: int
    norm_of_one: Callable[[Array], float]
    dual_of_one: Callable[[Array], float]
    project_one: Callable[[Array, float], Array]
    shortfall: float = 0.0  # the share of the dual norm that an approximate direction may miss
    overshoot: float = 0.0  # by how much the norm of an approximate direction may exceed 1

    def norm(self, w: Array) -> Array:
        return oracle.batched(self.norm_of_one, self.ndim, w)

    def dual(self, g: Array) -> Array:
        return oracle.batched(self.dual_of_one, self.ndim, g)

    def project(self, w: Array, radius: float) -> Array:
        return oracle.batched(lambda block: self.project_one(block, radius), self.ndim, w)


def spectral(name: str, geometry: Geometry, shortfall: float, overshoot: float, stride: float = 1) -> Case:
    root = stride**0.5
    return Case(
        name,
        geometry,
        2,
        lambda w: _ratio(w) / root * largest(oracle.singular_values(w)),
        lambda g: oracle.singular_values(g).sum() / _ratio(g) * root,
        lambda w, r: oracle.clip_spectrum(w, r / _ratio(w) * root),
        shortfall,
        overshoot,
    )


def _ratio(w: Array) -> float:
    """sqrt(d_in/d_out), 1 for an empty matrix (whose norm is 0 anyway)."""
    return float(np.sqrt(w.shape[1] / w.shape[0])) if w.size else 1.0


def one_hot(name: str, geometry: Geometry, q: float) -> Case:
    """max over rows of mean_q(row)."""
    return Case(
        name,
        geometry,
        2,
        lambda w: largest(lp(w, q)) / max(w.shape[1], 1) ** (1 / q),
        lambda g: (lp(g, conjugate(q)) * g.shape[1] ** (1 / q)).sum(),
        lambda w, r: rows_onto_ball(w, r * w.shape[1] ** (1 / q), q),
    )


def row(name: str, geometry: Geometry, p: float) -> Case:
    """(p, inf): d_in**(1/p) * max_r ||W_r||_p'."""
    return Case(
        name,
        geometry,
        2,
        lambda w: w.shape[1] ** (1 / p) * largest(lp(w, conjugate(p))),
        lambda g: (lp(g, p) / max(g.shape[1], 1) ** (1 / p)).sum(),
        lambda w, r: rows_onto_ball(w, r / max(w.shape[1], 1) ** (1 / p), conjugate(p)),
    )


def column(name: str, geometry: Geometry, q: float) -> Case:
    """(1, q): d_in / d_out**(1/q) * max_c ||W_c||_q."""
    return Case(
        name,
        geometry,
        2,
        lambda w: w.shape[1] / max(w.shape[0], 1) ** (1 / q) * largest(lp(w.T, q)),
        lambda g: (lp(g.T, conjugate(q)) * g.shape[0] ** (1 / q)).sum() / max(g.shape[1], 1),
        lambda w, r: columns_onto_ball(w, r * w.shape[0] ** (1 / q) / max(w.shape[1], 1), q),
    )


def frobenius(geometry: Geometry) -> Case:
    """|W|_F / sqrt(d_out)."""
    return Case(
        "frobenius",
        geometry,
        2,
        lambda w: float(lp(w.ravel(), 2)) / max(w.shape[0], 1) ** 0.5,
        lambda g: float(lp(g.ravel(), 2)) * g.shape[0] ** 0.5,
        lambda w, r: oracle.onto_ball(w.ravel(), r * w.shape[0] ** 0.5, 2).reshape(w.shape),
    )


def vector_mean(name: str, geometry: Geometry, q: float) -> Case:
    """mean_q(w)."""
    return Case(
        name,
        geometry,
        1,
        lambda w: float(lp(w, q)) / max(w.size, 1) ** (1 / q),
        lambda g: float(lp(g, conjugate(q))) * g.size ** (1 / q),
        lambda w, r: oracle.onto_ball(w, r * w.size ** (1 / q), q),
    )


def vector_max(geometry: Geometry) -> Case:
    return Case(
        "max_abs", geometry, 1, lambda w: largest(np.abs(w)), lambda g: np.abs(g).sum(), lambda w, r: np.clip(w, -r, r)
    )


CASES = (
    spectral("spectral", Spectral(), shortfall=0.05, overshoot=5e-4),
    spectral("spectral_qdwh", Spectral("qdwh"), shortfall=1e-3, overshoot=1e-4),
    spectral("strided", TransposedConvSpectral("qdwh", 6), shortfall=1e-3, overshoot=1e-4, stride=6),
    spectral("mean_2_2", MeanOperator(2.0, 2.0), shortfall=0.05, overshoot=5e-4),
    one_hot("row_rms", RowRMS(), 2),
    one_hot("row_mean_3", RowMean(3.0), 3),
    one_hot("row_mean_1", RowMean(1.0), 1),
    one_hot("row_mean_inf", RowMean(inf), inf),
    row("head_rms", HeadRMS(), 2),
    row("mean_2_inf", MeanOperator(2.0, inf), 2),
    row("mean_1.5_inf", MeanOperator(1.5, inf), 1.5),
    row("mean_3_inf", MeanOperator(3.0, inf), 3),
    row("mean_inf_inf", MeanOperator(inf, inf), inf),
    column("mean_1_1", MeanOperator(1.0, 1.0), 1),
    column("mean_1_1.5", MeanOperator(1.0, 1.5), 1.5),
    column("mean_1_2", MeanOperator(1.0, 2.0), 2),
    column("mean_1_4", MeanOperator(1.0, 4.0), 4),
    row("mean_1_inf", MeanOperator(1.0, inf), 1),
    frobenius(Frobenius()),
    vector_mean("rms", RMS(), 2),
    vector_mean("vector_mean_1", VectorMean(1.0), 1),
    vector_mean("vector_mean_2", VectorMean(2.0), 2),
    vector_mean("vector_mean_3", VectorMean(3.0), 3),
    vector_mean("vector_mean_inf", VectorMean(inf), inf),
    vector_max(MaxNorm()),
)
