"""The pair (W_q, W_k) of an attention layer: its rows, the bound on its logits, the factors that rescale it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.attention.logits import head_norm_bound, logit_bound, logit_factors
from surefoot.discovery.heads import head_dim_of
from surefoot.discovery.known_classes import kinds_by_class, layouts_of
from surefoot.discovery.torch_layers import kinds_by_type
from surefoot.views import Matrix, Transposed, Vector, View

_SEPARATE = (("q_proj", "k_proj"), ("query", "key"))
_FUSED = ("c_attn", "query_key_value", "Wqkv", "qkv")
"""Attributes of attention modules whose layers are W_q and W_k; a fused layer has queries first, then keys."""


@dataclass(frozen=True)
class Projection:
    """W_q or W_k and its bias: a linear layer, or one of the projections fused in one.

    Args:
        layer: module with `weight` and possibly `bias`.
        view: layout of its weight.
        part: index of the projection among the view's matrices, counted over its blocks.

    >>> Projection(nn.Linear(4, 8)).rows()["weight"].shape
    torch.Size([8, 4])
    """

    layer: nn.Module
    view: View = field(default_factory=Matrix)
    part: int = 0

    def rows(self) -> dict[str, Tensor]:
        """Rows of the projection, at least in float32.

        Returns:
            "weight": `(heads * head_dim, in)`, and "bias": `(heads * head_dim,)` if the layer has one; whole where they
            are `DTensor`, by a collective.
        """
        rows = {}
        for name, p in self.layer.named_parameters(recurse=False):
            whole = p.full_tensor() if hasattr(p, "full_tensor") else p
            wide = whole.detach().to(torch.promote_types(p.dtype, torch.float32))
            rows[name] = self._select(self._view_of(p).split(wide))
        return rows

    @property
    def count(self) -> int:
        """Number of rows, from shapes alone."""
        weight = self.layer.get_parameter("weight")
        return len(self._select(self.view.split(torch.empty(weight.shape, device="meta"))))

    def expand(self, factors: Tensor) -> dict[Tensor, Tensor]:
        """Expand factors per row to factors per entry of the layer's parameters.

        Args:
            factors: one per row of the projection, `(heads * head_dim,)`.

        Returns:
            Parameter -> factors of its shape, 1 in the rows of other projections.
        """
        expanded: dict[Tensor, Tensor] = {}
        for p in self.layer.parameters(recurse=False):
            view = self._view_of(p)
            blocks = [block.clone() for block in view.split(torch.ones(p.shape, dtype=p.dtype, device=p.device))]
            rows = self._select(blocks)
            rows.mul_(factors.reshape(-1, *(1,) * (rows.ndim - 1)))
            expanded[p] = view.join(blocks, tuple(p.shape))
        return expanded

    def _select(self, blocks: Sequence[Tensor]) -> Tensor:
        """The projection's own matrix or vector among the blocks of the layer's weight or bias."""
        return [rows for block in blocks for rows in block.unbind()][self.part]

    def _view_of(self, p: Tensor) -> View:
        """The view of the weight, or the one that it implies for the bias."""
        if p.ndim > 1:
            return self.view
        inner = self.view.inner if isinstance(self.view, Transposed) else self.view
        return Vector() if isinstance(inner, Matrix) else inner


@dataclass(frozen=True)
class QueryKey:
    """The pair `(W_q, W_k)` of an attention layer with logits `scale <W_q x, W_k y>`, with or without rotary embedding.

    Args:
        query: W_q, its rows ordered by head.
        key: W_k, its rows ordered by head; consecutive query heads share a key.
        head_dim: number of rows of a head.
        scale: factor on the products.

    >>> pair = QueryKey(Projection(nn.Linear(8, 8)), Projection(nn.Linear(8, 4)), head_dim=4, scale=0.5)
    >>> pair.bound().shape
    torch.Size([2])
    """

    query: Projection
    key: Projection
    head_dim: int
    scale: float

    def bound(self, input_rms: float = 1.0) -> Tensor:
        """Upper bound on the absolute value of each head's logits.

        Args:
            input_rms: largest RMS of the layer's inputs.

        Returns:
            `(heads,)`, see `logit_bound`.
        """
        rows = self.query.rows(), self.key.rows()
        norms = [head_norm_bound(x["weight"], x.get("bias"), self.head_dim, input_rms) for x in rows]
        return logit_bound(norms[0], norms[1], self.scale)

    def factors(self, largest: Tensor, threshold: float) -> dict[Tensor, Tensor]:
        """Factors that multiply each head's logits by `min(1, threshold / largest)`.

        Args:
            largest: largest logit per head, `(heads,)`.
            threshold: upper limit of the logits after scaling.

        Returns:
            Parameter -> factors of its shape, in [0, 1], for `SteepestDescent.scale_`.
        """
        factors: dict[Tensor, Tensor] = {}
        per_head = logit_factors(largest, threshold, self.key.count // self.head_dim)
        for projection, factor in zip((self.query, self.key), per_head, strict=True):
            for p, expanded in projection.expand(factor.repeat_interleave(self.head_dim)).items():
                factors[p] = factors[p] * expanded if p in factors else expanded  # W_q and W_k may be one parameter
        return factors


def find_pairs(model: nn.Module) -> dict[str, QueryKey]:
    """Find the query-key pairs of a model's attention layers; layers with a norm layer (QK-norm) are left out.

    An attention layer is a module with the attributes `q_proj` and `k_proj`, or `query` and `key`, or a fused
    projection of a class that discovery lists, and with attributes for head size and scale as transformers' layers and
    the reference models have them.

    Args:
        model: any module.

    Returns:
        Name of the attention layer -> pair.

    Raises:
        ValueError: there is no such layer, or one without attributes for head size and scale.
    """
    pairs = {}
    for name, owner in model.named_modules():
        projections, heads = _projections_of(owner), head_scale(owner)
        if projections is None or any(_is_norm(child) for child in owner.children()):
            continue
        if heads is None:
            raise ValueError(
                f"{name} ({type(owner).__name__}) has W_q and W_k, but no attributes for the size and scale of its "
                f"heads; give pairs={{{name!r}: QueryKey(...), ...}}"
            )
        pairs[name] = QueryKey(*projections, *heads)
    if not pairs:
        raise ValueError(
            f"{type(model).__name__} has no attention layer with W_q and W_k that this finds (layers with a norm on "
            "their queries need no control: the norm's gain bounds their logits); give pairs={name: QueryKey(...)}"
        )
    return pairs


def _projections_of(owner: nn.Module) -> tuple[Projection, Projection] | None:
    """(W_q, W_k) of a module, or None."""
    for names in _SEPARATE:
        layers = [getattr(owner, name, None) for name in names]
        if all(isinstance(layer, nn.Linear) for layer in layers):
            return Projection(layers[0]), Projection(layers[1])  # type: ignore[arg-type]
    for name, view in layouts_of(owner).items():
        layer = getattr(owner, name, None)
        if name in _FUSED and view is not None and isinstance(layer, nn.Module):
            view = view if isinstance(layer, nn.Linear) else Transposed(view)
            if sum(block[0] for block in view.blocks(tuple(layer.get_parameter("weight").shape))) >= 3:
                return Projection(layer, view, 0), Projection(layer, view, 1)
    return None


def head_scale(owner: Any) -> tuple[int, float] | None:
    """(head_dim, scale) of an attention module, or None."""
    heads: Any = getattr(owner, "heads", None)
    if hasattr(heads, "dim") and hasattr(heads, "scale"):
        return heads.dim, heads.scale
    size, scale = head_dim_of(owner), getattr(owner, "scaling", None)
    return (size, scale) if size is not None and isinstance(scale, float) else None


def _is_norm(module: nn.Module) -> bool:
    return any(kind.name == "gain" for kind in (kinds_by_class(module) or kinds_by_type(module)).values())
