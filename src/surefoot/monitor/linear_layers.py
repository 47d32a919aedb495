"""A linear layer's weight and bias, and the sizes of its outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear  # type of MultiheadAttention.out_proj
from torch.nn.utils.parametrize import type_before_parametrizations

from surefoot.geometry import HeadRMS, Spectral
from surefoot.layers import InNormLinear, rms_norm
from surefoot.monitor.maxima import rms


@dataclass(frozen=True)
class Linear:
    """`y = W x + b`, or in In Norm `W Norm(x) + b`, at least in float32.

    Args:
        weight: `(out, in)`.
        bias: `(out,)`; zeros if the layer has none.
        normed: whether the layer normalises its input.
    """

    weight: Tensor
    bias: Tensor
    normed: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """The output y."""
        return F.linear(rms_norm(x) if self.normed else x, self.weight, self.bias)

    def __sub__(self, old: Linear) -> Linear:
        """The layer whose output is the difference of two for the same input."""
        return Linear(self.weight - old.weight, self.bias - old.bias, self.normed)

    def rms(self, r: float = 1.0) -> float:
        """Bound on the output's RMS for inputs of RMS at most r; in In Norm, for all inputs."""
        return float(Spectral().norm(self.weight)) * (1.0 if self.normed else r) + rms(self.bias)

    def slope(self) -> float:
        """`|W|`, the largest ratio of two outputs' difference to their inputs'; infinite in In Norm."""
        return math.inf if self.normed else float(Spectral().norm(self.weight))

    def largest(self) -> float:
        """Bound on the output's entries for inputs of RMS at most 1."""
        return float(HeadRMS().norm(self.weight)) + float(F.pad(self.bias.abs(), (0, 1)).max())


def linear(layer: object) -> Linear | None:
    """The weight and the bias of an `nn.Linear`, an `InNormLinear` or `transformers`' `Conv1D`; None of anything else.

    Exact types only: a subclass may compute anything.

    >>> linear(nn.Linear(3, 5)).weight.shape
    torch.Size([5, 3])
    """
    if not isinstance(layer, nn.Module):
        return None
    kind = type_before_parametrizations(layer)
    transposed = kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    if kind not in (nn.Linear, NonDynamicallyQuantizableLinear, InNormLinear) and not transposed:
        return None
    weight, bias = layer.weight.detach(), layer.bias  # type: ignore[operator]
    wide = (weight.mT if transposed else weight).to(torch.promote_types(weight.dtype, torch.float32))
    zeros_or_bias = wide.new_zeros(len(wide)) if bias is None else bias.detach().to(wide.dtype)  # type: ignore[operator]
    return Linear(wide, zeros_or_bias, kind is InNormLinear)
