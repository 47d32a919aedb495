"""Attention logits `s <q, k>`: measured, bounded by the norms of W_q and W_k, and scaled back. Pure functions."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.geometry import Spectral

CHUNK = 512
"""Queries whose logits are in memory at once."""


def largest_logits(
    query: Tensor, key: Tensor, scale: float, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """`max_ij |scale <q_i, k_j>|` of every head, over the pairs that may attend: exact.

    Args:
        query: `(B, heads, T, d)` (or without B), rotated and all, as attention gets them.
        key: `(B, key heads, S, d)`; heads that share a key lie together.
        scale: factor on the products.
        mask: broadcasts to `(B, heads, T, S)`; True, or finite, where attention is allowed. What a floating mask
            adds is not counted: scaling queries and keys does not change it.
        causal: query i sees keys 0 to i only.

    Returns:
        `(heads,)` float32, 0 without a pair; one too large for the dtype counts as its largest number. Cost: one
        product of attention's two.

    >>> q, k = torch.tensor([[[[1.0, 0.0]]], [[[0.0, 4.0]]]]), torch.tensor([[[[3.0, 0.0]]], [[[0.0, -1.0]]]])
    >>> largest_logits(q, k, 0.5)
    tensor([2.])
    """
    if query.ndim == 3:  # no batch
        query, key = query[None], key[None]
    heads, length = query.shape[1], query.shape[2]
    key = key.repeat_interleave(heads // key.shape[1], 1)
    positions = torch.arange(key.shape[2], device=key.device)
    largest, most = torch.zeros(heads, device=query.device), torch.finfo(query.dtype).max
    if mask is not None:
        mask = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
        mask = mask.expand(query.shape[0], heads, length, key.shape[2])
    for start in range(0, length, CHUNK):
        logits = (query[:, :, start : start + CHUNK] * scale @ key.mT).abs().clamp(max=most).float()
        if mask is not None:
            logits = logits.masked_fill(~mask[:, :, start : start + CHUNK], 0.0)
        if causal:
            seen = positions <= torch.arange(start, start + logits.shape[2], device=key.device)[:, None]
            logits = logits.masked_fill(~seen, 0.0)
        if logits.numel():
            largest = torch.maximum(largest, logits.amax((0, 2, 3)))
    return largest


def size_bound(weight: Tensor, bias: Tensor | None, head_dim: int, input_rms: float = 1.0) -> Tensor:
    """`max |W_h x + b_h|_2` of every head over inputs of RMS at most r: `sqrt(d_h) |W_h| r + |b_h|_2`.

    Args:
        weight: `(heads * head_dim, in)`.
        bias: `(heads * head_dim,)`, or None.
        head_dim: rows of a head, `d_h`.
        input_rms: r.

    Returns:
        `(heads,)`; the norm `|W_h|` is the spectral one in natural units, so the bound is Theta(1) in the width.
    """
    size: Tensor = Spectral().norm(weight.reshape(-1, head_dim, weight.shape[-1])) * (head_dim**0.5 * input_rms)
    return size if bias is None else size + torch.linalg.vector_norm(bias.reshape(-1, head_dim), dim=-1)


def logit_bound(query_size: Tensor, key_size: Tensor, scale: float) -> Tensor:
    """`|scale <q, k>| <= scale |q| |k|` of every head, `(heads,)`; rotary positions turn both and change no size.

    With norms `N_q`, `N_k` in natural units and `scale = 1/sqrt(d_h)` it is `sqrt(d_h) N_q N_k r²`, whatever the width.

    Args:
        query_size: `(heads,)`, see `size_bound`.
        key_size: `(key heads,)`; heads that share a key lie together.
        scale: factor on the products.
    """
    return query_size * key_size.repeat_interleave(len(query_size) // len(key_size)) * abs(scale)


def logit_factors(largest: Tensor, threshold: float, key_heads: int) -> tuple[Tensor, Tensor]:
    """Factors on each head's rows of W_q and W_k that multiply its logits by `g = min(1, threshold / largest)`.

    A key takes `sqrt(max g)` over the heads it serves, a query the rest of its own g: `sqrt(g)` each where every head
    has its key. No factor is above 1, so every bound on a norm stays true.

    Args:
        largest: each head's largest logit, `(heads,)`; a head whose is not finite is left alone, as a step leaves a
            parameter whose gradient is not.
        threshold: what logits are scaled back to.
        key_heads: number of keys.

    Returns:
        `(heads,)` for the queries, `(key_heads,)` for the keys.

    >>> logit_factors(torch.tensor([400.0, 25.0]), 100.0, key_heads=2)
    (tensor([0.5000, 1.0000]), tensor([0.5000, 1.0000]))
    >>> logit_factors(torch.tensor([400.0, 25.0]), 100.0, key_heads=1)
    (tensor([0.2500, 1.0000]), tensor([1.]))
    """
    wanted = torch.where(largest.isfinite(), threshold / largest, 1.0).clamp(max=1.0)
    key = wanted.reshape(key_heads, -1).amax(1).sqrt()
    return wanted / key.repeat_interleave(len(largest) // key_heads), key
