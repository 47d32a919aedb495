"""Small models of `transformers`' families, built from configurations, and their losses on a batch of bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

DEPTH, HEADS, CONTEXT, VOCAB = 2, 4, 64, 256
MASK, MASKED = VOCAB, 0.15
"""BERT's mask token, beyond the bytes, and the part of the tokens that it replaces."""
MELS, FRAMES = 16, 2 * CONTEXT

Loss = Callable[[nn.Module, Tensor, Tensor, torch.Generator], Tensor]
"""`(model, tokens, next tokens, generator) -> mean cross entropy` in nats per predicted token."""


def causal(model: nn.Module, tokens: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
    """Next-byte prediction."""
    return F.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), targets.flatten())


def masked(model: nn.Module, tokens: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
    """Prediction of the bytes that a mask token replaces."""
    hidden = torch.rand(tokens.shape, generator=generator) < MASKED
    return F.cross_entropy(model(input_ids=tokens.masked_fill(hidden, MASK)).logits[hidden], tokens[hidden])


def spoken(model: nn.Module, tokens: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
    """Next-byte prediction beside synthetic audio: two frames a byte of its own mel values, and noise."""
    tones = torch.randn(VOCAB, MELS, generator=torch.Generator().manual_seed(0))
    sound = tones[targets].repeat_interleave(FRAMES // CONTEXT, 1)
    sound = sound + 2 * torch.randn(sound.shape, generator=generator)
    logits = model(input_features=sound.transpose(1, 2), decoder_input_ids=tokens).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Family:
    """A family of models.

    Args:
        model: the class that has an LM head.
        config: width -> the configuration's options.
        tied: whether the head is the embedding by default.
        loss: what is trained.
    """

    model: type[nn.Module]
    config: Callable[[int], Any]
    tied: bool
    loss: Loss = causal

    def build(self, width: int, seed: int, tied: bool) -> nn.Module:
        """The model with the class's own initial values."""
        config = self.config(width)
        config.tie_word_embeddings = tied
        torch.manual_seed(seed)
        return self.model(config)


def _decoder(config: type, width: int, **options: Any) -> Any:
    """A configuration with the names that LLaMA's has."""
    return config(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=width // HEADS,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **options,
    )


def _gpt2(width: int) -> Any:
    sizes = {"n_embd": width, "n_layer": DEPTH, "n_head": HEADS, "n_positions": CONTEXT}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return hf.GPT2Config(vocab_size=VOCAB, bos_token_id=None, eos_token_id=None, **sizes, **rates)


def _opt(width: int) -> Any:
    sizes = {"hidden_size": width, "ffn_dim": 4 * width, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS}
    options = {"word_embed_proj_dim": width, "max_position_embeddings": CONTEXT, "dropout": 0.0}
    return hf.OPTConfig(vocab_size=VOCAB, pad_token_id=None, bos_token_id=None, eos_token_id=None, **sizes, **options)


def _bert(width: int) -> Any:
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": DEPTH}
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    options = {"num_attention_heads": HEADS, "max_position_embeddings": CONTEXT, "pad_token_id": None}
    return hf.BertConfig(vocab_size=VOCAB + 1, **sizes, **rates, **options)


def _whisper(width: int) -> Any:
    sides = {f"{side}_{name}": x for side in ("encoder", "decoder") for name, x in _SIDE.items()}
    ffn = {"encoder_ffn_dim": 4 * width, "decoder_ffn_dim": 4 * width, "dropout": 0.0}
    places = {"max_source_positions": FRAMES // 2, "max_target_positions": CONTEXT, "num_mel_bins": MELS}
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0)
    return hf.WhisperConfig(vocab_size=VOCAB, d_model=width, **sides, **ffn, **places, **tokens)


_SIDE = {"layers": DEPTH, "attention_heads": HEADS}

FAMILIES: dict[str, Family] = {
    "gpt2": Family(hf.GPT2LMHeadModel, _gpt2, tied=True),
    "opt": Family(hf.OPTForCausalLM, _opt, tied=True),
    "bert": Family(hf.BertForMaskedLM, _bert, tied=True, loss=masked),
    "whisper": Family(hf.WhisperForConditionalGeneration, _whisper, tied=True, loss=spoken),
    "llama": Family(hf.LlamaForCausalLM, lambda width: _decoder(hf.LlamaConfig, width), tied=False),
    "qwen3": Family(hf.Qwen3ForCausalLM, lambda width: _decoder(hf.Qwen3Config, width), tied=False),
    "gemma": Family(hf.GemmaForCausalLM, lambda width: _decoder(hf.GemmaConfig, width), tied=True),
    "mixtral": Family(
        hf.MixtralForCausalLM,
        lambda width: _decoder(hf.MixtralConfig, width, num_local_experts=4, num_experts_per_tok=2),
        tied=False,
    ),
}
