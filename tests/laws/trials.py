"""Cases x shapes x families: what the laws iterate over."""

import numpy as np
import pytest
import torch

from combinations import combinations

from .cases import CASES, Case
from .inputs import DTYPES, SHAPES, exact, generator, stacked

IN_EVERY_DTYPE = ("spectral", "row_rms", "mean_3_inf", "mean_1_2", "frobenius", "rms")  # by default: one of each kind
all_cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
cases_and_dtypes = combinations(
    lambda case, dtype: dtype == torch.float32 or case.name in IN_EVERY_DTYPE, case=CASES, dtype=DTYPES
)


def expand(per_block: np.ndarray, ndim: int) -> np.ndarray:
    return per_block[(..., *(None,) * ndim)]


def trials(case: Case, dtype: torch.dtype):
    """(label, batch of all families) over the shapes."""
    for shape in SHAPES[case.ndim]:
        names, batch = stacked(shape, case.ndim, dtype)
        yield f"{shape}: {names}", batch


def radii(case: Case, w: torch.Tensor, share: float | np.ndarray) -> tuple[np.ndarray, torch.Tensor]:
    """share of each block's own norm, as numbers and as a tensor that broadcasts against w."""
    numbers = share * case.norm(exact(w))
    return numbers, torch.tensor(expand(numbers, case.ndim))


def feasible_points(case: Case, shape: tuple[int, ...]) -> list[np.ndarray]:
    """Random points of the unit sphere, sparse and signed ones among them, by the oracle's norm."""
    rng = generator(7, *shape)
    dense = [rng.standard_normal(shape) for _ in range(4)]
    sparse = [x * (rng.uniform(size=shape) < 0.3) for x in dense[:2]]
    points = [*dense, *sparse, np.sign(dense[0])]
    norms = [expand(case.norm(z), case.ndim) for z in points]
    return [z / np.where(norm == 0, 1, norm) for z, norm in zip(points, norms, strict=True)]
