"""The mean cross entropy of a decoder without all of its logits at once: the same loss, a fifth less time a step.

Logits of 2048 tokens over 4096 words are 32 MB, written and read several times; of 128 tokens they stay in the cache.
What comes before the head is compiled, which takes a C++ compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.experiment.models.decoder import Decoder

ROWS = 128
"""Tokens whose logits are in memory at a time."""


@functools.cache
def _hidden() -> Callable[[Decoder, Tensor], Tensor]:
    """What the head reads, compiled."""
    return torch.compile(Decoder.hidden)


def cross_entropy(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the next tokens, in nats: a float32 scalar.

    Args:
        model: a decoder with a head of its own.
        tokens: `(B, T)`, int64.
        targets: the next tokens, `(B, T)`, int64.
    """
    assert isinstance(model, Decoder)
    assert model.output_multiplier is None
    assert model.head.bias is None
    if not torch.is_grad_enabled():
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    hidden = _hidden()(model, tokens).flatten(0, 1)
    loss: Tensor = _LinearCrossEntropy.apply(hidden, model.head.weight, targets.flatten())
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of `x w^T`, whose gradients are computed with it: w.r.t. the logits, softmax minus one-hot."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Go through the rows of `x` `(N, d)` and of `targets` `(N,)`, `ROWS` at a time; `weight` is `(vocab, d)`."""
        loss, to_x, to_weight = x.new_zeros(()), torch.empty_like(x), torch.zeros_like(weight)
        for rows, out, wanted in zip(x.split(ROWS), to_x.split(ROWS), targets.split(ROWS), strict=True):
            wanted = wanted[:, None]
            logits = rows @ weight.T
            to_logits = logits.softmax(1)
            # logsumexp is the largest logit minus the log of its probability: no second pass of exponentials
            loss += (logits.amax(1) - to_logits.amax(1).log() - logits.gather(1, wanted)[:, 0]).sum()
            to_logits.scatter_add_(1, wanted, torch.full_like(rows[:, :1], -1.0))
            to_weight.addmm_(to_logits.T, rows)
            torch.mm(to_logits, weight, out=out)
        ctx.save_for_backward(to_x / len(x), to_weight / len(x))
        return loss / len(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Scale what was computed."""
        to_x, to_weight = ctx.saved_tensors
        return gradients[0] * to_x, gradients[0] * to_weight, None
