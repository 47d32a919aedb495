"""Reference models: GPT-2-like and LLaMA-like decoders by width, depth, head dimension and vocabulary."""

from collections.abc import Callable
from functools import partial
from typing import Any, Self

from torch import Tensor, nn

from surefoot.experiment.models.configs import DecoderConfig, GPTConfig, LlamaConfig, published_config
from surefoot.experiment.models.layers import Block, LearnedPositions, Mixture
from surefoot.experiment.models.sizes import Size
from surefoot.layers import Attention, Heads, Rope, attention_scale

__all__ = ["Decoder", "GPTConfig", "LearnedPositions", "LlamaConfig", "Rope", "Size", "reference"]


class Decoder(nn.Module):
    """The reference models: tokens `(B, T)` int64 -> logits `(B, T, vocab)`.

    Args:
        config: the sizes and the layers.

    Attributes:
        output_multiplier: factor on the logits, 1/width for a "tied_scaled" head; None means none.

    >>> import torch
    >>> model = Decoder(GPTConfig(Size(width=32, depth=2, head_dim=16, vocab=256)))
    >>> model(torch.zeros(1, 5, dtype=torch.int64)).shape
    torch.Size([1, 5, 256])
    >>> model = Decoder(LlamaConfig(Size(width=64, depth=2, head_dim=16, vocab=256), kv_heads=2))
    >>> model.blocks[0].attention.key.weight.shape
    torch.Size([32, 64])
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        size, positions = config.size, config.positions
        norm = nn.Identity if config.norm == "in" else config.layer_norm
        rope = positions if isinstance(positions, Rope) else None
        head_norm = config.layer_norm if config.qk_norm else None
        scale = attention_scale(size.head_dim, config.base_head_dim)
        heads = Heads(size.heads, size.head_dim, size.heads if config.kv_heads is None else config.kv_heads, scale)

        def block() -> Block:
            attention = Attention(heads, rope, config.linear, head_norm)
            return Block(attention, config.mlp(), (norm(size.width), norm(size.width)))

        blocks = [block() for _ in range(size.depth)]
        self.config: DecoderConfig = config
        self.positions: Rope | LearnedPositions = positions
        self.embedding: nn.Embedding = nn.Embedding(size.vocab, size.width)
        if isinstance(positions, LearnedPositions):
            self.position_embedding: nn.Embedding = nn.Embedding(positions.context, size.width)
        self.blocks: nn.ModuleList = nn.ModuleList(blocks)
        self.final_norm: nn.Module = norm(size.width)
        self.head: nn.Linear = config.linear(size.width, size.vocab, head=True)
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


def reference(name: str, width: int, depth: int = 2, head_dim: int = 16, vocab: int = 256, **options: Any) -> Decoder:
    """Build a reference model by name, with torch's initial values.

    Args:
        name: "gpt" (the model of the learning-rate study) or "llama"; "qwen" is a llama with norms on queries and
            keys, "moe" a qwen whose feed-forward layers are two of four experts, "tied" a gpt whose head is the
            embedding, its logits multiplied by 1/width.
        width: features of the residual stream, a multiple of `head_dim`.
        depth: number of residual blocks.
        head_dim: features of an attention head.
        vocab: number of tokens.
        **options: others of its configuration, `GPTConfig` or `LlamaConfig`; "tied" has a head of its own.

    Returns:
        The model.

    Raises:
        ValueError: an unknown name, an unknown choice of an option, or a size that does not fit.

    >>> sum(p.numel() for p in reference("gpt", width=32).parameters())
    41120
    """
    if name not in REFERENCES:
        raise ValueError(f"unknown reference model {name!r}; choose from {', '.join(REFERENCES)}")
    size = Size(width, depth, head_dim, vocab)
    return Decoder(REFERENCES[name](size=size, **options))


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
    return Decoder(published_config(name, width))


REFERENCES: dict[str, Callable[..., DecoderConfig]] = {
    "gpt": GPTConfig,
    "llama": LlamaConfig,
    "qwen": partial(LlamaConfig, qk_norm=True),
    "moe": partial(LlamaConfig, qk_norm=True, mixture=Mixture(experts=4, active=2)),
    "tied": lambda **options: GPTConfig(**options | {"head": "tied_scaled"}),
}
"""Configurations of the reference models by name; all take `size`."""
