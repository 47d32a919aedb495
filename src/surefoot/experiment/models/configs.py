"""Configurations of the reference models, and of published models at any width: their sizes and their layers."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from torch import nn

from surefoot.experiment.models.layers import MLP, GatedMLP, LearnedPositions, Mixture, MixtureOfExperts
from surefoot.experiment.models.sizes import PUBLISHED, Size, published_name
from surefoot.layers import InNormLinear, Rope

Norm = Literal["pre", "in"]  # a norm before each half block, or an In-Norm in every linear layer
Head = Literal["untied", "tied", "tied_scaled"]  # tied_scaled: logits times 1/width
Biases = Literal["none", "all"]

GPT2_CONTEXT = 1024  # learned positions
LAYER_NORM_EPS = 1e-5  # GPT-2's layer_norm_epsilon
RMS_NORM_EPS = 1e-6  # LLaMA's rms_norm_eps


@dataclass(frozen=True)
class DecoderConfig(ABC):
    """Settings that the configurations of all decoders share.

    Args:
        size: width, depth, head dimension, vocabulary.
        norm: "pre" for a norm before each half block, "in" for In-Norm linear layers and no other norm.
        head: "tied" shares the embedding's matrix; "tied_scaled" also multiplies the logits by 1/width, so that
            rows of RMS 1 (the embedding's rule) act as rows of RMS 1/width (the head's rule).
        base_head_dim: `d0` of the attention scale `1/sqrt(d0) * d0/d`; None means the model's own.
        positions: `Rope()`, or `LearnedPositions(context)` as in GPT-2.
        biases: "all" for biases in the linear layers of blocks and in LayerNorms, as in GPT-2.
        kv_heads: key-value heads; None means as many as heads (no grouping).
        qk_norm: a norm on each head's queries and keys, as in Qwen3.

    Raises:
        ValueError: an unknown choice, or rotary positions with an odd head dimension.
    """

    size: Size
    norm: Norm = "pre"
    head: Head = "untied"
    base_head_dim: int | None = None
    positions: Rope | LearnedPositions = field(default_factory=Rope)
    biases: Biases = "none"
    kv_heads: int | None = None
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for option, choices in (("norm", Norm), ("biases", Biases), ("head", Head)):
            if (value := getattr(self, option)) not in get_args(choices):
                raise ValueError(f"{option}={value!r} is unknown; choose from {', '.join(get_args(choices))}")
        if isinstance(self.positions, Rope) and self.size.head_dim % 2:
            raise ValueError(f"rotary positions need an even head dimension, got {self.size.head_dim}")

    def linear(self, d_in: int, d_out: int, head: bool = False) -> nn.Linear:
        """A linear layer of a block, or the head, which has no bias."""
        bias = self.biases == "all" and not head
        return (InNormLinear if self.norm == "in" else nn.Linear)(d_in, d_out, bias=bias)

    @abstractmethod
    def layer_norm(self, width: int) -> nn.Module:
        """A norm over vectors of this width."""

    @abstractmethod
    def mlp(self) -> nn.Module:
        """The feed-forward layer of a block."""


class GPTConfig(DecoderConfig):
    """Configuration of a GPT-2-like decoder; the defaults are the model of the learning-rate study.

    LayerNorm (or In-Norm), GELU, feed-forward layers of 4 times the width. Arguments as `DecoderConfig`.

    Source: Radford et al. 2019, Language models are unsupervised multitask learners.
    """

    def layer_norm(self, width: int) -> nn.LayerNorm:
        """A LayerNorm, with a bias if linear layers have one."""
        return nn.LayerNorm(width, eps=LAYER_NORM_EPS, bias=self.biases == "all")

    def mlp(self) -> MLP:
        """The feed-forward layer of a block."""
        return MLP(self.size.width, 4 * self.size.width, self.linear)


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """Configuration of a LLaMA-like decoder: RMSNorm (or In-Norm), rotary positions, gated feed-forward layers.

    Source: Touvron et al. 2023, https://arxiv.org/abs/2302.13971.

    Args:
        intermediate: inner width of the feed-forward layers; None means the multiple of 8 nearest to 8/3 width.
        mixture: experts in place of each feed-forward layer; None is a dense layer.

    Raises:
        ValueError: as `DecoderConfig`, `intermediate` below 1, or experts without the norm before them.
    """

    intermediate: int | None = None
    mixture: Mixture | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.intermediate is not None and self.intermediate < 1:
            raise ValueError(f"intermediate must be at least 1, got {self.intermediate}")
        if self.norm == "in" and self.mixture is not None:
            raise ValueError("experts need a norm before them, which norm='in' lacks: give norm='pre'")

    @property
    def inner(self) -> int:
        """Inner width of a feed-forward layer, or of an expert."""
        return self.intermediate or max(8, round(self.size.width / 3) * 8)

    def layer_norm(self, width: int) -> nn.RMSNorm:
        """An RMSNorm."""
        return nn.RMSNorm(width, eps=RMS_NORM_EPS)

    def mlp(self) -> GatedMLP | MixtureOfExperts:
        """The feed-forward layer of a block, or its experts."""
        if self.mixture is None:
            return GatedMLP(self.size.width, self.inner, self.linear)
        return MixtureOfExperts(self.mixture, self.size.width, self.inner)


def published_config(name: str, width: int | None = None) -> DecoderConfig:
    """The configuration of a published model.

    Args:
        name: of `sizes.PUBLISHED`; underscores may stand for hyphens.
        width: in place of the published one; all else stays, but for widths that follow from it.

    Returns:
        The configuration.

    Raises:
        ValueError: an unknown name, or a width that is no multiple of the head dimension.

    Source: Radford et al. 2019, https://huggingface.co/openai-community/gpt2; Lialin et al. 2023 (ReLoRA),
    https://github.com/Guitaricet/relora, configs/llama_130m.json.

    >>> published_config("llama-130m").mlp().up.out_features
    2048
    """
    name = published_name(name)
    if name not in PUBLISHED:
        raise ValueError(f"unknown published model {name!r}; choose from {', '.join(PUBLISHED)}")
    size = PUBLISHED[name] if width is None else replace(PUBLISHED[name], width=width)
    if name.startswith("llama"):
        return LlamaConfig(size)
    return GPTConfig(size, positions=LearnedPositions(GPT2_CONTEXT), biases="all", head="tied")
