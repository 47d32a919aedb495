"""Directions that depend on more than the smoothed gradient: on what they remember, or on the weight."""

from surefoot.geometry.adaptive.base import Adaptive, DualScaled, RadialBrake, RMSScaled, UpdateFloor
from surefoot.geometry.adaptive.history import NormalisedRows, Oblique
from surefoot.geometry.adaptive.lookahead import MeanLookahead
from surefoot.geometry.adaptive.streaming import StreamingSpectral

__all__ = [
    "Adaptive", "DualScaled", "MeanLookahead", "NormalisedRows", "Oblique", "RMSScaled", "RadialBrake",
    "StreamingSpectral", "UpdateFloor",
]  # fmt: skip
