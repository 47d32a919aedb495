"""Reference models: GPT-2-like and LLaMA-like decoders by width, depth, head dimension and vocabulary."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self, final

from torch import Tensor, nn

from surefoot.experiment.models.configs import (
    Biases,
    DecoderConfig,
    GPTConfig,
    Head,
    LlamaConfig,
    Norm,
    published_config,
)
from surefoot.experiment.models.layers import MLP, Block, GatedMLP, LearnedPositions, Mixture, MixtureOfExperts
from surefoot.experiment.models.sizes import Size
from surefoot.layers import Attention, Heads, InNormLinear, Rope, attention_scale
from surefoot.layers.attention import MakeLinear

__all__ = ["GPT", "Decoder", "GPTConfig", "LearnedPositions", "Llama", "LlamaConfig", "Rope", "Size", "reference"]

LAYER_NORM_EPS = 1e-5  # GPT-2's layer_norm_epsilon
RMS_NORM_EPS = 1e-6  # LLaMA's rms_norm_eps


class Decoder(nn.Module, ABC):
    """Base of the reference models: tokens `(B, T)` int64 -> logits `(B, T, vocab)`.

    Args:
        config: size, norm and head are read from it.
        positions: rotary or learned.
        blocks: the residual blocks, in their order.
        final_norm: the norm before the head.

    Attributes:
        output_multiplier: factor on the logits, 1/width for a "tied_scaled" head; None means none.
    """

    def __init__(
        self, config: DecoderConfig, positions: Rope | LearnedPositions, blocks: Sequence[Block], final_norm: nn.Module
    ) -> None:
        super().__init__()
        size = config.size
        self.config: DecoderConfig = config
        self.positions: Rope | LearnedPositions = positions
        self.embedding: nn.Embedding = nn.Embedding(size.vocab, size.width)
        if isinstance(positions, LearnedPositions):
            self.position_embedding: nn.Embedding = nn.Embedding(positions.context, size.width)
        self.blocks: nn.ModuleList = nn.ModuleList(blocks)
        self.final_norm = final_norm
        self.head: nn.Linear = _make_linear(config.norm, biased="none")(size.width, size.vocab)
        self.output_multiplier: float | None = 1 / size.width if config.head == "tied_scaled" else None
        self._tie()

    def _tie(self) -> None:
        if self.config.head != "untied":
            self.head.weight = self.embedding.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply `fn` to every tensor, then tie the head again: `to_empty` on a meta model unties it."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._tie()
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the logits of the next tokens.

        Args:
            tokens: `(B, T)`, int64.

        Returns:
            Logits `(B, T, vocab)`.

        Raises:
            ValueError: see `hidden`.
        """
        logits: Tensor = self.head(self.hidden(tokens))
        return logits if self.output_multiplier is None else logits * self.output_multiplier

    def hidden(self, tokens: Tensor) -> Tensor:
        """Compute what the head reads: the output of the final norm.

        Args:
            tokens: `(B, T)`, int64.

        Returns:
            Features `(B, T, width)`.

        Raises:
            ValueError: more tokens than the model has learned positions.
        """
        length, x, turn = tokens.shape[1], self.embedding(tokens), None
        if isinstance(self.positions, Rope):
            turn = self.positions.angles(length, self.config.size.head_dim, x.device)
        elif length > self.positions.context:
            raise ValueError(f"{length} tokens exceed the model's {self.positions.context} learned positions")
        else:
            x = x + self.position_embedding.weight[:length]
        for block in self.blocks:
            x = block(x, turn)
        features: Tensor = self.final_norm(x)
        return features

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the token embedding."""
        return self.embedding

    def get_output_embeddings(self) -> nn.Linear:
        """Return the language-model head; its weight is the embedding's where they are tied."""
        return self.head


@final
class GPT(Decoder):
    """GPT-2-like decoder: LayerNorm (or In-Norm), GELU, feed-forward layers of 4 times the width.

    Source: Radford et al. 2019, Language models are unsupervised multitask learners.

    Args:
        config: the model's configuration.

    >>> import torch
    >>> model = GPT(GPTConfig(Size(width=32, depth=2, head_dim=16, vocab=256)))
    >>> model(torch.zeros(1, 5, dtype=torch.int64)).shape
    torch.Size([1, 5, 256])
    """

    def __init__(self, config: GPTConfig) -> None:
        width, positions = config.size.width, config.positions
        rope = positions if isinstance(positions, Rope) else None
        linear = _make_linear(config.norm, config.biases)
        layer_norm = partial(nn.LayerNorm, eps=LAYER_NORM_EPS, bias=config.biases == "all")
        norm = _make_norm(config.norm, layer_norm)
        heads = _heads(config, config.size.heads)
        blocks = [
            Block(Attention(heads, rope, linear), MLP(width, 4 * width, linear), (norm(width), norm(width)))
            for _ in range(config.size.depth)
        ]
        super().__init__(config, positions, blocks, norm(width))


@final
class Llama(Decoder):
    """LLaMA-like decoder: RMSNorm (or In-Norm), rotary positions, gated feed-forward layers, no biases.

    Source: Touvron et al. 2023, https://arxiv.org/abs/2302.13971.

    Args:
        config: the model's configuration.

    >>> model = Llama(LlamaConfig(Size(width=64, depth=2, head_dim=16, vocab=256), kv_heads=2))
    >>> model.blocks[0].attention.key.weight.shape
    torch.Size([32, 64])
    """

    def __init__(self, config: LlamaConfig) -> None:
        width, rope = config.size.width, config.rope
        linear = _make_linear(config.norm, biased="none")
        norm = _make_norm(config.norm, partial(nn.RMSNorm, eps=RMS_NORM_EPS))
        heads = _heads(config, config.size.heads if config.kv_heads is None else config.kv_heads)
        head_norm = partial(nn.RMSNorm, eps=RMS_NORM_EPS) if config.qk_norm else None

        def mlp() -> nn.Module:
            if config.mixture is None:
                return GatedMLP(width, config.inner, linear)
            return MixtureOfExperts(config.mixture, width, config.inner)

        blocks = [
            Block(Attention(heads, rope, linear, head_norm), mlp(), (norm(width), norm(width)))
            for _ in range(config.size.depth)
        ]
        super().__init__(config, rope, blocks, norm(width))


def _make_linear(norm: Norm, biased: Biases) -> MakeLinear:
    kind = InNormLinear if norm == "in" else nn.Linear
    return partial(kind, bias=biased == "all")


def _make_norm(norm: Norm, pre_norm: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    return nn.Identity if norm == "in" else pre_norm  # In-Norm layers normalise their own input


def _heads(config: DecoderConfig, kv_count: int) -> Heads:
    size = config.size
    return Heads(size.heads, size.head_dim, kv_count, attention_scale(size.head_dim, config.base_head_dim))


def reference(
    name: str,
    width: int,
    depth: int = 2,
    head_dim: int = 16,
    vocab: int = 256,
    *,
    norm: Norm = "pre",
    head: Head = "untied",
    base_head_dim: int | None = None,
) -> Decoder:
    """Build a reference model by name, with rotary positions, without biases, and with torch's initial values.

    Args:
        name: "gpt" (the model of the learning-rate study) or "llama"; "qwen" is a llama with norms on queries and
            keys, "moe" a qwen whose feed-forward layers are two of four experts, "tied" a gpt whose head is the
            embedding, its logits multiplied by 1/width.
        width: features of the residual stream, a multiple of `head_dim`.
        depth: number of residual blocks.
        head_dim: features of an attention head.
        vocab: number of tokens.
        norm: as in `GPTConfig`.
        head: as in `GPTConfig`; "tied" has its own.
        base_head_dim: as in `GPTConfig`.

    Returns:
        The model.

    Raises:
        ValueError: an unknown name, an unknown option, or a size that does not fit.

    >>> sum(p.numel() for p in reference("gpt", width=32).parameters())
    41120
    """
    if name not in REFERENCES:
        raise ValueError(f"unknown reference model {name!r}; choose from {', '.join(REFERENCES)}")
    size = Size(width, depth, head_dim, vocab)
    return REFERENCES[name](size=size, norm=norm, head=head, base_head_dim=base_head_dim)


def published(name: str, width: int | None = None) -> Decoder:
    """Build a published configuration by name, with torch's initial values.

    Args:
        name: see `published_config`.
        width: see `published_config`.

    Returns:
        The model.

    Raises:
        ValueError: an unknown name, or a width that does not fit.

    >>> import torch
    >>> with torch.device("meta"):
    ...     sum(p.numel() for p in published("gpt2-small").parameters())
    124439808
    """
    config = published_config(name, width)
    return GPT(config) if isinstance(config, GPTConfig) else Llama(config)


def _gpt(**options: Any) -> Decoder:
    return GPT(GPTConfig(**options))


def _llama(**options: Any) -> Decoder:
    return Llama(LlamaConfig(**options))


REFERENCES: dict[str, Callable[..., Decoder]] = {
    "gpt": _gpt,
    "llama": _llama,
    "qwen": partial(_llama, qk_norm=True),
    "moe": partial(_llama, qk_norm=True, mixture=Mixture(experts=4, active=2)),
    "tied": lambda head, **options: _gpt(head="tied_scaled", **options),
}
"""Builders of the reference models by name; all take `size`, `norm`, `head` and `base_head_dim`."""
