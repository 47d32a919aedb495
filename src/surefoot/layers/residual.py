"""Residual blocks: Pre Norm, Post Norm, and Post Norm written as In Norm."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn

from surefoot.layers.in_norm import rms_norm


@final
class PreNorm(nn.Module):
    """Pre Norm: `x + F(Norm(x))`.

    F sees inputs of RMS 1 only. The residual stream is not normalised, so that a norm follows the last block
    (`rms_norm`, or an `InNormLinear` as the head). Forward at RMS at most 1: 1 plus that of F.

    Args:
        block: F, a module that maps `(..., d)` to `(..., d)`.

    Source: "Beyond MuP 2", linear transformation.

    >>> import torch
    >>> PreNorm(nn.Identity())(torch.tensor([3.0, 3.0]))
    tensor([4., 4.])
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return `x + F(Norm(x))`, shape `(..., d)`; further arguments go to F."""
        y: Tensor = x + self.block(rms_norm(x), *args, **kwargs)
        return y


@final
class PostNorm(nn.Module):
    """Post Norm: `Norm(x + F(x))`. Behind a normalised input, every F of a stack sees inputs of RMS 1.

    Forward: 1, whatever the block. A stack of them is that of `PostInNorm` with a norm behind it.

    Args:
        block: F, a module that maps `(..., d)` to `(..., d)`.

    Source: "Beyond MuP 2", linear transformation.

    >>> import torch
    >>> PostNorm(nn.Identity())(torch.tensor([3.0, -3.0]))
    tensor([ 1., -1.])
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return `Norm(x + F(x))`, shape `(..., d)`; further arguments go to F."""
        return rms_norm(x + self.block(x, *args, **kwargs))


@final
class PostInNorm(nn.Module):
    """Post Norm as In Norm: `Norm(y) + F(Norm(y))`.

    With `x_t = Norm(y_t)` a stack of `x -> Norm(x + F(x))` is one of `y -> Norm(y) + F(Norm(y))`, whose only difference
    from Pre Norm is that the skip connection is normalised, too. Forward: 1 plus that of F at RMS 1.

    Args:
        block: F, a module that maps `(..., d)` to `(..., d)`.

    Source: "Beyond MuP 2", linear transformation.

    >>> import torch
    >>> PostInNorm(nn.Identity())(torch.tensor([3.0, -3.0]))
    tensor([ 2., -2.])
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, y: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return `Norm(y) + F(Norm(y))`, shape `(..., d)`; further arguments go to F."""
        x = rms_norm(y)
        z: Tensor = x + self.block(x, *args, **kwargs)
        return z
