"""Bounds on the cross entropy behind an LM head, from the head's weight."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from surefoot.geometry import HeadRMS

CHUNK = 1024
"""Rows whose distances from all others are computed at once."""


@torch.no_grad()
def loss_bound(weight: Tensor, exact: bool = False) -> tuple[float, float]:
    """Bounds on the largest cross entropy over inputs of RMS at most 1 and over labels.

    With `r = d max_ij rms(w_i - w_j)` the largest loss is at least `max(log V, r)` and at most `log V + r`, since the
    loss is `log sum_j exp <w_j - w_i, x>`. As `c = d max_i rms(w_i - mean)` is between r/2 and r, the same holds of c
    below and `2 c` above, in one pass.

    Args:
        weight: `(V, d)`, without a bias.
        exact: r itself, at a cost of `V^2 d`; else c.

    Returns:
        `(lower, upper)` in nats.

    Source: "Beyond MuP 3", the LM head; without the mean its bound is `log V + 2 d max_i rms(w_i)`.

    >>> low, high = loss_bound(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), exact=True)  # r = 2 sqrt(2)
    >>> round(low, 4), round(high, 4)
    (2.8284, 3.5216)
    """
    w, d = weight.detach().double(), weight.shape[-1]
    uniform = math.log(max(1, len(w)))
    if exact:
        farthest = max((float(torch.cdist(rows, w).max()) for rows in torch.split(w, CHUNK)), default=0.0)
        return max(uniform, math.sqrt(d) * farthest), uniform + math.sqrt(d) * farthest
    centred = float(HeadRMS().norm(w - w.mean(0)))
    return max(uniform, centred), uniform + 2 * centred
