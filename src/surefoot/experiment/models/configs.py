"""Configurations of the reference models, and published configurations by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, final, get_args

from surefoot.experiment.models.layers import Learned
from surefoot.experiment.models.moe import Mixture
from surefoot.layers import Rope

Norm = Literal["pre", "in"]  # a norm before each half block, or an In-Norm in every linear layer
Head = Literal["untied", "tied", "tied_scaled"]  # tied_scaled: logits times 1/width
Biases = Literal["none", "all"]


def _check_choice(option: str, value: str, choices: object) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{option}={value!r} is unknown; choose from {', '.join(get_args(choices))}")


@final
@dataclass(frozen=True)
class Size:
    """Size of a decoder, from which every shape follows.

    Args:
        width: features of the residual stream, a multiple of `head_dim`.
        depth: number of residual blocks.
        head_dim: features of an attention head.
        vocab: number of tokens.

    Raises:
        ValueError: a number below 1, or a width that is no multiple of the head dimension.

    >>> Size(width=64, depth=2, head_dim=16, vocab=256).heads
    4
    """

    width: int
    depth: int
    head_dim: int
    vocab: int

    def __post_init__(self) -> None:
        for name in ("width", "depth", "head_dim", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.head_dim:
            below = self.width // self.head_dim * self.head_dim
            near = ", ".join(str(w) for w in (below, below + self.head_dim) if w > 0)
            raise ValueError(
                f"width {self.width} is not a multiple of the head dimension {self.head_dim}: "
                f"take width {near}, or a head dimension that divides it"
            )

    @property
    def heads(self) -> int:
        """Number of attention heads."""
        return self.width // self.head_dim


def _check_rope(size: Size) -> None:
    if size.head_dim % 2:
        raise ValueError(f"rotary positions need an even head dimension, got {size.head_dim}")


@final
@dataclass(frozen=True)
class GPTConfig:
    """Configuration of a GPT-2-like decoder; the defaults are the model of the learning-rate study.

    Args:
        size: width, depth, head dimension, vocabulary.
        positions: `Rope()`, or `Learned(context)` as in GPT-2.
        norm: "pre" for LayerNorm before each half block, "in" for In-Norm linear layers and no other norm.
        biases: "all" for biases in linear layers and LayerNorms, as in GPT-2.
        head: "tied" shares the embedding's matrix; "tied_scaled" also multiplies the logits by 1/width, so that
            rows of RMS 1 (the embedding's rule) act as rows of RMS 1/width (the head's rule).
        base_head_dim: `d0` of the attention scale `1/sqrt(d0) * d0/d`; None means the model's own.

    Raises:
        ValueError: an unknown choice, or rotary positions with an odd head dimension.
    """

    size: Size
    positions: Rope | Learned = field(default_factory=Rope)
    norm: Norm = "pre"
    biases: Biases = "none"
    head: Head = "untied"
    base_head_dim: int | None = None

    def __post_init__(self) -> None:
        _check_choice("norm", self.norm, Norm)
        _check_choice("biases", self.biases, Biases)
        _check_choice("head", self.head, Head)
        if isinstance(self.positions, Rope):
            _check_rope(self.size)


@final
@dataclass(frozen=True)
class LlamaConfig:
    """Configuration of a LLaMA-like decoder: RMSNorm, rotary positions, gated feed-forward layers, no biases.

    Args:
        size: width, depth, head dimension, vocabulary.
        intermediate: inner width of the feed-forward layers; None means the multiple of 8 nearest to 8/3 width.
        kv_heads: key-value heads; None means as many as heads (no grouping).
        rope: rotary positions.
        norm: as in `GPTConfig`.
        head: as in `GPTConfig`.
        base_head_dim: as in `GPTConfig`.
        qk_norm: an RMSNorm on each head's queries and keys, as in Qwen3.
        mixture: experts in place of each feed-forward layer; None is a dense layer.

    Raises:
        ValueError: an unknown choice, an odd head dimension, `intermediate` below 1, or experts without the norm before
            them.
    """

    size: Size
    intermediate: int | None = None
    kv_heads: int | None = None
    rope: Rope = field(default_factory=Rope)
    norm: Norm = "pre"
    head: Head = "untied"
    base_head_dim: int | None = None
    qk_norm: bool = False
    mixture: Mixture | None = None

    def __post_init__(self) -> None:
        _check_choice("norm", self.norm, Norm)
        _check_choice("head", self.head, Head)
        _check_rope(self.size)
        if self.intermediate is not None and self.intermediate < 1:
            raise ValueError(f"intermediate must be at least 1, got {self.intermediate}")
        if self.norm == "in" and self.mixture is not None:
            raise ValueError("experts need the norm before them: norm='in' has none, take norm='pre'")

    @property
    def inner(self) -> int:
        """Inner width of a feed-forward layer, or of an expert."""
        return self.intermediate or max(8, round(self.size.width / 3) * 8)


def _gpt2(width: int, depth: int) -> GPTConfig:
    size = Size(width, depth, head_dim=64, vocab=50257)
    return GPTConfig(size, positions=Learned(1024), biases="all", head="tied")


PUBLISHED: dict[str, GPTConfig | LlamaConfig] = {
    # Radford et al. 2019, https://huggingface.co/openai-community/gpt2
    "gpt2_small": _gpt2(768, 12),
    "gpt2_medium": _gpt2(1024, 24),
    "gpt2_large": _gpt2(1280, 36),
    "gpt2_xl": _gpt2(1600, 48),
    # Lialin et al. 2023 (ReLoRA), https://github.com/Guitaricet/relora, configs/llama_130m.json
    "llama_130m": LlamaConfig(Size(768, 12, head_dim=64, vocab=32000), intermediate=2048),
}
