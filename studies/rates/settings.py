"""Settings that the law of a run's length does not know: models, data and lengths of runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.experiment.models.configs import GPTConfig, LlamaConfig
from surefoot.experiment.models.decoder import Decoder
from surefoot.experiment.models.layers import LearnedPositions, Mixture
from surefoot.experiment.models.sizes import Size


@dataclass(frozen=True)
class Setting:
    """A model, its data and the length of a run.

    Args:
        model: builds it, for a vocabulary.
        data: as `surefoot train --data` takes it; or "digits"; or "digits, shifted": each by up to a pixel, drawn anew.
        steps: of the run.
        batch: sequences, or pictures, a step.
        context: tokens of a sequence.
        held: whether nothing was chosen after it.
        initialise: whether the plan writes the initial values; else they are the model's own.
        flat: whether the curve is so flat, or its vertex so far from the others', that three seeds are too few.
    """

    model: Callable[[int], nn.Module]
    data: str | None = None
    steps: int = 150
    batch: int = 16
    context: int = 64
    held: bool = False
    initialise: bool = True
    flat: bool = False

    @property
    def run(self) -> sf.Run:
        """The length of the run."""
        return sf.Run(self.steps, self.batch * self.context)

    @property
    def pictures(self) -> bool:
        """Whether the data are pictures."""
        return (self.data or "").startswith("digits")

    @property
    def seeds(self) -> range:
        """Three; nine of flat curves, and of pictures, whose losses differ by .1 to .2 nats between seeds."""
        return range(820, 829 if self.flat or self.pictures else 823)


def gpt(width: int = 64, depth: int = 2, head_dim: int = 16, **options: Any) -> Callable[[int], nn.Module]:
    """The reference GPT."""
    return lambda vocab: Decoder(GPTConfig(Size(width, depth, head_dim, vocab), **options))


def llama(width: int = 64, depth: int = 2, head_dim: int = 16, **options: Any) -> Callable[[int], nn.Module]:
    """The reference LLaMA."""
    return lambda vocab: Decoder(LlamaConfig(Size(width, depth, head_dim, vocab), **options))


class Logits(nn.Module):
    """A model of `transformers` as a function from tokens to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """`(B, T)` -> `(B, T, vocab)`."""
        logits: Tensor = self.model(input_ids=tokens).logits
        return logits


def transformer(family: str, width: int = 64, tied: bool | None = None) -> Callable[[int], nn.Module]:
    """A family of studies/wiring: two blocks and four heads, from its configuration."""

    def build(vocab: int) -> nn.Module:
        from wiring import families  # needs transformers

        found = families.FAMILIES[family]
        config = found.config(width)
        config.vocab_size, config.tie_word_embeddings = vocab, found.tied if tied is None else tied
        return Logits(found.model(config))

    return build


class VisionTransformer(nn.Module):
    """A vision transformer for pictures of 8 x 8, whose class is read off a token of its own or the patches' mean."""

    def __init__(self, width: int = 64, depth: int = 2, mean: bool = False) -> None:
        super().__init__()
        self.mean = mean
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.class_token, self.positions = (nn.Parameter(torch.randn(1, n, width)) for n in (1, 17))
        options = {"dropout": 0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, 4, 4 * width, **options) for _ in range(depth)), nn.LayerNorm(width)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, pictures: Tensor) -> Tensor:
        """`(B, 1, 8, 8)` -> `(B, 10)`."""
        x = self.patches(pictures).flatten(2).mT
        x = torch.cat([self.class_token.expand(len(x), 1, -1), x], dim=1) + self.positions
        x = self.blocks(x)
        return self.head(x[:, 1:].mean(1) if self.mean else x[:, 0])


class Residual(nn.Module):
    """A residual branch of two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        first, second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.branch = nn.Sequential(nn.BatchNorm2d(channels), first, nn.ReLU(), second)

    def forward(self, x: Tensor) -> Tensor:
        """`(B, channels, H, W)`, the same."""
        return x + self.branch(x)


def convolutional(channels: int, norm: Callable[[int], nn.Module] = lambda _: nn.Identity()) -> nn.Module:
    """A convolutional network for pictures of 8 x 8."""
    first, second = nn.Conv2d(1, channels, 3), nn.Conv2d(channels, channels, 3)
    body = (first, norm(channels), nn.ReLU(), second, norm(channels), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten())
    return nn.Sequential(*body, nn.Linear(4 * channels, 10))


def residual(channels: int) -> nn.Module:
    """A residual network of two branches for pictures of 8 x 8."""
    body = (nn.Conv2d(1, channels, 3, padding=1), Residual(channels), Residual(channels), nn.BatchNorm2d(channels))
    return nn.Sequential(*body, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def perceptron(width: int) -> nn.Module:
    """Two hidden layers for pictures of 8 x 8."""
    body = (nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    return nn.Sequential(nn.Flatten(), *body, nn.Linear(width, 10))


OTHER_TEXT = f"text:{Path(torch.__file__).parent / 'include' / 'ATen'}"
"""C++ headers of torch."""

SETTINGS: dict[str, Setting] = {
    "gpt": Setting(gpt()),
    "gpt tied": Setting(gpt(head="tied")),
    "gpt tied, logits times 1/d": Setting(gpt(head="tied_scaled")),
    "gpt learned positions": Setting(gpt(positions=LearnedPositions(64))),
    "gpt biases": Setting(gpt(biases="all")),
    "gpt its own initial values": Setting(gpt(), initialise=False),
    "llama": Setting(llama()),
    "experts": Setting(llama(mixture=Mixture(4, 2))),
    "bpe 2k": Setting(gpt(), "bpe:2048"),
    "context 128, batch 8": Setting(gpt(), batch=8, context=128),
    "hf gpt2": Setting(transformer("gpt2"), flat=True),
    "hf gpt2 its own initial values": Setting(transformer("gpt2"), initialise=False, flat=True),
    "hf gpt2, 300 steps": Setting(transformer("gpt2"), steps=300),
    "hf gpt2 untied": Setting(transformer("gpt2", tied=False)),
    "hf llama 32": Setting(transformer("llama", 32)),
    "hf gemma": Setting(transformer("gemma")),
    "batch 1": Setting(gpt(), batch=1),
    "batch 2": Setting(gpt(), batch=2),
    "digits, convolutions": Setting(lambda _: convolutional(16), "digits", batch=64, context=1),
    "digits, convolutions 64": Setting(lambda _: convolutional(64), "digits", batch=64, context=1),
    "digits, batch norm": Setting(lambda _: convolutional(16, nn.BatchNorm2d), "digits", batch=64, context=1),
    "digits, residual": Setting(lambda _: residual(32), "digits", batch=64, context=1),
    "digits, perceptron": Setting(lambda _: perceptron(128), "digits", batch=64, context=1),
    "other text": Setting(gpt(), OTHER_TEXT, held=True, flat=True),
    "bpe 1k": Setting(gpt(), "bpe:1024", held=True),
    "bpe 8k": Setting(gpt(), "bpe:8192", held=True),
    "context 32, batch 64": Setting(gpt(), batch=64, context=32, held=True),
    "context 256, batch 4": Setting(gpt(), batch=4, context=256),
    "250 steps": Setting(gpt(), steps=250, held=True),
    "1,200 steps": Setting(gpt(), steps=1200, held=True),
    "width 96, depth 6": Setting(gpt(96, 6), held=True),
    "llama 96, grouped": Setting(llama(96, kv_heads=2), held=True),
    "experts 96, other text": Setting(llama(96, mixture=Mixture(8, 2)), OTHER_TEXT, held=True),
    "gpt tied, bpe 1k": Setting(gpt(head="tied"), "bpe:1024"),
    "hf gpt2 96, 250 steps": Setting(transformer("gpt2", 96), steps=250),
    "hf llama": Setting(transformer("llama")),
    "hf qwen3": Setting(transformer("qwen3")),
    "context 256, batch 4, other text": Setting(gpt(), OTHER_TEXT, batch=4, context=256, held=True, flat=True),
    "hf gpt2 96, bpe 1k": Setting(transformer("gpt2", 96), "bpe:1024", flat=True),
    "hf llama 96, other text": Setting(transformer("llama", 96), OTHER_TEXT, held=True, flat=True),
    "hf qwen3 96, 250 steps": Setting(transformer("qwen3", 96), steps=250, held=True),
    "gpt tied, other text": Setting(gpt(head="tied"), OTHER_TEXT, held=True),
    "hf gpt2 96, other text": Setting(transformer("gpt2", 96), OTHER_TEXT, held=True, flat=True),
    "hf gpt2 128, 80 steps": Setting(transformer("gpt2", 128), steps=80, held=True),
    "llama 96 tied, bpe 2k": Setting(llama(96, head="tied"), "bpe:2048", held=True),
    "gpt 128, heads of 64": Setting(gpt(128, head_dim=64), held=True),
    "llama 128, heads of 128, other text": Setting(llama(128, head_dim=128), OTHER_TEXT, held=True),
    "llama 96 tied, logits times 1/d, other text": Setting(llama(96, head="tied_scaled"), OTHER_TEXT, held=True),
    "digits, vision transformer": Setting(lambda _: VisionTransformer(), "digits", batch=64, context=17),
    "digits, vision transformer 96, mean": Setting(
        lambda _: VisionTransformer(96, 3, mean=True), "digits", 200, 128, 1, held=True
    ),
    "shifted digits, vision transformer 96, mean": Setting(
        lambda _: VisionTransformer(96, 3, mean=True), "digits, shifted", 200, 128, 1
    ),
    "shifted digits, vision transformer 48, depth 4": Setting(
        lambda _: VisionTransformer(48, 4), "digits, shifted", 250, 64, 1, held=True
    ),
    "shifted digits, vision transformer 128, mean": Setting(
        lambda _: VisionTransformer(128, 2, mean=True), "digits, shifted", 150, 128, 1, held=True
    ),
    "shifted digits, residual 48": Setting(lambda _: residual(48), "digits, shifted", 200, 128, 1, held=True),
}
