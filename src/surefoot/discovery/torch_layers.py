"""Kinds of a module's parameters by its type or structure alone: torch's layers, norms, experts, bare parameters."""

import math
import operator
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList

from surefoot.discovery.kinds import Guess, Heads, Kind, is_linear, own_parameters
from surefoot.initialise import AsBuilt, Fill, Initial, Scaled, UnitNormal, ZeroRow
from surefoot.views.base import Convolution, Matrix, Stack, Transposed, TransposedConvolution, View
from surefoot.views.fused import AlternatingStack, Fused, FusedStack

FEW_INPUTS = 16
"""Up to this many inputs a linear layer's biases are drawn: at 0 each of its units would bend where all inputs are 0,
and biases move slowly. With one input, sin 9x is learned to .01 in 300 steps instead of .34."""


def linear(module: Any, layout: View | None = None) -> dict[str, Kind]:
    """Kinds of a linear layer's parameters.

    Args:
        module: the layer; one that is no `nn.Linear` is Hugging Face's `Conv1D`, whose weight is stored `(in, out)`.
        layout: view of the projections that share its rows; None for one projection.

    Returns:
        Parameter name -> kind.
    """
    plain = isinstance(module, nn.Linear)
    shape = f"Linear({module.in_features}, {module.out_features})" if plain else "Conv1D, stored (in, out)"
    shape += ", a norm per projection" if layout else ""
    weight = Kind("linear", f"weight of {shape}", layout if plain else Transposed(layout or Matrix()))
    return {"weight": weight} | _bias(shape, layout, module.in_features if plain else 0)


def _bias(name: str, view: View | None = None, inputs: int = 0) -> dict[str, Kind]:
    """The kind of a bias: with few inputs it is drawn, with torch's RMS, where the recipe says 0."""

    def drawn(initial: Initial) -> Initial:
        few = 0 < inputs <= FEW_INPUTS and initial == Fill(0.0)
        return Scaled(UnitNormal(), (3 * inputs) ** -0.5) if few else initial

    return {"bias": Kind("bias", f"bias of {name}", view, initial=drawn)}


def _embedding(module: nn.Embedding | nn.EmbeddingBag) -> dict[str, Kind]:
    name, row = f"{type(module).__name__}({module.num_embeddings}, {module.embedding_dim})", module.padding_idx

    def zero_row(initial: Initial) -> Initial:
        return initial if row is None or isinstance(initial, AsBuilt) else ZeroRow(initial, row)

    return {"weight": Kind("embedding", f"table of {name}", initial=zero_row)}


def _recurrent(module: nn.RNNBase | nn.RNNCellBase) -> dict[str, Kind]:
    """Kinds for recurrent layers: gates are stacked along dimension 0; `weight_hr` is an LSTM's output projection."""
    name = type(module).__name__
    gates = 4 if isinstance(module, nn.LSTM | nn.LSTMCell) else 3 if isinstance(module, nn.GRU | nn.GRUCell) else 1
    kinds = {
        "weight_hr": Kind("linear", f"projection of {name}"),
        "weight": Kind("linear", f"gates of {name}, a norm each", Fused(gates)),
        "bias": Kind("bias", f"biases of the gates of {name}", Fused(gates)),
    }
    return {key: next(kinds[start] for start in kinds if key.startswith(start)) for key in own_parameters(module)}


def _norm(module: nn.Module) -> dict[str, Kind]:
    name = type(module).__name__
    return {"weight": Kind("gain", f"gain of {name}")} | _bias(name)


def _conv(module: _ConvNd) -> dict[str, Kind]:
    """Kinds for convolutions; where no two patches overlap, a kernel's is `patches`.

    Along a dimension of a transposed one, `min(k, stride / gcd(stride, dilation))` disjoint sets of the k taps reach
    different outputs.
    """
    name, stride = f"{type(module).__name__}, groups={module.groups}", 1
    view: View = Convolution(module.groups)
    if module.transposed:
        steps = zip(module.kernel_size, module.stride, module.dilation, strict=True)
        stride = math.prod(min(k, s // math.gcd(s, d)) for k, s, d in steps)
        name, view = f"{name}, fan-in over {stride}", TransposedConvolution(module.groups)
    spans = ((k - 1) * d + 1 for k, d in zip(module.kernel_size, module.dilation, strict=True))
    apart = all(map(operator.le, spans, module.stride))
    return {"weight": Kind("patches" if apart else "conv", f"kernel of {name}", view, stride=stride)} | _bias(name)


def _attention(module: nn.MultiheadAttention) -> dict[str, Kind]:
    heads, of = Heads(module.head_dim), "MultiheadAttention"
    three, fused = replace(heads, parts=("query", "key", "value")), f"q, k, v fused in {of}"
    return {
        "in_proj_weight": Kind("linear", f"{fused}, a norm each", Fused(3), heads=three),
        "in_proj_bias": Kind("bias", f"biases of {fused}", Fused(3)),
        **{f"{x}_proj_weight": Kind("linear", f"{x} projection of {of}", heads=heads) for x in "qk"},
        "v_proj_weight": Kind("linear", f"v projection of {of}"),
        **{f"bias_{x}": Kind("bias", f"extra {x} token of {of}") for x in "kv"},
    }


_RULES: tuple[tuple[tuple[type[nn.Module], ...], Callable[..., dict[str, Kind]]], ...] = (
    ((nn.Embedding, nn.EmbeddingBag), _embedding),
    ((nn.RNNBase, nn.RNNCellBase), _recurrent),
    ((_ConvNd,), _conv),
    ((nn.MultiheadAttention,), _attention),
    ((nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase), _norm),  # _NormBase: batch and instance norms
)
"""Module types and the function that gives the kinds of their parameters; the first match wins."""


def kinds_by_type(module: nn.Module) -> dict[str, Kind]:
    """Kinds of a module's own parameters, for torch's layers, norm layers of any class and experts of known layout.

    Args:
        module: any module.

    Returns:
        Parameter name -> kind, possibly with names that the module lacks; empty if no rule applies.

    >>> {name: kind.name for name, kind in kinds_by_type(nn.Linear(4, 8)).items()}
    {'weight': 'linear', 'bias': 'bias'}
    """
    if is_linear(module):
        return linear(module)
    rule = next((rule for types, rule in _RULES if isinstance(module, types)), None)
    return rule(module) if rule else _norm_by_structure(module) or _linear_by_structure(module) or experts(module)


def _linear_by_structure(module: nn.Module) -> dict[str, Kind]:
    """Kinds for a linear layer of any class: a matrix `weight` whose sides are two attributes, out and in."""
    weight, name = module._parameters.get("weight"), type(module).__name__
    for of in ("features", "channels"):
        sides = getattr(module, f"out_{of}", None), getattr(module, f"in_{of}", None)
        if weight is not None and tuple(weight.shape) in (sides, sides[::-1]):
            how = f"weight of {name}, a linear layer by the names `out_{of}`, `in_{of}`"
            view = None if tuple(weight.shape) == sides else Transposed()
            return {"weight": Kind("linear", how, view)} | _bias(name, inputs=weight.shape[0 if view else 1])
    return {}


_EPSILONS = ("eps", "epsilon", "variance_epsilon", "norm_eps", "layer_norm_eps", "rms_norm_eps", "norm_epsilon")
_GAINS, _BIASES = {"weight", "gain", "scale", "gamma"}, {"bias", "beta", "shift"}


def _norm_by_structure(module: nn.Module) -> dict[str, Kind]:
    """Kinds for a norm layer of any class: no children, a small epsilon or the name, a vector as gain, one as bias.

    By the name the vector may be of shape `(heads, 1, d)`, one for each head.
    The gain's initial value stays as built, since it may be centred on 0, as Gemma's `1 + weight`.
    """
    own, name = dict(module.named_parameters(recurse=False)), type(module).__name__
    gains, biases = own.keys() & _GAINS, own.keys() & _BIASES
    small = any(isinstance(x := getattr(module, e, None), float) and 0 <= x < 0.1 for e in _EPSILONS)
    called = name.lower().endswith("norm")  # as nanoGPT's LayerNorm, which has its epsilon in `forward`
    shapes = {tuple(p.shape) for p in own.values()}
    vectors = len(shapes) == 1 and all(len(x) == 1 or (called and len(x) == 3 and x[1] == 1) for x in shapes)
    alone = len(own) == 1 + len(biases) and next(module.children(), None) is None
    if len(gains) != 1 or not ((small or called) and vectors and alone):
        return {}
    (gain,) = gains
    by = "structure" if small else "class's name"
    how = f"gain of {name}, a norm by its {by} and the name `{gain}`: as built, it may be centred on 0"
    found = {gain: Kind("gain", how, initial=AsBuilt())}
    return found | {n: Kind("bias", f"bias of {name} by the name `{n}`") for n in biases}


def experts(module: Any, layout: tuple[bool, bool, bool] | None = None) -> dict[str, Kind]:
    """Kinds of the parameters of stacked experts, `(E, out, in)` or `(E, in, out)`.

    Args:
        module: any module.
        layout: (has_gate, is_transposed, is_concatenated); None reads the attributes of these names, which
            transformers' experts have.

    Returns:
        Parameter name -> kind; empty if the layout is unknown.
    """
    how = "attributes' names" if layout is None else "class and attributes' names"
    flags = layout or tuple(getattr(module, flag, None) for flag in ("has_gate", "is_transposed", "is_concatenated"))
    if not all(isinstance(flag, bool) for flag in flags):
        return {}
    gated, transposed, concatenated = flags
    why = f"experts of {type(module).__name__} by its {how}, a norm each"
    pair: View = FusedStack(2) if concatenated else AlternatingStack(2)
    up = "gate_up_proj" if gated else "up_proj"
    views: dict[str, View] = {up: pair if gated else Stack(), "down_proj": Stack()}
    biases: dict[str, View] = {f"{up}_bias": pair if gated else FusedStack(1), "down_proj_bias": FusedStack(1)}
    kinds = {key: Kind("experts", why, Transposed(view) if transposed else view) for key, view in views.items()}
    return kinds | {key: Kind("bias", f"biases of the {why}", view) for key, view in biases.items()}


_ROWS = re.compile("pos|emb|tok|cls|class|quer|latent|mask|prompt|regist|anchor|memor|slot|probe|seed")
"""Names of tables whose rows are the same for the whole batch: a bare `(1, 1, d)` of another name is no such row."""

_TABLES = re.compile(
    "(^|_)(tokens?|queries|registers|latents|(shift|bias)_table|attention_biases|rel_pos_[hw]"
    "|pos(ition(al)?)?_?(emb(ed(ding)?s?)?|enc(oding)?s?)(_[a-z]|_height|_width|_time|_table)?)$"
)
"""Endings of the names of bare tables of such rows that have no leading dimension of 1."""


def kind_by_shape(module: nn.Module, attribute: str, parameter: nn.Parameter) -> Guess | None:
    """Kind of a parameter that no other rule covers: vectors and channel scales, tables with a leading dimension of 1.

    Args:
        module: owner of the parameter.
        attribute: the owner's attribute for the parameter.
        parameter: any of its parameters.

    Returns:
        A guess; None for matrices and stacks, whose input side is unknown, and for parametrizations.
    """
    owner, shape = type(module).__name__, tuple(parameter.shape)
    if isinstance(module, ParametrizationList) or (isinstance(module, nn.Bilinear) and parameter.ndim > 1):
        return None
    if parameter.ndim <= 1:
        alone = parameter.ndim and not any(True for _ in module.children())
        why = f"{parameter.ndim}-D parameter of {owner}" + (", no norm by its attributes' names" if alone else "")
        return Guess("scalar", why)
    if parameter.ndim >= 3 and shape[-1] == 1 and math.prod(shape) == max(shape):
        return Guess("scalar", f"one entry per channel of {owner}")
    several = sum(size > 1 for size in shape[1:-1])
    if parameter.ndim >= 3 and math.prod(shape) == shape[-1] and not _ROWS.search(attribute):
        return Guess("scalar", f"one entry per feature of {owner}, no rows by its name")
    leading = parameter.ndim >= 3 and shape[0] == 1 and (several < 2 or _ROWS.search(attribute))
    if leading or _TABLES.search(attribute):
        by = f"(1, ..., d) of {owner}" if leading else f"table of {owner} by the name `{attribute}`"
        return Guess("positions", f"{by}: rows that are the same for the whole batch, entries of one size at any width")
    return None
