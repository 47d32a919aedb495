"""Norms in natural units, one file each; a new one is a `Geometry` with four methods."""

from surefoot.geometry.base import Geometry, dual_norm
from surefoot.geometry.check import check
from surefoot.geometry.entrywise import RMS, AsGiven, Frobenius, MaxAbs
from surefoot.geometry.meanpq import MeanOperator
from surefoot.geometry.paired import Paired
from surefoot.geometry.rows import HeadRMS, RowMean, RowRMS
from surefoot.geometry.spectral import Spectral
from surefoot.geometry.strided import Strided

__all__ = [
    "RMS",
    "AsGiven",
    "Frobenius",
    "Geometry",
    "HeadRMS",
    "MaxAbs",
    "MeanOperator",
    "Paired",
    "RowMean",
    "RowRMS",
    "Spectral",
    "Strided",
    "check",
    "dual_norm",
]
