"""Attention by structure: the number of its heads among its attributes, and one layer with the rows of all of them."""

from contextlib import suppress
from itertools import islice, product

from torch import nn

from surefoot.discovery.kinds import class_names
from surefoot.views import Fused, Projections, View

HEAD_DIMS = ("head_dim", "head_size", "attention_head_size")
"""Attributes of attention modules that hold the number of features of a head."""

COUNTS = ("num_heads", "n_heads", "n_head", "nhead", "num_attention_heads", "heads")
"""Attributes of attention modules that hold the number of heads."""

KEY_COUNTS: tuple[str, ...] = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
KEY_COUNTS += ("num_query_groups", "n_query_groups")
"""Attributes of attention modules that hold the number of key heads, if queries share them."""

IN_ORDER = ("c_attn", "Wqkv", "qkv", "qkv_proj", "to_qkv")
"""Layers with the rows of all queries, then all keys, then all values, in the code that has these names."""


def number(owner: nn.Module, names: tuple[str, ...]) -> int | None:
    """The first positive whole number of these names among the attributes of a module, or of its `config`."""
    for holder, name in product((owner, getattr(owner, "config", None)), names):
        with suppress(RuntimeError):  # raised by a configuration whose layers differ
            if type(found := getattr(holder, name, None)) is int and found > 0:
                return found
    return None


def fused(owner: nn.Module) -> tuple[str, View] | None:
    """Find a layer that fuses h heads of queries with g heads of keys and of values, before an output projection.

    Args:
        owner: any module of a class of your own.

    Returns:
        The attribute of the layer, and its layout if these rows are in that order, which only the name tells; None if
        the numbers of heads and the two linear layers of the module do not fit each other.

    >>> layer = nn.Module()
    >>> layer.c_attn, layer.c_proj, layer.n_head = nn.Linear(8, 24), nn.Linear(8, 8), 2
    >>> fused(layer)
    ('c_attn', Fused(parts=3))
    """
    heads = None if class_names(owner) else number(owner, COUNTS)
    linears = [*islice((layer for layer in owner.modules() if isinstance(layer, nn.Linear)), 3)] if heads else []
    named = {layer: name for name, layer in owner._modules.items()}
    if not heads or len(linears) != 2 or linears[0] not in named:
        return None
    layer, output = linears
    size, keys = number(owner, HEAD_DIMS) or output.in_features // heads, number(owner, KEY_COUNTS) or heads
    sizes = heads * size, keys * size, keys * size
    if sum(sizes) != layer.out_features or output.in_features != sizes[0] or heads % keys:
        return None
    return named[layer], Fused(3) if keys == heads else Projections(sizes)
