"""What a method of a geometry of one's own returned: a tensor as it was asked for, or an error that names it."""

from typing import Any

import torch
from torch import Tensor


def direction_of(geometry: Any, g: Tensor) -> Tensor:
    """`geometry.direction(g)`; ValueError if that is no tensor of g's shape and dtype."""
    return returned(geometry, "direction", geometry.direction(g), g.shape, g.dtype)


def returned(geometry: object, name: str, found: object, shape: torch.Size, dtype: torch.dtype | None = None) -> Tensor:
    """What a method returned, if it is a tensor of a shape and a dtype.

    Args:
        geometry: whose method it is, for the message.
        name: of what was asked for, for the message.
        found: what was returned.
        shape: that it must have.
        dtype: that it must have; None for any.

    Returns:
        The same.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(found, Tensor) and found.shape == shape and dtype in (None, found.dtype):
        return found
    kind = f"has shape {tuple(found.shape)} and {found.dtype}" if isinstance(found, Tensor) else f"is {found!r:.40}"
    raise ValueError(
        f"{geometry}: its {name} {kind}: return a tensor of shape {tuple(shape)}" + f" and {dtype}" * bool(dtype)
    )
