"""A mixture of gated feed-forward experts, for small reference models."""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@final
class Experts(nn.Module):
    """Stacked gated experts `down(silu(gate(x)) * up(x))`, gate and up in one parameter, in transformers' layout.

    Every expert computes every token, and the weights pick: simple, and right for a few small experts.

    Args:
        count, width, inner: E experts of `width -> inner -> width`.
    """

    has_gate: bool
    is_transposed: bool
    is_concatenated: bool

    def __init__(self, count: int, width: int, inner: int) -> None:
        super().__init__()
        self.has_gate, self.is_transposed, self.is_concatenated = True, False, True
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(count, width, inner))
        for matrix in (*self.gate_up_proj, *self.down_proj):
            nn.init.kaiming_uniform_(matrix, a=5**0.5)  # as nn.Linear

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Map tokens `(N, width)` with weights `(N, E)`, 0 where an expert is not asked, to `(N, width)`."""
        gate, up = torch.einsum("nd,eod->neo", x, self.gate_up_proj).chunk(2, dim=-1)
        y = torch.einsum("nei,edi->ned", F.silu(gate) * up, self.down_proj)
        return (y * weights[..., None]).sum(1)


@final
class MixtureOfExperts(nn.Module):
    """A router and its experts: each token goes to the `active` best, weighted by a softmax over these.

    Args:
        count: experts.
        active: experts of one token, at most count.
        width, inner: of each expert.
    """

    def __init__(self, count: int, active: int, width: int, inner: int) -> None:
        super().__init__()
        if not 1 <= active <= count:
            raise ValueError(f"a token takes 1 to {count} of {count} experts, not {active}")
        self.active = active
        self.router = nn.Linear(width, count, bias=False)
        self.experts = Experts(count, width, inner)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., width)` to `(..., width)`."""
        flat = x.reshape(-1, x.shape[-1])
        logits = self.router(flat)
        best, chosen = logits.topk(self.active, dim=-1)
        weights = torch.zeros_like(logits).scatter(-1, chosen, best.softmax(-1))
        y: Tensor = self.experts(flat, weights)
        return y.reshape(x.shape)
