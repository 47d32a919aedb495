"""`Norm(x) = x / rms(x)` before or behind a linear layer, In Norm and Out Norm, and in residual blocks."""

import math
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.geometry.lp_balls import SAFE
from surefoot.linalg import device


def rms_norm(x: Tensor) -> Tensor:
    """`Norm(x) = x / rms(x)` along the last dimension; 0 for a zero vector. No epsilon, no gain.

    Args:
        x: `(..., d)`, floating point.

    Returns:
        Vectors of RMS 1, in the dtype of x. Sizes are taken in float64 where squares of float32 would vanish or
        overflow, so that entries of 1e-30 are right. The gradient at a zero vector is that of x itself.

    Source: "Beyond MuP 2", linear transformation.

    >>> rms_norm(torch.tensor([[3e-30, 4e-30, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]))
    tensor([[1.2000, 1.6000, 0.0000, 0.0000],
            [0.0000, 0.0000, 0.0000, 0.0000]])
    """
    size = _rms(x)
    return (x.to(size.dtype) / size).to(x.dtype)


Device = torch.device | str | None
Dtype = torch.dtype | None


class _Unbiased(nn.Linear):
    """`nn.Linear` without a bias by default."""

    def __init__(self, d_in: int, d_out: int, bias: bool = False, device: Device = None, dtype: Dtype = None) -> None:
        super().__init__(d_in, d_out, bias, device, dtype)


@final
class InNormLinear(_Unbiased):
    """In Norm: a linear layer of a normalised input, `y = W Norm(x) = (W x) / rms(x)`, plus a bias if it has one.

    It replaces an RMS norm and the linear layer behind it. A norm's gain is folded into the weight: gain g and weight V
    become the one weight `W = V diag(g)`. There is no epsilon: y does not depend on the length of x, down to what its
    dtype holds. Where x is 0, y is 0 (or the bias), with the gradient of `W x`.

    Stability numbers, whatever the input: forward `|W| + rms(b)`, update `|dW| + rms(db)`, in natural units. The
    dependency is `|W|` between inputs of equal length and unbounded between others: Norm is not continuous near 0.

    Product and RMS do not depend on each other, and the division comes last. The backward pass is written out; it keeps
    x and its RMS, but no normalised copy. docs/performance.md has its cost beside `nn.RMSNorm` and `nn.Linear`.
    In float16 the product of a tiny input underflows before the division; float32, bfloat16 and float64 have room.

    Args:
        d_in: features of the input.
        d_out: features of the output.
        bias: whether b is added after the division.
        device: of the parameters.
        dtype: of the parameters.

    Source: "Beyond MuP 2", linear transformation; In Norm as a parallel product and norm: Graef et al. 2024,
    "FlashNorm", arXiv:2407.09577.

    >>> layer, x = InNormLinear(4, 2), torch.ones(1, 4)
    >>> torch.allclose(layer(1e-20 * x), layer(x))  # only the direction of the input matters
    True
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return `(W x) / rms(x) + b`, shape `(..., d_out)`, for `x` of shape `(..., d_in)`."""
        x, weight = _autocast(x, self.weight)
        apply: Any = _InNorm.apply  # which has no rules for torch.func
        y: Tensor = (F.linear(x, weight) / _rms(x)).to(weight.dtype) if device.is_mapped() else apply(x, weight)
        return y if self.bias is None else y + self.bias.to(y.dtype)


@final
class OutNormLinear(_Unbiased):
    """Out Norm: a linear layer whose output is normalised, `y = Norm(W x + b)`; 0 where `W x + b` is 0.

    Stability numbers, whatever the input and the weight: forward 1, update at most 2. Norm is not continuous at 0, so
    the dependency has no bound.

    Args:
        d_in: features of the input.
        d_out: features of the output.
        bias: whether b is added before the norm.
        device: of the parameters.
        dtype: of the parameters.

    Source: "Beyond MuP 2", linear transformation.

    >>> y = OutNormLinear(4, 2)(torch.randn(3, 4))
    >>> torch.allclose(y.square().mean(-1), torch.ones(3))
    True
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return `Norm(W x + b)`, shape `(..., d_out)`, for `x` of shape `(..., d_in)`."""
        return rms_norm(super().forward(x))


class _Residual(nn.Module):
    """A block whose input and output are the stack's residual stream."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block


@final
class PreNorm(_Residual):
    """Pre Norm: `x + F(Norm(x))`.

    F sees inputs of RMS 1 only. The residual stream is not normalised, so put a norm behind the last block
    (`rms_norm`, or an `InNormLinear` as the head). Forward at RMS at most 1: 1 plus that of F.

    Args:
        block: F, a module that maps `(..., d)` to `(..., d)`.

    Source: "Beyond MuP 2", linear transformation.

    >>> import torch
    >>> PreNorm(nn.Identity())(torch.tensor([3.0, 3.0]))
    tensor([4., 4.])
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return `x + F(Norm(x))`, shape `(..., d)`; further arguments go to F."""
        y: Tensor = x + self.block(rms_norm(x), *args, **kwargs)
        return y


@final
class PostNorm(_Residual):
    """Post Norm: `Norm(x + F(x))`. Behind a normalised input, every F of a stack sees inputs of RMS 1.

    Forward: 1, whatever the block. A stack of them equals one of `PostInNorm` with a norm behind.

    Args:
        block: F, a module that maps `(..., d)` to `(..., d)`.

    Source: "Beyond MuP 2", linear transformation.

    >>> import torch
    >>> PostNorm(nn.Identity())(torch.tensor([3.0, -3.0]))
    tensor([ 1., -1.])
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return `Norm(x + F(x))`, shape `(..., d)`; further arguments go to F."""
        return rms_norm(x + self.block(x, *args, **kwargs))


@final
class PostInNorm(_Residual):
    """Post Norm as In Norm: `Norm(y) + F(Norm(y))`.

    With `x_t = Norm(y_t)` a stack of `x -> Norm(x + F(x))` is one of `y -> Norm(y) + F(Norm(y))`. It differs from Pre
    Norm only in that the skip connection is normalised, too. Forward: 1 plus that of F at RMS 1.

    Args:
        block: F, a module that maps `(..., d)` to `(..., d)`.

    Source: "Beyond MuP 2", linear transformation.

    >>> import torch
    >>> PostInNorm(nn.Identity())(torch.tensor([3.0, -3.0]))
    tensor([ 2., -2.])
    """

    def forward(self, y: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return `Norm(y) + F(Norm(y))`, shape `(..., d)`; further arguments go to F."""
        x = rms_norm(y)
        z: Tensor = x + self.block(x, *args, **kwargs)
        return z


def _rms(x: Tensor) -> Tensor:
    """`rms(x)` along the last dimension (kept), at least in float32; 1 where x is 0."""
    dtype, root = torch.promote_types(x.dtype, torch.float32), math.sqrt(max(1, x.shape[-1]))
    if device.is_plain(x) and x.numel():
        size: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
        least, most = torch.aminmax(size.detach())
        if float(least) > SAFE and float(most) < 1 / SAFE:  # the usual case: plain squares neither vanish nor overflow
            return size / root
    size = (torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64) / root).to(dtype)
    return torch.where(size == 0, 1, size)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as autocast hands them to a product: outside, so that the backward pass finds one dtype."""
    kind = tensors[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    low = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(low) for x in tensors)


class _InNorm(torch.autograd.Function):
    """`y = (W x) / r` with `r = rms(x)`; with `u = x / r` and `v = Wᵀ g / r`, `dx = v - u <u, v> / d_in`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        size = _rms(x)
        product = F.linear(x, weight)
        ctx.save_for_backward(x, weight, size)
        return product.div_(size) if product.dtype == size.dtype else (product / size).to(product.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight, size = ctx.saved_tensors
        size = _rms(x) if torch.is_grad_enabled() else size  # for a second derivative
        scaled, dx, dw = (gradients[0] / size).to(weight.dtype), None, None
        if ctx.needs_input_grad[0]:
            u, v = x / size, (scaled @ weight).to(size.dtype)
            dx = torch.addcmul(v, u, (u * v).mean(-1, keepdim=True), value=-1).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dw = scaled.reshape(-1, scaled.shape[-1]).mT @ x.reshape(-1, x.shape[-1])
        return dx, dw
