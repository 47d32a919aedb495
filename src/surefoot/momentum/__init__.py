"""From gradient to smoothed gradient: the momentum pair, Adam's moments, gradients divided by their own history."""

from surefoot.geometry.base import State
from surefoot.momentum.adam import Adam, RowAdam
from surefoot.momentum.base import Momentum, Smoothing, is_finite, where_finite
from surefoot.momentum.soap import SOAP

__all__ = ["SOAP", "Adam", "Momentum", "RowAdam", "Smoothing", "State", "is_finite", "where_finite"]
