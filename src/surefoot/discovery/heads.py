"""Which layers of an attention module give queries, keys and values, how large its heads are, how logits are scaled.

Nothing but names tells a query's matrix from a value's of the same shape. This is the one table of them, for the plan,
QK-clip and the monitor. Where names decide, or tell nothing, the plan's reason says so.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import torch
from torch import nn

from surefoot.discovery.kinds import Heads, Kinds, Search, blocks_of, own_parameters
from surefoot.discovery.known_classes import is_conv1d, layouts_of, order_of
from surefoot.views import Fused, Matrix, View

_HEAD_DIMS = ("head_dim", "head_size", "attention_head_size")
"""Attributes of attention modules that are the number of features of a head."""

_PARTS = ("query", "key", "value")
_COUNTS = ("num_heads", "n_heads", "n_head", "nhead", "num_attention_heads", "heads")
"""Attributes of attention modules that are the number of heads."""

_UNKNOWN = f"no attribute ({', '.join(_HEAD_DIMS)})"
_REMEDY = "one norm for all heads; sf.per_head(rows) gives each its own"

_SEPARATE = (
    ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("to_q", "to_k", "to_v"), ("wq", "wk", "wv"),
    ("q", "k", "v"), ("q_lin", "k_lin", "v_lin"),
)  # fmt: skip
_FUSED = ("c_attn", "query_key_value", "Wqkv", "qkv", "qkv_proj", "wqkv")
"""Attributes of attention modules whose layers are W_q, W_k and W_v, or all of them in a layout that is known."""

QK_NORMS = (
    *("query_norm", "key_norm", "q_norm", "k_norm", "q_layernorm", "k_layernorm", "norm_q", "norm_k"),
    *("query_layernorm", "key_layernorm", "q_layer_norm", "k_layer_norm", "qk_norm"),
)
"""Attributes of attention modules that are the norms of queries and keys."""


@dataclass(frozen=True)
class Part:
    """W_q, W_k or W_v of an attention module: the matrix of a layer, or one of several that are fused in it.

    Args:
        name: the module's attribute.
        layer: the layer.
        view: layout of the matrices `(out, in)` that are fused; None for one.
        index: the matrix among them.
    """

    name: str
    layer: nn.Module
    view: View | None = None
    index: int = 0


def head_dim_of(module: nn.Module) -> int | None:
    """Number of features of a head of an attention module, from its attributes; None if it has none of them."""
    sizes = (
        getattr(getattr(module, "heads", None), "dim", None),
        *(getattr(module, name, None) for name in _HEAD_DIMS),
    )
    return next((size for size in sizes if isinstance(size, int) and size), None)


def scale_of(module: nn.Module) -> float | None:
    """Factor on the products of queries and keys: `heads.scale`, `scaling`, torch's own; None where none says it."""
    if isinstance(module, nn.MultiheadAttention):
        return float(module.head_dim**-0.5)
    scale = getattr(getattr(module, "heads", None), "scale", getattr(module, "scaling", None))
    return scale if isinstance(scale, float) else None


def parts(owner: nn.Module) -> dict[str, Part]:
    """The layers of an attention module that give queries, keys and values, as far as it is known which do.

    Args:
        owner: any module.

    Returns:
        "query", "key", "value" -> the part; empty for a module without them.

    >>> layer = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("wq", "wk", "wv", "wo")})
    >>> {what: part.name for what, part in parts(layer).items()}
    {'query': 'wq', 'key': 'wk', 'value': 'wv'}
    """
    if isinstance(owner, nn.MultiheadAttention):
        fused = {x: Part("in_proj_weight", owner, Fused(3), i) for i, x in enumerate(_PARTS)}
        return {x: Part(f"{x[0]}_proj_weight", owner) for x in _PARTS} if owner.in_proj_weight is None else fused
    layouts = layouts_of(owner)
    for names in _SEPARATE:
        found = {x: (n, owner._modules.get(n)) for x, n in zip(_PARTS, names, strict=True)}
        three = {x: Part(n, layer, layouts.get(n)) for x, (n, layer) in found.items() if layer is not None}
        if {"query", "key"} <= three.keys():
            return three
    for name, view in layouts.items():
        layer = owner._modules.get(name)
        if name in _FUSED and view and layer is not None:
            order = order_of(owner)[-_count(view, layer) :]  # two matrices are keys and values
            return {x: Part(name, layer, view, i) for i, x in enumerate(order)}
    return {}


def _count(view: View, layer: nn.Module) -> int:
    """Number of matrices in a layer; 3 where the layout does not fit."""
    weight = own_parameters(layer).get("weight", torch.empty(()))
    return sum(block[0] for block in blocks_of(view, weight if isinstance(layer, nn.Linear) else weight.mT)) or 3


def found_heads(owner: nn.Module) -> dict[nn.Module, Heads]:
    """What the names below an attention module tell of its linear layers.

    Args:
        owner: any module.

    Returns:
        Layer -> its heads, of 0 rows where that is not known; empty for a module that is no attention layer by its
        attributes.

    >>> layer = nn.Module()
    >>> layer.query, layer.key, layer.value, layer.head_dim = (*(nn.Linear(8, 8) for _ in "qkv"), 4)
    >>> [(heads.dim, heads.why) for heads in found_heads(layer).values()]
    [(4, 'query by the name `query`'), (4, 'key by the name `key`')]
    """
    layers: dict[nn.Module, list[tuple[str, Part]]] = defaultdict(list)
    for what, part in parts(owner).items():
        layers[part.layer].append((what, part))
    if not layers and (by := attention_by(owner)):
        why = f"in a module with {by}, but no name that is known tells whether these are queries or keys: {_REMEDY}"
        return dict.fromkeys(_linear_layers(owner), Heads(0, (), why))
    found: dict[nn.Module, Heads] = {}
    for layer, given in layers.items() if not isinstance(owner, nn.MultiheadAttention) else ():
        size, names = head_dim_of(owner), tuple(what for what, _ in given)
        why = f"{', '.join(names)} by the name `{given[0][1].name}`"
        if len(names) > 1 and names[-1] != "value":
            size, why = 0, f"{why}, {names[-1]} last: one norm for each"
        elif size is None:
            why = f"{why}, but {_UNKNOWN} says how many rows a head has: {_REMEDY}"
        if names != ("value",):
            found[layer] = Heads(size or 0, names, why)
    return found


def heads(search: Search, kinds: Kinds) -> Kinds:
    """The kinds with the heads of what gives queries and keys, or why they are not known."""
    layers: dict[nn.Module, Heads] = {}
    for owner in search.own:
        layers |= found_heads(owner)
    found = dict(kinds)
    for layer, given in layers.items():
        name, weight = search.own[layer].get("weight", ("", None))
        if weight is None or not (kind := kinds[name]) or kind.name != "linear":
            continue
        blocks = blocks_of(kind.view or Matrix(), weight)
        if given.dim and blocks and all(block[-2] % given.dim == 0 for block in blocks):
            found[name] = replace(kind, heads=given)
        else:
            how = f", whose rows are no whole number of heads of {given.dim}" if given.dim else ""
            found[name] = replace(kind, why=f"{kind.why}; {given.why}{how}")
    return found


def attention_by(owner: nn.Module) -> str | None:
    """The attribute by which a module seems to be an attention layer though no name tells its queries; else None."""
    named = [name for name in (*_HEAD_DIMS, *_COUNTS) if isinstance(getattr(owner, name, None), int)]
    by = named[0] if named else "heads.dim" if head_dim_of(owner) else None
    two = by and len(_linear_layers(owner)) > 1
    return None if not two or layouts_of(owner) or any(map(parts, owner.modules())) else by


def _linear_layers(owner: nn.Module) -> list[nn.Module]:
    """The linear layers that are a module's children."""
    return [layer for layer in owner.children() if isinstance(layer, nn.Linear) or is_conv1d(layer)]
