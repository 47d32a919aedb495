"""The layers of the reference decoders that are not public: learned positions, feed-forward, block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.layers.attention import Attention, MakeLinear


@final
@dataclass(frozen=True)
class Learned:
    """Learned positions: one row per position is added to the token's row.

    Args:
        context: number of positions, the longest input.

    Raises:
        ValueError: a context below 1.
    """

    context: int = 1024

    def __post_init__(self) -> None:
        if self.context <= 0:
            raise ValueError(f"the context of learned positions must be positive, got {self.context}")


@final
class MLP(nn.Module):
    """GPT's feed-forward layer `down(gelu(up(x)))`, with the tanh form of GELU, as in GPT-2.

    Args:
        width: features of input and output.
        inner: features between the two layers.
        linear: builds a linear layer from its input and output features.
    """

    def __init__(self, width: int, inner: int, linear: MakeLinear) -> None:
        super().__init__()
        self.up: nn.Linear = linear(width, inner)
        self.down: nn.Linear = linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., width)` to `(..., width)`."""
        y: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return y


@final
class GatedMLP(nn.Module):
    """LLaMA's feed-forward layer `down(silu(gate(x)) * up(x))`.

    Args:
        width: features of input and output.
        inner: features between the layers.
        linear: builds a linear layer from its input and output features.
    """

    def __init__(self, width: int, inner: int, linear: MakeLinear) -> None:
        super().__init__()
        self.gate: nn.Linear = linear(width, inner)
        self.up: nn.Linear = linear(width, inner)
        self.down: nn.Linear = linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., width)` to `(..., width)`."""
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


@final
class Block(nn.Module):
    """One residual block: `x += attention(norm(x))`, then `x += mlp(norm(x))`.

    Args:
        attention: the attention layer.
        mlp: the feed-forward layer, or a mixture of experts.
        norms: the norms of the two inputs.
    """

    def __init__(self, attention: Attention, mlp: nn.Module, norms: tuple[nn.Module, nn.Module]) -> None:
        super().__init__()
        self.attention_norm: nn.Module = norms[0]
        self.mlp_norm: nn.Module = norms[1]
        self.attention: Attention = attention
        self.mlp: nn.Module = mlp

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        """Map `(B, T, width)` to `(B, T, width)`."""
        x = x + self.attention(self.attention_norm(x), turn)
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y
