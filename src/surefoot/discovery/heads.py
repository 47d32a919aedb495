"""Which linear layers give an attention layer's heads their queries and keys, and the size of a head."""

from __future__ import annotations

from typing import Any

from torch import nn

from surefoot.discovery.known_classes import layouts_of

_HEAD_DIMS = ("head_dim", "head_size", "attention_head_size")
"""Attributes of attention modules that are the number of features of a head."""

_SEPARATE = (
    ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("to_q", "to_k", "to_v"), ("wq", "wk", "wv"),
    ("q", "k", "v"),
)  # fmt: skip
_FUSED = ("c_attn", "query_key_value", "Wqkv", "qkv", "qkv_proj", "wqkv")
"""Attributes of attention modules whose layers are W_q, W_k and W_v, or all of them, values last."""


def head_dim_of(module: nn.Module) -> int | None:
    """Number of features of a head of an attention module, from its attributes; None if it has none of them."""
    sizes = (
        getattr(getattr(module, "heads", None), "dim", None),
        *(getattr(module, name, None) for name in _HEAD_DIMS),
    )
    return next((size for size in sizes if isinstance(size, int) and size), None)


def queries_and_keys(owner: nn.Module) -> dict[nn.Module, int]:
    """The layers below an attention module that give queries or keys, alone or fused with values.

    Args:
        owner: any module.

    Returns:
        Layer -> rows of a head; empty for a module that is no attention layer, or does not say how large its heads are.

    >>> layer = nn.Module()
    >>> layer.query, layer.key, layer.value, layer.head_dim = (*(nn.Linear(8, 8) for _ in "qkv"), 4)
    >>> list(queries_and_keys(layer).values())
    [4, 4]
    """
    size = head_dim_of(owner)
    if size is None:
        return {}
    layers: list[Any] = [
        getattr(owner, name, None) for name, view in layouts_of(owner).items() if name in _FUSED and view
    ]
    layers += [layer for three in _separate(owner) for layer in three[:2]]
    return {layer: size for layer in layers if isinstance(layer, nn.Module)}


def queries_keys_values(owner: nn.Module) -> set[nn.Module]:
    """The layers of an attention module that give queries, keys or values, each a layer of its own.

    Args:
        owner: any module.

    Returns:
        The layers; empty for a module that is no attention layer, or fuses them.

    >>> layer = nn.Module()
    >>> layer.query, layer.key, layer.value, layer.out = (nn.Linear(8, 8) for _ in "qkvo")
    >>> len(queries_keys_values(layer))
    3
    """
    return {layer for three in _separate(owner) for layer in three}


def _separate(owner: nn.Module) -> list[tuple[nn.Module, ...]]:
    """W_q, W_k and W_v of a module, for each way of naming them that it has."""
    named = [tuple(getattr(owner, name, None) for name in names) for names in _SEPARATE]
    return [three for three in named if all(isinstance(layer, nn.Module) for layer in three)]  # type: ignore[misc]
