"""Stabilisers: from weight and smoothed gradient to the next weight, with a promise on its norm."""

from surefoot.stabilise.base import Ball, Decay, Free, Stabiliser
from surefoot.stabilise.clip import DecayedPostClip, PostClip, Rescale, StreamingPostClip
from surefoot.stabilise.decay import DecoupledWeightDecay, PreDecay, StreamingPreDecay, WeightDecay
from surefoot.stabilise.manifolds import ColumnSphere, RowSphere, Stiefel
from surefoot.stabilise.sphere import Hyperball, Normalise, SpectralSphere

__all__ = [
    "Ball", "ColumnSphere", "Decay", "DecayedPostClip", "DecoupledWeightDecay", "Free", "Hyperball", "Normalise",
    "PostClip", "PreDecay", "Rescale", "RowSphere", "SpectralSphere", "Stabiliser", "Stiefel", "StreamingPostClip",
    "StreamingPreDecay", "WeightDecay",
]  # fmt: skip
