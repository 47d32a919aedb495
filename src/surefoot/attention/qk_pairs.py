"""The pair (W_q, W_k) of an attention layer: where its rows are, what bounds its logits, how they are scaled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.attention.logits import logit_bound, logit_factors, size_bound
from surefoot.discovery.known_classes import kinds_by_class, layouts_of
from surefoot.discovery.torch_layers import kinds_by_type
from surefoot.views import Matrix, Transposed, Vector, View

HEAD_SIZES = ("head_dim", "head_size", "attention_head_size")
SEPARATE = (("q_proj", "k_proj"), ("query", "key"))
FUSED = ("c_attn", "query_key_value", "Wqkv", "qkv")
"""Attributes of attention modules that hold W_q and W_k; a fused one has the queries first, then the keys."""


@dataclass(frozen=True)
class Projection:
    """W_q or W_k and its bias: a linear layer, or one of several that share one.

    Args:
        layer: has `weight` and perhaps `bias`.
        view: how its weight is laid out.
        part: which of the view's matrices, counted over its blocks.
    """

    layer: nn.Module
    view: View = field(default_factory=Matrix)
    part: int = 0

    def rows(self) -> dict[str, Tensor]:
        """`(heads * head_dim, in)` as "weight", `(heads * head_dim,)` as "bias" if there is one; float32 or better."""
        found = {}
        for name, p in self.layer.named_parameters(recurse=False):
            wide = p.detach().to(torch.promote_types(p.dtype, torch.float32))
            found[name] = self._own(self._layout(p).split(wide))
        return found

    def spread(self, factors: Tensor) -> dict[Tensor, Tensor]:
        """A factor for each row, `(heads * head_dim,)`, as `{parameter: factors in its shape}`."""
        found: dict[Tensor, Tensor] = {}
        for p in self.layer.parameters(recurse=False):
            layout = self._layout(p)
            blocks = [block.clone() for block in layout.split(torch.ones_like(p))]
            rows = self._own(blocks)
            rows.mul_(factors.reshape(-1, *(1,) * (rows.ndim - 1)))
            found[p] = layout.join(blocks, tuple(p.shape))
        return found

    def _own(self, blocks: Sequence[Tensor]) -> Tensor:
        return [rows for block in blocks for rows in block.unbind()][self.part]

    def _layout(self, p: Tensor) -> View:
        """The view, of the weight or of the bias."""
        if p.ndim > 1:
            return self.view
        inner = self.view.inner if isinstance(self.view, Transposed) else self.view
        return Vector() if isinstance(inner, Matrix) else inner


@dataclass(frozen=True)
class QueryKey:
    """The pair `(W_q, W_k)` of an attention layer whose logits are `scale <W_q x, W_k y>`, perhaps rotated.

    Args:
        query: rows of W_q, head by head.
        key: rows of W_k; heads that share a key lie together.
        head_dim: rows of a head.
        scale: factor on the products.
    """

    query: Projection
    key: Projection
    head_dim: int
    scale: float

    def bound(self, input_rms: float = 1.0) -> Tensor:
        """Upper bound on each head's logits for inputs of at most this RMS, `(heads,)`; see `logits`."""
        query, key = self.query.rows(), self.key.rows()
        sizes = [size_bound(x["weight"], x.get("bias"), self.head_dim, input_rms) for x in (query, key)]
        return logit_bound(sizes[0], sizes[1], self.scale)

    def factors(self, largest: Tensor, threshold: float) -> dict[Tensor, Tensor]:
        """`{parameter: factors}` that scale each head's logits by `min(1, threshold / largest)`."""
        found: dict[Tensor, Tensor] = {}
        both = logit_factors(largest, threshold, len(self.key.rows()["weight"]) // self.head_dim)
        for side, by_head in zip((self.query, self.key), both, strict=True):
            for p, factor in side.spread(by_head.repeat_interleave(self.head_dim)).items():
                found[p] = found[p] * factor if p in found else factor  # fused: one parameter has both
        return found


def find_pairs(model: nn.Module) -> dict[str, QueryKey]:
    """The pairs of a model's attention layers, by the layers' names; none for a layer that normalises its queries.

    A layer is known by its attributes: `q_proj` and `k_proj`, `query` and `key`, or fused ones whose layout
    `Plan.of` knows; and by the size and scale of its heads, as transformers' layers or the reference models have them.

    Raises:
        ValueError: there is no such layer, or one that does not say its heads.
    """
    found = {}
    for name, owner in model.named_modules():
        sides, shape = _sides(owner), _shape(owner)
        if sides is None or any(_is_norm(child) for child in owner.children()):
            continue
        if shape is None:
            raise ValueError(
                f"{name} ({type(owner).__name__}) has W_q and W_k and does not say the size and scale of its heads; "
                f"give pairs={{{name!r}: QueryKey(...), ...}}"
            )
        found[name] = QueryKey(*sides, *shape)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention layer with W_q and W_k that this finds (layers with a norm on "
            "their queries need no control: the norm's gain bounds their logits); give pairs={name: QueryKey(...)}"
        )
    return found


def _sides(owner: nn.Module) -> tuple[Projection, Projection] | None:
    for names in SEPARATE:
        layers = [getattr(owner, name, None) for name in names]
        if all(isinstance(layer, nn.Linear) for layer in layers):
            return Projection(layers[0]), Projection(layers[1])  # type: ignore[arg-type]
    for name, view in layouts_of(owner).items():
        layer = getattr(owner, name, None)
        if name in FUSED and view is not None and isinstance(layer, nn.Module):
            view = view if isinstance(layer, nn.Linear) else Transposed(view)
            if sum(block[0] for block in view.blocks(tuple(layer.get_parameter("weight").shape))) >= 3:
                return Projection(layer, view, 0), Projection(layer, view, 1)
    return None


def _shape(owner: Any) -> tuple[int, float] | None:
    """(head_dim, scale)."""
    heads: Any = getattr(owner, "heads", None)
    if hasattr(heads, "dim") and hasattr(heads, "scale"):
        return heads.dim, heads.scale
    sizes = (getattr(owner, name, None) for name in HEAD_SIZES)
    size, scale = next((size for size in sizes if size), None), getattr(owner, "scaling", None)
    return (size, scale) if isinstance(size, int) and isinstance(scale, float) else None


def _is_norm(module: nn.Module) -> bool:
    return any(kind.name == "gain" for kind in (kinds_by_class(module) or kinds_by_type(module)).values())
