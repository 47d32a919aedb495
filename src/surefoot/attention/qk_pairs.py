"""The pair (W_q, W_k) of an attention layer: its rows, the bound on its logits, the factors that rescale it."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from surefoot.attention.logits import head_norm_bound, logit_bound, logit_factors
from surefoot.discovery.heads import Projection, attention_by, head_dim_of, normed, parts, scale_of
from surefoot.discovery.kinds import is_linear
from surefoot.discovery.known_classes import kinds_by_class
from surefoot.discovery.torch_layers import kinds_by_type

UNKNOWN_SCALE = (
    "no attribute `scaling` states the factor of the logits: give LogitControl(model, scale=...), which is "
    "head_dim ** -0.5 where scaled_dot_product_attention gets no scale"
)


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
        scale: factor on the products, for layers that say none: `scaling`, `heads.scale`, or a listed class as T5's.

    Returns:
        Name of the attention layer -> pair.

    Raises:
        ValueError: there is no such layer, or one whose queries, keys, size of heads or norms are not known.
    """
    pairs, with_norms = {}, 0
    for name, owner in model.named_modules():
        if not (known := parts(owner)) and not attention_by(owner):
            continue
        if normed(owner):
            with_norms += 1
            continue
        try:
            pairs[name] = _pair(owner, known, scale)
        except ValueError as error:
            raise ValueError(
                f"{name or 'the model'} ({type(owner).__name__}) {error}; give pairs={{{name!r}: QueryKey(...), ...}}"
            ) from None
    if not pairs:
        raise ValueError(
            f"no attention layer with W_q and W_k was found in {type(model).__name__} ({with_norms} with a norm on "
            "their queries need no control: the norm's gain bounds their logits); give pairs={name: QueryKey(...)}"
        )
    return pairs


def _pair(owner: nn.Module, known: Mapping[str, Projection], scale: float | None) -> QueryKey:
    """The pair of an attention layer; ValueError says what of it is not known."""
    size, own, in_one = head_dim_of(owner), scale_of(owner), isinstance(owner, nn.MultiheadAttention)
    if not {"query", "key"} <= known.keys():
        raise ValueError(f"has {', '.join(known) or attention_by(owner)}, but no W_q and W_k by a known name")
    if size is None:
        raise ValueError("has W_q and W_k, but no attribute head_dim for the size of its heads: set it")
    query, key = known["query"], known["key"]
    if in_one and query.weight != key.weight and owner.in_proj_bias is not None:
        raise ValueError("has keys or values of another width, but one bias for all: make it with bias=False")
    if in_one and owner.bias_k is not None:
        raise ValueError("has a key of its own, bias_k, which no row of W_k scales: make it with add_bias_kv=False")
    for part in () if in_one else (query, key):
        if not is_linear(part.layer) or part.layer._parameters.get("weight") is None:
            raise ValueError(f"has {part.name!r}, a wrapper and not a linear layer with its own weight")
    if query.count % size or key.count % size:
        raise ValueError(f"has {query.count} query and {key.count} key rows, not whole heads of {size}")
    for name, child in owner.named_children():
        norm = any(kind and kind.name == "gain" for kind in (kinds_by_type(child) | kinds_by_class(child)).values())
        if norm and {p.numel() for p in child.parameters(recurse=False)} & {size, query.count, key.count}:
            raise ValueError(f"has a norm {name!r} that may or may not be of its queries")
    return QueryKey(query, key, size, scale if own is None else own)
