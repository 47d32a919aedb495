"""The layers of the reference decoders that are not public: learned positions, feed-forward, experts, block."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.layers.attention import Attention, MakeLinear


@dataclass(frozen=True)
class LearnedPositions:
    """Learned positions: one row per position is added to the token's row.

    Args:
        context: number of positions, the longest input.
    """

    context: int = 1024


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


@dataclass(frozen=True)
class Mixture:
    """Number of experts in a feed-forward layer, and how many of them compute each token.

    Args:
        experts: number of experts E.
        active: experts per token, 1 to E.

    Raises:
        ValueError: `active` out of range.
    """

    experts: int
    active: int

    def __post_init__(self) -> None:
        if not 1 <= self.active <= self.experts:
            raise ValueError(f"active must be from 1 to {self.experts}, not {self.active}")


class Experts(nn.Module):
    """Stacked gated experts `down(silu(gate(x)) * up(x))`, gate and up in one parameter, in transformers' layout.

    Every expert computes every token, and the weights of the experts that were not chosen are 0: simple, and fast
    enough for a few small experts.

    Args:
        count: number of experts E.
        width: features of an expert's input and output.
        inner: features between its matrices.
    """

    has_gate: bool = True
    is_transposed: bool = False
    is_concatenated: bool = True

    def __init__(self, count: int, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj: nn.Parameter = nn.Parameter(torch.empty(count, 2 * inner, width))
        self.down_proj: nn.Parameter = nn.Parameter(torch.empty(count, width, inner))
        for matrix in (*self.gate_up_proj, *self.down_proj):
            nn.init.kaiming_uniform_(matrix, a=5**0.5)  # as nn.Linear

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum `(N, width)` of all experts' outputs, for tokens `(N, width)`, weights `(N, E)`."""
        gate, up = torch.einsum("nd,eod->neo", x, self.gate_up_proj).chunk(2, dim=-1)
        y = torch.einsum("nei,edi->ned", F.silu(gate) * up, self.down_proj)
        return (y * weights[..., None]).sum(1)


class MixtureOfExperts(nn.Module):
    """A router and its experts: each token takes the experts with the largest logits, weighted by their softmax.

    Args:
        mixture: number of experts, and of those that a token takes.
        width: features of the layer's input and output.
        inner: features between an expert's matrices.
    """

    def __init__(self, mixture: Mixture, width: int, inner: int) -> None:
        super().__init__()
        self.active: int = mixture.active
        self.router: nn.Linear = nn.Linear(width, mixture.experts, bias=False)
        self.experts: Experts = Experts(mixture.experts, width, inner)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., width)` to `(..., width)`."""
        flat = x.reshape(-1, x.shape[-1])
        logits = self.router(flat)
        best, chosen = logits.topk(self.active, dim=-1)
        weights = torch.zeros_like(logits).scatter(-1, chosen, best.softmax(-1))
        y: Tensor = self.experts(flat, weights)
        return y.reshape(x.shape)


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
