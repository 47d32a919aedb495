"""Attention logits `s <q, k>`: maxima, bounds by the norms of W_q and W_k, clipping factors, the scale s."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.discovery.heads import head_dim_of
from surefoot.geometry import Spectral

CHUNK = 512
"""Number of queries whose logits are in memory at once."""


def largest_logits(
    query: Tensor, key: Tensor, scale: float, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Exact `max_ij |scale <q_i, k_j>|` per head, over the pairs (i, j) that may attend.

    Costs one of the two matrix products of attention.

    Args:
        query: `(..., heads, T, d)`, any batch, after rotary embedding, as attention receives them.
        key: `(..., key heads, S, d)`; consecutive heads share a key.
        scale: factor on the products.
        mask: broadcasts to `(..., heads, T, S)`; True, or finite, where attention is allowed. The values that a
            floating-point mask adds are ignored: rescaling queries and keys does not change them.
        causal: query i attends to keys 0 to i only.

    Returns:
        `(heads,)` in float32; 0 for a head without pairs; a logit that overflows counts as its dtype's largest number.

    >>> q, k = torch.tensor([[[[1.0, 0.0]]], [[[0.0, 4.0]]]]), torch.tensor([[[[3.0, 0.0]]], [[[0.0, -1.0]]]])
    >>> largest_logits(q, k, 0.5)
    tensor([2.])
    """
    *batch, heads, length, _ = query.shape
    query, key = (x.reshape(math.prod(batch), *x.shape[-3:]) for x in (query, key))
    key = key.repeat_interleave(heads // key.shape[1], 1)
    largest = torch.zeros(heads, device=query.device)
    if mask is not None:
        mask = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
        mask = mask.expand(*batch, heads, length, key.shape[2]).reshape(len(query), heads, length, key.shape[2])
    for start in range(0, length, CHUNK):
        logits = (query[:, :, start : start + CHUNK] * scale @ key.mT).abs()  # under autocast of another dtype
        logits = logits.clamp(max=torch.finfo(logits.dtype).max).float()
        if mask is not None:
            logits = logits.masked_fill(~mask[:, :, start : start + CHUNK], 0.0)
        if causal:
            logits = logits.tril(start)
        if logits.numel():
            largest = torch.maximum(largest, logits.amax((0, 2, 3)))
    return largest


@torch.no_grad()
def multihead_logits(query: Tensor, key: Tensor, num_heads: int, **given: Any) -> Tensor:
    """Exact largest logits per head of `nn.MultiheadAttention`, from the arguments of torch's function for it.

    Args:
        query: `(T, B, width)`, or without B.
        key: `(S, B, width)`, or without B.
        num_heads: number of heads.
        **given: the other arguments of `torch.nn.functional.multi_head_attention_forward`.

    Returns:
        `(heads,)` in float32.

    >>> called = dict(num_heads=2, in_proj_weight=torch.eye(4).repeat(3, 1), in_proj_bias=None)
    >>> multihead_logits(torch.ones(1, 4), torch.ones(1, 4), **called)
    tensor([1.4142, 1.4142])
    """
    separate = given.get("use_separate_proj_weight")
    weights = (given["q_proj_weight"], given["k_proj_weight"]) if separate else given["in_proj_weight"].chunk(3)
    biases = (None, None) if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)
    size = len(weights[0]) // num_heads
    q, k = (
        torch.nn.functional.linear(x if x.ndim == 3 else x[:, None], weight, bias).reshape(len(x), -1, num_heads, size)
        for x, weight, bias in zip((query, key), weights[:2], biases[:2], strict=True)
    )
    if (extra := given.get("bias_k")) is not None:
        k = torch.cat([k, extra.view(1, 1, *k.shape[2:]).expand(-1, k.shape[1], -1, -1)])
    q, k = q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3)  # (B, heads, T, d)
    keys = k.shape[2]
    allowed = torch.ones(len(q), 1, 1, keys, dtype=torch.bool, device=q.device)
    if (mask := given.get("attn_mask")) is not None:
        mask = mask.view(len(q), num_heads, *mask.shape[1:]) if mask.ndim == 3 and len(mask) > 1 else mask
        allowed = allowed & _allowed(mask, keys)
    if (mask := given.get("key_padding_mask")) is not None:
        allowed = allowed & _allowed(mask, keys).view(-1, 1, 1, keys)
    return largest_logits(q, k, q.shape[-1] ** -0.5, allowed)


def _allowed(mask: Tensor, keys: int) -> Tensor:
    """True where a mask of `nn.MultiheadAttention` is not True, or -inf, and at the extra key that the layer adds."""
    allowed = ~mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    return torch.nn.functional.pad(allowed, (0, keys - mask.shape[-1]), value=True)


def head_norm_bound(weight: Tensor, bias: Tensor | None, head_dim: int, input_rms: float = 1.0) -> Tensor:
    """Upper bound `sqrt(d_h) |W_h| r + |b_h|_2` on `|W_h x + b_h|_2` per head, over inputs x of RMS at most r.

    `|W_h|` is the spectral norm in natural units, so the bound is Theta(1) in the width.

    Args:
        weight: `(heads * head_dim, in)`.
        bias: `(heads * head_dim,)`, or None.
        head_dim: number of rows of a head, `d_h`.
        input_rms: the RMS r.

    Returns:
        `(heads,)`.

    >>> head_norm_bound(torch.eye(4), None, head_dim=4)
    tensor([2.])
    """
    norm: Tensor = Spectral().norm(weight.reshape(-1, head_dim, weight.shape[-1])) * (head_dim**0.5 * input_rms)
    return norm if bias is None else norm + torch.linalg.vector_norm(bias.reshape(-1, head_dim), dim=-1)


def logit_bound(query_norm: Tensor, key_norm: Tensor, scale: float) -> Tensor:
    """Upper bound `|scale| |q| |k|` on `|scale <q, k>|` per head; rotary embeddings preserve both norms.

    With weights of norms `N_q`, `N_k` in natural units, `scale = 1/sqrt(d_h)` and inputs of RMS r it is
    `sqrt(d_h) N_q N_k r²`, independent of the width.

    Args:
        query_norm: bound on `|q|` per head, `(heads,)`, see `head_norm_bound`.
        key_norm: bound on `|k|` per key head, `(key heads,)`; consecutive heads share a key.
        scale: factor on the products.

    Returns:
        `(heads,)`.

    >>> logit_bound(torch.tensor([2.0, 4.0]), torch.tensor([3.0]), scale=0.5)
    tensor([3., 6.])
    """
    return query_norm * key_norm.repeat_interleave(len(query_norm) // len(key_norm)) * abs(scale)


def logit_factors(largest: Tensor, threshold: float, key_heads: int) -> tuple[Tensor, Tensor]:
    """Factors per head on the rows of W_q and W_k that multiply its logits by `g = min(1, threshold / largest)`.

    A key head is multiplied by `sqrt(max g)` over the heads that share it, a query head by the rest of its own g; both
    factors are `sqrt(g)` where no key is shared. No factor exceeds 1, so every norm bound stays valid.

    Args:
        largest: largest logit per head, `(heads,)`; a head whose value is not finite is not scaled, as a step skips a
            parameter whose gradient is not finite.
        threshold: upper limit of the logits after scaling.
        key_heads: number of key heads.

    Returns:
        Factors `(heads,)` for the queries and `(key_heads,)` for the keys.

    >>> logit_factors(torch.tensor([400.0, 25.0]), 100.0, key_heads=2)
    (tensor([0.5000, 1.0000]), tensor([0.5000, 1.0000]))
    >>> logit_factors(torch.tensor([400.0, 25.0]), 100.0, key_heads=1)
    (tensor([0.2500, 1.0000]), tensor([1.]))
    """
    total = torch.where(largest.isfinite(), threshold / largest, 1.0).clamp(max=1.0)
    key = total.reshape(key_heads, -1).amax(1).sqrt()
    return total / key.repeat_interleave(len(largest) // key_heads), key


def scale_attention_(model: nn.Module, base_head_dim: int) -> list[str]:
    """Make attention scale its logits by `sqrt(d0)/d_head` instead of `1/sqrt(d_head)`, for transfer across head sizes.

    Trained queries and keys are aligned, so their product grows as `d_head`: under the usual scale logits grow with its
    root, and the best learning rate moves with them. At `d_head = d0` nothing changes. Not for the default recipe: its
    steps of queries and keys fall with `d_head`, and with both, logits move by less as heads grow. Not for pretrained
    models, which were trained with their own scale. The modules are those with an attribute `scaling` equal to
    `1/sqrt(d_head)`, as in most of `transformers`. Checkpoints do not hold it, so call this whenever a model is built.

    Args:
        model: written to.
        base_head_dim: d0, the head dimension of the model at which the learning rate is tuned.

    Returns:
        The names of the modules that changed.

    Raises:
        ValueError: a dimension below 1, or a model without such a module.

    Source: G. Yang et al., "Tensor Programs V", definition 4.1; "Beyond MuP 3".

    >>> layer = nn.Module()
    >>> layer.head_dim, layer.scaling = 64, 0.125
    >>> scale_attention_(layer, base_head_dim=16), layer.scaling
    ([''], 0.0625)
    """
    if base_head_dim < 1:
        raise ValueError(f"base_head_dim must be at least 1, not {base_head_dim}")
    if not (found := usually_scaled(model)):
        how = f"in its code, scale the queries by sqrt({base_head_dim} / d_head)"
        raise ValueError(f"no module of the model has an attribute `scaling` of 1/sqrt(head_dim): {how}")
    for module, size in found.values():
        module.scaling = math.sqrt(base_head_dim) / size  # type: ignore[assignment]
    return list(found)


def usually_scaled(model: nn.Module) -> dict[str, tuple[nn.Module, int]]:
    """Modules whose attribute `scaling` is `1/sqrt(d_head)`: name -> module and head dimension."""
    found: dict[str, tuple[nn.Module, int]] = {}
    for name, module in model.named_modules():
        size, scale = head_dim_of(module), getattr(module, "scaling", None)
        if size and isinstance(scale, float) and math.isclose(scale, size**-0.5, rel_tol=1e-6):
            found[name] = module, size
    return found
