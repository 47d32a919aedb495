"""The pair (W_q, W_k) of an attention layer: its rows, the bound on its logits, the factors that rescale it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from surefoot.attention.logits import head_norm_bound, logit_bound, logit_factors
from surefoot.discovery.heads import QK_NORMS, Part, attention_by, head_dim_of, parts, scale_of
from surefoot.discovery.known_classes import is_conv1d, kinds_by_class
from surefoot.discovery.torch_layers import kinds_by_type
from surefoot.views import Matrix, Transposed, Vector, View

UNKNOWN_SCALE = (
    "no attribute `scaling` says by which factor logits are multiplied: give LogitControl(model, scale=...), which is "
    "head_dim ** -0.5 where scaled_dot_product_attention gets no scale"
)


@dataclass(frozen=True)
class Projection:
    """W_q or W_k and its bias: a linear layer, or one of the projections fused in one.

    Args:
        layer: module with the weight and possibly a bias.
        view: layout of its weight.
        part: index of the projection among the view's matrices, counted over its blocks.
        weight: the layer's attribute for the weight.
        bias: that for the bias.

    >>> Projection(nn.Linear(4, 8)).rows()["weight"].shape
    torch.Size([8, 4])
    """

    layer: nn.Module
    view: View = field(default_factory=Matrix)
    part: int = 0
    weight: str = "weight"
    bias: str = "bias"

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The layer's "weight", and its "bias" if it has one."""
        found = {"weight": self.layer.get_parameter(self.weight), "bias": self.layer._parameters.get(self.bias)}
        return {name: p for name, p in found.items() if p is not None}

    def rows(self) -> dict[str, Tensor]:
        """Rows of the projection, at least in float32.

        Returns:
            "weight": `(heads * head_dim, in)`, and "bias": `(heads * head_dim,)` if the layer has one; whole where they
            are `DTensor`, by a collective.
        """
        rows = {}
        for name, p in self.parameters.items():
            whole = p.full_tensor() if hasattr(p, "full_tensor") else p
            wide = whole.detach().to(torch.promote_types(p.dtype, torch.float32))
            rows[name] = self._select(self._view_of(p).split(wide))
        return rows

    @property
    def count(self) -> int:
        """Number of rows, from shapes alone."""
        shape = self.parameters["weight"].shape
        return len(self._select(self.view.split(torch.empty(shape, device="meta"))))

    def expand(self, factors: Tensor) -> dict[Tensor, Tensor]:
        """Expand factors per row to factors per entry of the layer's parameters.

        Args:
            factors: one per row of the projection, `(heads * head_dim,)`.

        Returns:
            Parameter -> factors of its shape, 1 in the rows of other projections.
        """
        expanded: dict[Tensor, Tensor] = {}
        for p in self.parameters.values():
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
        scale: factor on the products; None where it is not known, and there is no bound.

    >>> pair = QueryKey(Projection(nn.Linear(8, 8)), Projection(nn.Linear(8, 4)), head_dim=4, scale=0.5)
    >>> pair.bound().shape
    torch.Size([2])
    """

    query: Projection
    key: Projection
    head_dim: int
    scale: float | None = None

    def bound(self, input_rms: float = 1.0) -> Tensor:
        """Upper bound on the absolute value of each head's logits.

        Args:
            input_rms: largest RMS of the layer's inputs.

        Returns:
            `(heads,)`, see `logit_bound`.

        Raises:
            ValueError: the scale is not known.
        """
        if self.scale is None:
            raise ValueError(UNKNOWN_SCALE)
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


def find_pairs(model: nn.Module, scale: float | None = None) -> dict[str, QueryKey]:
    """Find the query-key pairs of a model's attention layers; layers with a norm on their queries are left out.

    The layers are those whose heads the plan finds: `nn.MultiheadAttention`, and modules with a size of heads whose
    queries and keys have names of the table in `surefoot.discovery.heads`, or a fused projection of a listed class.

    Args:
        model: any module.
        scale: factor on the products, for layers without an attribute `scaling` or `heads.scale`.

    Returns:
        Name of the attention layer -> pair.

    Raises:
        ValueError: there is no such layer, or one whose queries, keys, size of heads or norms are not known.
    """
    pairs, normed = {}, 0
    for name, owner in model.named_modules():
        if not (known := parts(owner)) and not attention_by(owner):
            continue
        if any(not isinstance(owner._modules.get(norm) or nn.Identity(), nn.Identity) for norm in QK_NORMS):
            normed += 1
            continue
        try:
            pairs[name] = _pair(owner, known, scale)
        except ValueError as error:
            raise ValueError(
                f"{name or 'the model'} ({type(owner).__name__}) {error}; give pairs={{{name!r}: QueryKey(...), ...}}"
            ) from None
    if not pairs:
        raise ValueError(
            f"{type(model).__name__} has no attention layer with W_q and W_k that this finds ({normed} with a norm on "
            "their queries need no control: the norm's gain bounds their logits); give pairs={name: QueryKey(...)}"
        )
    return pairs


def _pair(owner: nn.Module, known: Mapping[str, Part], scale: float | None) -> QueryKey:
    """The pair of an attention layer; ValueError says what of it is not known."""
    size, own = head_dim_of(owner), scale_of(owner)
    if not {"query", "key"} <= known.keys():
        raise ValueError(f"has {', '.join(known) or attention_by(owner)}, but no W_q and W_k by a name that is known")
    if size is None:
        raise ValueError("has W_q and W_k, but no attribute head_dim for the size of its heads: set it")
    query, key = (_projection(known[what]) for what in ("query", "key"))
    if query.count % size or key.count % size:
        raise ValueError(f"has {query.count} and {key.count} rows of queries and keys, no whole heads of {size}")
    for name, child in owner.named_children():
        vectors = {p.numel() for p in child.parameters(recurse=False)} if _is_norm(child) else set()
        if vectors & {size, query.count, key.count}:
            raise ValueError(f"has a norm {name!r}, and it is not known whether that is of its queries")
    return QueryKey(query, key, size, scale if own is None else own)


def _projection(part: Part) -> Projection:
    """W_q or W_k as it is in its layer."""
    layer, view = part.layer, part.view or Matrix()
    if isinstance(layer, nn.MultiheadAttention):
        if part.view is None and layer.in_proj_bias is not None:
            raise ValueError("has keys or values of another width, and a bias for all in one: make it with bias=False")
        return Projection(layer, view, part.index, part.name, "in_proj_bias")
    transposed = is_conv1d(layer)
    if layer._parameters.get("weight") is None or not (transposed or isinstance(layer, nn.Linear)):
        raise ValueError(f"has {part.name!r}, which is no linear layer with a weight of its own but a wrapper")
    return Projection(layer, Transposed(view) if transposed else view, part.index)


def _is_norm(module: nn.Module) -> bool:
    found = kinds_by_type(module) | kinds_by_class(module)
    return any(kind and kind.name == "gain" for kind in found.values())
