"""Rows and columns of fixed length beside a spectral norm: steps within 3 % of the best on data chosen against them.

The best is that of the dual problem, minimised by scipy in float64 (`dual`), which no step exceeds.
"""

import torch

from combinations import combinations
from laws.inputs import exact, gaussian
from laws.linalg.spectra import best_along_rows, unit_rows
from surefoot.geometry import Spectral
from surefoot.geometry.constraints import SameLengths
from surefoot.linalg import tangent
from surefoot.linalg.tangent import rows_msign

SHAPES = {"wide": (5, 9), "tall": (12, 5), "square": (8, 8), "two": (2, 3)}
KINDS = {
    "dense": lambda x, column, row: x,
    "rank one": lambda x, column, row: column * row,
    "rank one and noise": lambda x, column, row: column * row + 0.03 * x,
    "decaying": lambda x, column, row: decaying(x),
    "long row": lambda x, column, row: torch.cat([30 * x[:1], x[1:]]),
    "long column": lambda x, column, row: torch.cat([30 * x[:, :1], x[:, 1:]], 1),
    "uneven rows": lambda x, column, row: x * 100**column,
    "zero rows": lambda x, column, row: x * (torch.arange(len(x)) % 2)[:, None],
    "parallel rows": lambda x, column, row: column * row + 0.01 * x,
    "parallel columns": lambda x, column, row: column + 0.01 * x,
    "one entry a row": lambda x, column, row: torch.eye(row.numel(), dtype=x.dtype)[
        torch.arange(len(x)) * 3 % row.numel()
    ],
    "a line": lambda x, column, row: torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape),
}
"""From a dense matrix, a column and a row."""


def decaying(x):
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    return u * 3.0 ** -torch.arange(len(s)) @ v


def matrix(kind, shape, seed):
    """Of this kind, float64."""
    sizes = (shape, (shape[0], 1), (1, shape[1]))
    return KINDS[kind](*(gaussian(size, seed + i, torch.float64) for i, size in enumerate(sizes)))


def starts(shape, m, unit):
    """No multipliers, those of a similar gradient, those of another one ten times over."""
    cold = torch.zeros(shape[:1], dtype=torch.float64)
    yield cold
    yield rows_msign(m + 0.1 * m.std() * gaussian(shape, 8, torch.float64), unit, cold)[1]
    yield 10 * rows_msign(gaussian(shape, 9, torch.float64), unit, cold)[1]


def reached(m, w, start, dtype, columns):
    """`<m, d>` of the step, which is tangent and of norm 1."""
    turned = (lambda x: x.mT) if columns else (lambda x: x)
    constraint, cache = SameLengths(-2 if columns else -1), {"multipliers": start.to(dtype)}
    d, _ = Spectral().tangent(turned(w).to(dtype), turned(m).to(dtype), constraint, cache)
    d, unit = turned(d).double() / Spectral().unit(turned(w).shape), unit_rows(w)
    assert float((d * unit).sum(-1).abs().max()) <= 1e-4
    assert float(torch.linalg.matrix_norm(d, 2)) <= 1.001
    return float((d * m).sum())


@combinations(m=list(KINDS), w=list(KINDS)[::-1], shape=list(SHAPES))
def test_steps_attain_97_percent_of_the_best(m, w, shape, monkeypatch):
    """On a CPU; after as many iterations as an accelerator makes, unless the multipliers are another gradient's."""
    shape, cpu = SHAPES[shape], tangent.MOST
    for seed, dtype in enumerate((torch.float64, torch.float32)):
        x, weight = matrix(m, shape, seed), matrix(w, shape, seed + 50)
        least = 0.97 * best_along_rows(exact(x), exact(unit_rows(weight))) - 1e-6 * float(x.abs().sum())
        for turn, start in enumerate(starts(shape, x, unit_rows(weight))):
            for most in (cpu, tangent.ITERATIONS)[: 1 if turn == 2 else 2]:
                monkeypatch.setattr(tangent, "MOST", most)
                assert reached(x, weight, start, dtype, columns=turn == 1) >= least, (turn, most)
