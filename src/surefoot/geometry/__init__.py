"""Norms in natural units, one file each; a new one is a `Geometry` with four methods."""

from surefoot.geometry.adaptive import (
    Adaptive,
    DualScaled,
    MeanLookahead,
    NormalisedRows,
    Oblique,
    RadialBrake,
    RMSScaled,
    StreamingSpectral,
    UpdateFloor,
)
from surefoot.geometry.base import Geometry, dual_norm
from surefoot.geometry.check import check
from surefoot.geometry.entrywise import RMS, Frobenius, Identity, MaxNorm, VectorMean
from surefoot.geometry.mean_operator import MeanOperator
from surefoot.geometry.rows import HeadRMS, RowMean, RowRMS
from surefoot.geometry.spectral import Spectral
from surefoot.geometry.transposed import TransposedConvSpectral

__all__ = [
    "RMS", "Adaptive", "DualScaled", "Frobenius", "Geometry", "HeadRMS", "Identity", "MaxNorm",
    "MeanLookahead", "MeanOperator", "NormalisedRows", "Oblique", "RMSScaled", "RadialBrake", "RowMean", "RowRMS",
    "Spectral", "StreamingSpectral", "TransposedConvSpectral", "UpdateFloor", "VectorMean", "check", "dual_norm",
]  # fmt: skip
