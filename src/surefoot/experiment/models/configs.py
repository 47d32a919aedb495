"""Configurations of the reference models, and of published models at any width."""

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from surefoot.experiment.models.layers import LearnedPositions, Mixture
from surefoot.experiment.models.sizes import PUBLISHED, Size, published_name
from surefoot.layers import Rope

Norm = Literal["pre", "in"]  # a norm before each half block, or an In-Norm in every linear layer
Head = Literal["untied", "tied", "tied_scaled"]  # tied_scaled: logits times 1/width
Biases = Literal["none", "all"]

GPT2_CONTEXT = 1024  # learned positions


@dataclass(frozen=True)
class DecoderConfig:
    """What the configurations of all decoders have.

    Args:
        size: width, depth, head dimension, vocabulary.
        norm: "pre" for a norm before each half block, "in" for In-Norm linear layers and no other norm.
        head: "tied" shares the embedding's matrix; "tied_scaled" also multiplies the logits by 1/width, so that
            rows of RMS 1 (the embedding's rule) act as rows of RMS 1/width (the head's rule).
        base_head_dim: `d0` of the attention scale `1/sqrt(d0) * d0/d`; None means the model's own.

    Raises:
        ValueError: an unknown choice, or rotary positions with an odd head dimension.
    """

    size: Size
    norm: Norm = "pre"
    head: Head = "untied"
    base_head_dim: int | None = None

    def __post_init__(self) -> None:
        for option, choices in (("norm", Norm), ("biases", Biases), ("head", Head)):
            if (value := getattr(self, option, None)) not in (None, *get_args(choices)):
                raise ValueError(f"{option}={value!r} is unknown; choose from {', '.join(get_args(choices))}")
        if isinstance(getattr(self, "positions", Rope()), Rope) and self.size.head_dim % 2:
            raise ValueError(f"rotary positions need an even head dimension, got {self.size.head_dim}")


@dataclass(frozen=True)
class GPTConfig(DecoderConfig):
    """Configuration of a GPT-2-like decoder; the defaults are the model of the learning-rate study.

    Args:
        positions: `Rope()`, or `LearnedPositions(context)` as in GPT-2.
        biases: "all" for biases in linear layers and LayerNorms, as in GPT-2.
    """

    positions: Rope | LearnedPositions = field(default_factory=Rope)
    biases: Biases = "none"


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """Configuration of a LLaMA-like decoder: RMSNorm, rotary positions, gated feed-forward layers, no biases.

    Args:
        intermediate: inner width of the feed-forward layers; None means the multiple of 8 nearest to 8/3 width.
        kv_heads: key-value heads; None means as many as heads (no grouping).
        rope: rotary positions.
        qk_norm: an RMSNorm on each head's queries and keys, as in Qwen3.
        mixture: experts in place of each feed-forward layer; None is a dense layer.

    Raises:
        ValueError: as `DecoderConfig`, `intermediate` below 1, or experts without the norm before them.
    """

    intermediate: int | None = None
    kv_heads: int | None = None
    rope: Rope = field(default_factory=Rope)
    qk_norm: bool = False
    mixture: Mixture | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.intermediate is not None and self.intermediate < 1:
            raise ValueError(f"intermediate must be at least 1, got {self.intermediate}")
        if self.norm == "in" and self.mixture is not None:
            raise ValueError("experts need the norm before them: norm='in' has none, take norm='pre'")

    @property
    def inner(self) -> int:
        """Inner width of a feed-forward layer, or of an expert."""
        return self.intermediate or max(8, round(self.size.width / 3) * 8)


def published_config(name: str, width: int | None = None) -> GPTConfig | LlamaConfig:
    """The configuration of a published model.

    Args:
        name: of `sizes.PUBLISHED`; underscores may stand for hyphens.
        width: in place of the published one, all else but the widths that follow from it being the same.

    Returns:
        The configuration.

    Raises:
        ValueError: an unknown name, or a width that is no multiple of the head dimension.

    Source: Radford et al. 2019, https://huggingface.co/openai-community/gpt2; Lialin et al. 2023 (ReLoRA),
    https://github.com/Guitaricet/relora, configs/llama_130m.json.

    >>> published_config("llama-130m").inner
    2048
    """
    name = published_name(name)
    if name not in PUBLISHED:
        raise ValueError(f"unknown published model {name!r}; choose from {', '.join(PUBLISHED)}")
    size = PUBLISHED[name] if width is None else replace(PUBLISHED[name], width=width)
    if name.startswith("llama"):
        return LlamaConfig(size)
    return GPTConfig(size, positions=LearnedPositions(GPT2_CONTEXT), biases="all", head="tied")
