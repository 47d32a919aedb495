"""Norms in natural units; a new one is a `Geometry` with four methods."""

from surefoot.geometry.adaptive import Adaptive, NormalisedRows, Oblique, RMSScaled, StreamingSpectral
from surefoot.geometry.base import Geometry, dual_norm
from surefoot.geometry.check import check
from surefoot.geometry.entrywise import RMS, Frobenius, Identity, MaxNorm, VectorMean
from surefoot.geometry.mean_operator import MeanOperator
from surefoot.geometry.spectral import Spectral, TransposedConvSpectral
from surefoot.geometry.vectors import HeadRMS, RowMean, RowRMS

__all__ = [
    "RMS", "Adaptive", "Frobenius", "Geometry", "HeadRMS", "Identity", "MaxNorm", "MeanOperator", "NormalisedRows",
    "Oblique", "RMSScaled", "RowMean", "RowRMS", "Spectral", "StreamingSpectral", "TransposedConvSpectral",
    "VectorMean", "check", "dual_norm",
]  # fmt: skip
