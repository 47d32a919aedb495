"""The mean cross entropy of a language model; of a decoder on a CPU, without all of its logits at once.

Logits of 2048 tokens over 4096 words are 32 MB, written and read several times; of 256 tokens they stay in the cache.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.experiment.models.decoder import Decoder
from surefoot.experiment.models.fast_linear import dtype_of, product

ROWS = 256
"""Tokens whose logits are in memory at a time; twice as many in bfloat16."""
LINES = 32
"""Tokens whose exponentials are summed while they are in the innermost cache."""
LARGEST = 64.0
"""Largest logits for which float32 and bfloat16 hold the exponentials, and their sums over all words."""
FEW = 1 << 20
"""Up to this many logits, all are computed at once."""


def cross_entropy(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the next tokens, in nats: a float32 scalar, or of the logits' dtype if that is wider.

    In parts it differs from that of whole logits by rounding, below 1e-6 of it. It is computed in parts for a decoder
    that is unsharded, on a CPU, in its weights' own dtype and not compiled.

    Args:
        model: maps tokens to logits `(B, T, vocab)`.
        tokens: `(B, T)`, int64.
        targets: the next tokens, `(B, T)`, int64.

    Returns:
        The mean.
    """
    targets = targets.flatten()
    if isinstance(model, Decoder) and _by_parts(model, tokens):
        hidden = model.hidden(tokens).flatten(0, 1)
        hidden = hidden if model.output_multiplier is None else hidden * model.output_multiplier
        head = model.head.weight, dtype_of(model.head)
        loss: Tensor = _LinearCrossEntropy.apply(hidden, *head, targets)  # type: ignore[no-untyped-call]
        return loss
    logits = model(tokens)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets)


def _by_parts(model: Decoder, tokens: Tensor) -> bool:
    weight = model.head.weight
    elsewhere = tokens.device.type != "cpu" or hasattr(weight, "placements") or model._compiled_call_impl is not None
    short = torch.is_autocast_enabled("cpu") or weight.dtype == torch.float16  # where powers of e overflow
    whole = elsewhere or short or not torch.is_grad_enabled() or model.head.bias is not None
    return not whole and tokens.numel() * len(weight) > FEW


class _LinearCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of `x w^T`, whose gradients are computed with it: w.r.t. the logits, softmax minus one-hot."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype, targets: Tensor) -> Tensor:
        """Go through the rows of `x` `(N, d)` and of `targets` `(N,)`, `ROWS` at a time; `weight` is `(vocab, d)`.

        Factors of products are in the dtype, everything else in x's. Instead of a token's `vocab` exponentials, its d
        features are divided by their sum. Logits are lowered by the largest only if an exponential could overflow.
        """
        loss = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
        to_x, to_weight = torch.empty_like(x), loss.new_zeros(weight.shape[::-1]).T
        steep = bool(x.norm(dim=1).max() * weight.norm(dim=1).max() > LARGEST)
        x, weight = (t.to(dtype) if t.dtype == torch.float32 else t for t in (x, weight))
        size = ROWS * 4 // x.element_size()
        lines = torch.arange(size)
        parts = zip(*(torch.split(whole, size) for whole in (x, to_x, targets)), strict=True)
        for rows, out, words in parts:
            logits, wanted = product(rows, weight.T), (lines[: len(rows)], words)
            if steep:
                logits -= logits.amax(1, keepdim=True)
            likely = logits[wanted].to(loss.dtype)
            logits[wanted] = -math.inf
            others = torch.cat([line.exp_().sum(1, dtype=loss.dtype) for line in torch.split(logits, LINES)])
            powers, sums = logits, others + likely.exp()
            loss += (sums.log() - likely).sum()
            powers[wanted] = -others.to(powers.dtype)  # softmax minus one-hot, times the sum
            to_weight += product((rows / sums[:, None]).to(rows.dtype).T, powers).T.to(loss.dtype)
            torch.div(product(powers, weight), sums[:, None], out=out)
        ctx.save_for_backward(to_x / len(x), to_weight / len(x))
        return loss / len(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Scale the gradients that `forward` computed."""
        to_x, to_weight = ctx.saved_tensors
        return gradients[0] * to_x, gradients[0] * to_weight, None, None
