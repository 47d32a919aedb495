"""Layers with known stability numbers: In Norm, Out Norm, residual blocks, attention, normalised weights."""

from surefoot.layers.attention import Attention, Heads, Rope, attention_scale
from surefoot.layers.in_norm import InNormLinear, OutNormLinear, PostInNorm, PostNorm, PreNorm, rms_norm
from surefoot.layers.reparametrise import normalise_

__all__ = [
    "Attention", "Heads", "InNormLinear", "OutNormLinear", "PostInNorm", "PostNorm", "PreNorm", "Rope",
    "attention_scale", "normalise_", "rms_norm",
]  # fmt: skip
