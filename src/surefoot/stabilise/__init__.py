"""Stabilisers: from weight and smoothed gradient to the next weight, with a promise on its norm; a family a file."""

from surefoot.stabilise.base import Ball, Decay, Free, Stabiliser
from surefoot.stabilise.clip import PostClip, Rescale
from surefoot.stabilise.decay import DecoupledWeightDecay, PreDecay, WeightDecay
from surefoot.stabilise.decay_variants import CautiousDecay, IndependentDecay
from surefoot.stabilise.sphere import Normalise, SpectralSphere, Stiefel
from surefoot.stabilise.streaming import StreamingPostClip, StreamingPreDecay

__all__ = [
    "Ball", "CautiousDecay", "Decay", "DecoupledWeightDecay", "Free", "IndependentDecay", "Normalise", "PostClip",
    "PreDecay", "Rescale", "SpectralSphere", "Stabiliser", "Stiefel", "StreamingPostClip", "StreamingPreDecay",
    "WeightDecay",
]  # fmt: skip
