"""From gradient to smoothed gradient: the momentum pair, Adam's moments, gradients divided by their own history."""

from surefoot.momentum.base import Adam, Momentum, Smoothing, State
from surefoot.momentum.finite import is_finite, where_finite

__all__ = ["Adam", "Momentum", "Smoothing", "State", "is_finite", "where_finite"]
