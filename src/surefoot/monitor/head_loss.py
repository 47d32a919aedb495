"""Bounds on the cross entropy behind an LM head, from the head's weight.

One vector added to all rows adds one number to all logits of an input, which the cross entropy does not see. All bounds
are therefore of differences of rows, and `spread` is the norm of which they are multiples.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from surefoot.geometry import HeadRMS

CHUNK = 1024
"""Rows whose distances from all others are computed at once."""


@torch.no_grad()
def spread(weight: Tensor) -> Tensor:
    """Half of a bound on `d rms(w_i - w_j)` over all pairs of rows, the same for rows that are shifted by one vector.

    It is the smaller one of `c = d max_i rms(w_i - mean)` and the norm `d max_i rms(w_i)`: `rms(w_i - w_j)` is at most
    `rms(w_i - a) + rms(w_j - a)` for every vector a, the mean and 0 among them. With s for a head's spread, and
    `|log sum exp a - log sum exp b| <= max |a_i - b_i|`, for inputs of RMS at most 1:

    - The loss changes by at most `4 s` between any two inputs and labels, as `max_i <w_i - w_t, x>` is at most `2 s`
      for each. Its gradient for x is `sum_j p_j (w_j - w_t)`, so that at one label it changes by at most
      `2 s rms(x1 - x2)`.
    - Where the rows change, the loss of an input changes by at most twice the spread of their changes.

    Args:
        weight: rows `(..., V, d)`.

    Returns:
        One number for each table, in the unit of the head's norm.

    >>> weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    >>> spread(weight), spread(weight + 100)  # sqrt(2)
    (tensor(1.4142, dtype=torch.float64), tensor(1.4142, dtype=torch.float64))
    """
    w = weight.detach().double()
    centred = w - w.mean(-2, keepdim=True) if w.numel() else w
    return torch.minimum(HeadRMS().norm(w), HeadRMS().norm(centred))


@torch.no_grad()
def loss_bound(weight: Tensor, exact: bool = False) -> tuple[float, float]:
    """Bounds on the largest cross entropy over inputs of RMS at most 1 and over labels.

    With `r = d max_ij rms(w_i - w_j)` the largest loss is at least `max(log V, r)` and at most `log V + r`, since the
    loss is `log sum_j exp <w_j - w_i, x>`. As `c = d max_i rms(w_i - mean)` is between r/2 and r, the same holds of c
    below; above, twice the `spread` is a bound.

    Args:
        weight: `(V, d)`, without a bias.
        exact: r itself, at a cost of `V^2 d`; else c and the spread.

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
    return max(uniform, centred), uniform + 2 * float(spread(w))
