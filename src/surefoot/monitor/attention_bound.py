"""An upper bound on what attention returns, from the weights of its values and its output."""

from __future__ import annotations

import math

import torch
from torch import nn

from surefoot.discovery.heads import QK_NORMS, Part, head_dim_of, parts
from surefoot.geometry import Spectral
from surefoot.monitor.linear_layers import Linear, linear
from surefoot.monitor.maxima import rms

_PACKAGES = ("surefoot", "transformers")
_NO_MEANS = (".nystromformer.", ".yoso.", ".mra.", ".informer.", ".bloom.", ".blt.")
"""Where an attention module's class comes from, as its formula is not checked; and where it takes no means of values,
or adds the residual stream to them."""


def forward_bound(module: nn.Module) -> float | None:
    """Bound on the RMS of an attention module's output, over inputs of RMS at most 1; None if it is not known.

    Each head's output is a mean of its values, so that `|W_o| sqrt(mean_h |W_v,h|^2)` is one, with `W_v,h` the rows of
    head h, at most `sqrt(heads) |W_o| |W_v|`; the RMS of the biases come on top.

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
    parts = _of_torch(module) if type(module) is nn.MultiheadAttention else _of_attributes(module)
    if parts is None:
        return None
    value, output, head_dim = parts
    heads = value.weight.reshape(-1, head_dim, value.weight.shape[1])
    means = math.sqrt(float(Spectral().norm(heads).square().mean())) + rms(value.bias)
    return means if output is None else output.rms(means)


def _of_torch(module: nn.MultiheadAttention) -> tuple[Linear, Linear | None, int] | None:
    """W_v, W_o and the number of features of a head."""
    own = {name: p.detach().to(torch.promote_types(p.dtype, torch.float32)) for name, p in module.named_parameters()}
    value = own["v_proj_weight"] if "v_proj_weight" in own else own["in_proj_weight"].chunk(3)[2]
    bias = own["in_proj_bias"].chunk(3)[2] if "in_proj_bias" in own else value.new_zeros(len(value))
    return None if "bias_v" in own else (Linear(value, bias), linear(module.out_proj), module.head_dim)


def _of_attributes(module: nn.Module) -> tuple[Linear, Linear | None, int] | None:
    """The same of a module with linear layers for queries, keys and values, or one for all, and at most one behind."""
    head_dim = head_dim_of(module)
    path = type(module).__module__
    if head_dim is None or path.split(".")[0] not in _PACKAGES or any(name in path for name in _NO_MEANS):
        return None
    found = parts(module)
    if set(found) != {"query", "key", "value"} or not all(linear(part.layer) for part in found.values()):
        return None
    known = {*(part.name for part in found.values()), *QK_NORMS}
    others = [x for name, x in module.named_children() if name not in known and any(True for _ in x.parameters())]
    output, value = linear(others[0]) if others else None, _value(found["value"])
    unknown = len(others) > 1 or (others and output is None) or any(True for _ in module.parameters(recurse=False))
    if value is None or unknown or len(value.weight) % head_dim:
        return None
    shared = output is None or output.weight.shape[1] % len(value.weight) == 0  # query heads may share values
    return (value, output, head_dim) if shared else None


def _value(part: Part) -> Linear | None:
    """W_v: a layer, or one of three matrices in one."""
    layer = linear(part.layer)
    if layer is None or part.view is None:
        return layer
    weights, biases = ([x for block in part.view.split(y) for x in block] for y in (layer.weight, layer.bias))
    return Linear(weights[part.index], biases[part.index])
