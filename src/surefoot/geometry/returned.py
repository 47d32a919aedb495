"""Checks the direction of a user's geometry: a tensor like the gradient, or an error that says what else."""

from typing import Any

from torch import Tensor


def direction_of(geometry: Any, g: Tensor) -> Tensor:
    """`geometry.direction(g)`; ValueError if that is no tensor of g's shape and dtype."""
    d = geometry.direction(g)
    if isinstance(d, Tensor) and (d.shape, d.dtype) == (g.shape, g.dtype):
        return d
    kind = f"has shape {tuple(d.shape)} and {d.dtype}" if isinstance(d, Tensor) else f"is {d!r:.40}"
    raise ValueError(f"{geometry}: its direction {kind}: return a tensor of shape {tuple(g.shape)} and {g.dtype}")
