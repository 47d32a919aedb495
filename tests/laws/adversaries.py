"""Gradient sequences that try to drive a weight out of its ball, one per leading index of a batch."""

from collections.abc import Iterator

import numpy as np
import torch

NAMES = (
    "rank-1 constant pull",
    "full-rank constant pull",
    "full-rank sign flipping",
    "rotating rank-1",
    "outward along the weight",
    "explosions of 1e6",
    "orthogonal to the top direction",
    "one row at a time",
    "no gradient",
    "rank-2 pull, then its opposite",
)
SHAPE = (len(NAMES), 6, 4)
FIXED = torch.tensor(np.random.default_rng(2).standard_normal(SHAPE))


def start(norm_of_first: float, seed: int = 0) -> np.ndarray:
    """Weights `SHAPE` of increasing size: the last ones start far outside a ball of moderate radius."""
    w = np.random.default_rng([1, seed]).standard_normal(SHAPE)
    return w * norm_of_first * np.linspace(0.1, 2, len(NAMES))[:, None, None]


def gradients(w: torch.Tensor, step: int, rng: np.random.Generator) -> torch.Tensor:
    """The next smoothed gradient `SHAPE` against the current weights `SHAPE` (any dtype)."""
    weights = w.detach().double().reshape(SHAPE)
    noise = torch.tensor(rng.standard_normal(SHAPE))
    u, _, vh = torch.linalg.svd(weights[6], full_matrices=False)
    g = torch.zeros(SHAPE, dtype=torch.float64)
    g[0] = -FIXED[0, :, :1] * FIXED[0, :1]
    g[1] = -FIXED[1]
    g[2] = FIXED[2] * (-1) ** step
    g[3] = noise[3, :, :1] * noise[3, :1]
    g[4] = -weights[4]
    g[5] = noise[5] * (1e6 if step % 7 == 0 else 1e-6)
    g[6] = -u[:, 1:] @ vh[1:]
    g[7, step % SHAPE[1]] = -weights[7, step % SHAPE[1]]
    g[9] = -(FIXED[9, :, :2] @ FIXED[9, :2]) * (1 if step % 200 < 100 else -1)
    return g.to(w.dtype).reshape(w.shape)


def step_sizes(steps: int, largest: float) -> Iterator[np.ndarray]:
    """eta per step and adversary: steady, with jumps up to `largest` and exact zeros."""
    rng = np.random.default_rng(3)
    for step in range(steps):
        eta = np.full(len(NAMES), 0.05 if step % 100 < 80 else 0.4)
        if step % 37 == 0:
            eta[:] = largest
        eta[rng.uniform(size=len(NAMES)) < 0.05] = 0
        yield eta
