"""Bounds of single layers from their weights: linear layers, attention, and the cross entropy behind an LM head.

One vector added to all rows of a head adds one number to all logits of an input, which the cross entropy does not see.
All its bounds are therefore on differences of rows, as multiples of `spread`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear  # type of MultiheadAttention.out_proj
from torch.nn.utils.parametrize import type_before_parametrizations

from surefoot.discovery.heads import QK_NORMS, head_dim_of, parts
from surefoot.geometry import HeadRMS, Spectral
from surefoot.layers import InNormLinear
from surefoot.linalg.device import whole_of, widened
from surefoot.monitor.maxima import rms

_PACKAGES = ("surefoot", "transformers")
_NO_MEANS = (".nystromformer.", ".yoso.", ".mra.", ".informer.", ".bloom.", ".blt.")
"""Where an attention module's class comes from, as its formula is not checked; and where it takes no means of values,
or adds the residual stream to them."""


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


def linear(layer: nn.Module) -> Linear | None:
    """The weight and the bias of an `nn.Linear`, an `InNormLinear` or `transformers`' `Conv1D`; None of anything else.

    Exact types only: a subclass may compute anything.

    >>> linear(nn.Linear(3, 5)).weight.shape
    torch.Size([5, 3])
    """
    kind = type_before_parametrizations(layer)
    transposed = kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    if kind not in (nn.Linear, NonDynamicallyQuantizableLinear, InNormLinear) and not transposed:
        return None
    weight, bias = whole_of(layer.weight.detach()), layer.bias  # type: ignore[operator]
    wide = widened(weight.mT if transposed else weight)
    zeros_or_bias = wide.new_zeros(len(wide)) if bias is None else whole_of(bias.detach()).to(wide.dtype)  # type: ignore[operator]
    return Linear(wide, zeros_or_bias, kind is InNormLinear)


def forward_bound(module: nn.Module) -> float | None:
    """Bound on the RMS of an attention module's output, over inputs of RMS at most 1; None if it is not known.

    Each head's output is a mean of its values, so a bound is `|W_o| sqrt(mean_h |W_v,h|^2)` with `W_v,h` the rows of
    head h, at most `sqrt(heads) |W_o| |W_v|`; the biases' RMS are added.

    Args:
        module: an `nn.MultiheadAttention`, or a module of `transformers` or of the reference models.

    Returns:
        The bound.

    Source: "Beyond MuP 2", the linear layer, composed.

    >>> layer = nn.MultiheadAttention(4, 2, bias=False)
    >>> _ = layer.in_proj_weight.data.copy_(torch.eye(4).repeat(3, 1)), layer.out_proj.weight.data.copy_(torch.eye(4))
    >>> round(forward_bound(layer), 4)  # sqrt(2 heads): one head may take all of the input
    1.4142
    """
    size, found, output = head_dim_of(module), parts(module), _output(module)
    if size is None or output is None or set(found) != {"query", "key", "value"}:
        return None
    value = found["value"].rows()
    weight, bias = value["weight"], value.get("bias", torch.zeros(1))
    shared = not output or output[0].weight.shape[1] % len(weight) == 0  # query heads may share values
    if len(weight) % size or not shared:
        return None
    heads = weight.reshape(-1, size, weight.shape[1])
    means = math.sqrt(float(Spectral().norm(heads).square().mean())) + rms(bias)
    return output[0].rms(means) if output else means


def _output(module: nn.Module) -> list[Linear] | None:
    """The linear layer behind the means of an attention module, if there is one; None if its formula is not known."""
    if isinstance(module, nn.MultiheadAttention):
        layer = linear(module.out_proj)
        return [layer] if layer and type(module) is nn.MultiheadAttention and module.bias_v is None else None
    path, known = type(module).__module__, parts(module).values()
    names = {*(part.name for part in known), *QK_NORMS}
    others = [x for name, x in module.named_children() if name not in names and any(True for _ in x.parameters())]
    layers = [layer for layer in map(linear, others) if layer]
    means = path.split(".")[0] in _PACKAGES and not any(name in path for name in _NO_MEANS)
    plain = all(linear(part.layer) for part in known) and not any(True for _ in module.parameters(recurse=False))
    return layers if means and plain and len(layers) == len(others) <= 1 else None


@torch.no_grad()
def spread(weight: Tensor) -> Tensor:
    """Half of a bound on `d rms(w_i - w_j)` over all pairs of rows, the same for rows that are shifted by one vector.

    It is the smaller one of `c = d max_i rms(w_i - mean)` and the norm `d max_i rms(w_i)`: `rms(w_i - w_j)` is at most
    `rms(w_i - a) + rms(w_j - a)` for every vector a, the mean and 0 among them. With s for a head's spread, and
    `|log sum exp a - log sum exp b| <= max |a_i - b_i|`, for inputs of RMS at most 1:

    - The loss changes by at most `4 s` between any two inputs and labels, as `max_i <w_i - w_t, x>` is at most `2 s`
      for each. Its gradient for x is `sum_j p_j (w_j - w_t)`, so that at one label it changes by at most
      `2 s rms(x1 - x2)`.
    - Where the rows change, the loss of an input changes by at most twice the spread of their changes.

    Args:
        weight: rows `(..., V, d)`.

    Returns:
        One number for each table, in the unit of the head's norm.

    >>> weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    >>> spread(weight), spread(weight + 100)  # sqrt(2)
    (tensor(1.4142, dtype=torch.float64), tensor(1.4142, dtype=torch.float64))
    """
    w = weight.detach().double()
    centred = w - w.mean(-2, keepdim=True) if w.numel() else w
    return torch.minimum(HeadRMS().norm(w), HeadRMS().norm(centred))


@torch.no_grad()
def loss_bound(weight: Tensor) -> tuple[float, float]:
    """Bounds on the largest cross entropy over inputs of RMS at most 1 and over labels.

    With `r = d max_ij rms(w_i - w_j)` the largest loss is at least `max(log V, r)` and at most `log V + r`, since the
    loss is `log sum_j exp <w_j - w_i, x>`. As `c = d max_i rms(w_i - mean)` is between r/2 and r, it is one below, at a
    cost of `V d` and not `V^2 d`; above, twice the `spread` is a bound.

    Args:
        weight: `(V, d)`, without a bias.

    Returns:
        `(lower, upper)` in nats.

    Source: "Beyond MuP 3", the LM head; without the mean its bound is `log V + 2 d max_i rms(w_i)`.

    >>> low, high = loss_bound(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))  # c = sqrt(2)
    >>> round(low, 4), round(high, 4)
    (1.4142, 3.5216)
    """
    w, uniform = weight.detach().double(), math.log(max(1, len(weight)))
    return max(uniform, float(HeadRMS().norm(w - w.mean(0)))), uniform + 2 * float(spread(w))
