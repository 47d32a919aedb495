"""Attention whose logits are scaled inversely with the size of a head, with rotary positions."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MakeLinear = Callable[[int, int], nn.Linear]
"""From input and output features to a linear layer, In Norm or plain, with a bias or without."""

MakeNorm = Callable[[int], nn.Module]

PLAIN = partial(nn.Linear, bias=False)


def attention_scale(head_dim: int, base_head_dim: int | None = None) -> float:
    """Compute the scale of the attention logits, `s(d) = 1/sqrt(d0) * d0/d`: inverse in `d`, usual at `d = d0`.

    Args:
        head_dim: head dimension `d` of this model.
        base_head_dim: head dimension `d0` of the base model; None means `d`, hence `1/sqrt(d)`.

    Returns:
        The factor on `q . k`.

    Raises:
        ValueError: a head dimension below 1.

    Source: "Beyond MuP 3", attention scaling.

    >>> attention_scale(64), attention_scale(64, base_head_dim=16)
    (0.125, 0.0625)
    """
    base = head_dim if base_head_dim is None else base_head_dim
    if head_dim <= 0 or base <= 0:
        raise ValueError(f"head dimensions must be positive, got {head_dim} and base {base}")
    return 1 / math.sqrt(base) * (base / head_dim)


@final
@dataclass(frozen=True)
class Rope:
    """Rotary positions: the feature pair `j` of a query or key at position `t` turns by `t * base**(-2j/d)`.

    Pairs are `(j, j + d/2)`, the layout of LLaMA's published weights in transformers.

    Source: Su et al. 2021, https://arxiv.org/abs/2104.09864 (base 10,000).

    Args:
        base: above 1; the slowest pair turns by about `1/base` per position.

    Raises:
        ValueError: a base of 1 or less.

    >>> q = torch.ones(1, 1, 3, 2)
    >>> Rope().rotate(q, *Rope().angles(3, 2, q.device))[0, 0, 0].tolist()  # position 0 does not turn
    [1.0, 1.0]
    """

    base: float = 10000.0

    def __post_init__(self) -> None:
        if not self.base > 1:
            raise ValueError(f"the base of rotary positions must be above 1, got {self.base}")

    def angles(self, length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return each feature's cosine, and its pair's sine with the sign it takes: `(length, head_dim)`, float32."""
        pairs = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
        position = torch.arange(length, device=device, dtype=torch.float32)
        angle = position[:, None] * self.base ** (-pairs / head_dim)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return `x` of shape `(..., length, head_dim)` with its pairs turned, in the dtype of `x`."""
        return (x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin).to(x.dtype)


@final
@dataclass(frozen=True)
class Heads:
    """Shape of an attention layer.

    Args:
        count: number of query heads.
        dim: features of a head.
        kv_count: number of key-value heads, a divisor of `count`; below it, query heads share them (grouped queries).
        scale: factor on the attention logits.

    Raises:
        ValueError: `kv_count` does not divide `count`.

    >>> Heads(count=4, dim=16, kv_count=2, scale=attention_scale(16)).scale
    0.25
    """

    count: int
    dim: int
    kv_count: int
    scale: float

    def __post_init__(self) -> None:
        if self.kv_count <= 0 or self.count % self.kv_count:
            several = f"{self.kv_count} key-value heads cannot be shared by {self.count} heads"
            raise ValueError(f"{several}; take a divisor of {self.count}")


@final
class Attention(nn.Module):
    """Causal self-attention with four separate matrices: query, key, value and output.

    Logits are `s <q, k>`, at most `s d rms(q) rms(k)`; the scale s of `attention_scale` makes that Theta(1).

    Args:
        heads: number and dimension of the heads, and the scale of the logits; grouped when there are fewer key-value
            heads.
        rope: turns queries and keys; None leaves positions to the embedding.
        linear: builds a linear layer from its input and output features; default `nn.Linear` without a bias.
        norm: builds the norm of a head's queries, and that of its keys, from the head dimension; None: no norm.

    Source: "Beyond MuP 3", attention scaling.

    >>> attention = Attention(Heads(count=2, dim=4, kv_count=1, scale=attention_scale(4)), Rope())
    >>> attention(torch.ones(1, 3, 8)).shape
    torch.Size([1, 3, 8])
    """

    def __init__(
        self, heads: Heads, rope: Rope | None = None, linear: MakeLinear = PLAIN, norm: MakeNorm | None = None
    ) -> None:
        super().__init__()
        width, kv_width = heads.count * heads.dim, heads.kv_count * heads.dim
        self.heads: Heads = heads
        self.rope: Rope | None = rope
        self.query: nn.Linear = linear(width, width)
        self.key: nn.Linear = linear(width, kv_width)
        self.value: nn.Linear = linear(width, kv_width)
        self.output: nn.Linear = linear(width, width)
        self.query_norm: nn.Module = nn.Identity() if norm is None else norm(heads.dim)
        self.key_norm: nn.Module = nn.Identity() if norm is None else norm(heads.dim)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Map `(B, T, width)` to `(B, T, width)`; `turn` is the result of `rope.angles`, if already computed."""
        heads, layers = self.heads, (self.query, self.key, self.value)
        q, k, v = (torch.unflatten(layer(x), -1, (-1, heads.dim)) for layer in layers)  # (B, T, h, d)
        q, k = (norm(y.to(x.dtype)).to(y.dtype) for norm, y in ((self.query_norm, q), (self.key_norm, k)))
        if self.rope is not None:
            turn = self.rope.angles(x.shape[1], heads.dim, x.device) if turn is None else turn
            # Written out for each head: a CPU then goes through them in the order of the features.
            turns = [table[:, None].expand(-1, heads.count, -1).contiguous() for table in turn]
            q, k = (self.rope.rotate(y, *(table[:, : y.shape[2]] for table in turns)) for y in (q, k))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        grouped = heads.kv_count != heads.count
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=heads.scale, enable_gqa=grouped)
        out: Tensor = self.output(y.transpose(1, 2).flatten(2))
        return out
