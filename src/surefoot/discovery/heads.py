"""Which layers of an attention module give queries, keys and values, how large its heads are, how logits are scaled.

Without a forward pass only names distinguish a query's matrix from a value's of the same shape. This is the one table
of these names, for the plan, QK-clip and the monitor. Where names decide, or tell nothing, the plan's reason says so.
"""

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from surefoot.discovery.feeding import fed
from surefoot.discovery.kinds import UNSPLIT, Heads, Kinds, Search, blocks_of, class_names, is_linear, own_parameters
from surefoot.discovery.known_classes import layouts_of
from surefoot.discovery.structure import COUNTS, HEAD_DIMS, IN_ORDER, KEY_COUNTS, fused, number
from surefoot.views import Fused, Matrix, Transposed, Vector, View

_PARTS = ("query", "key", "value")
_UNKNOWN = f"no attribute ({', '.join((*HEAD_DIMS, *COUNTS))})"

_SEPARATE = (
    ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("to_q", "to_k", "to_v"), ("wq", "wk", "wv"),
    ("q", "k", "v"), ("q_lin", "k_lin", "v_lin"), ("c_q", "c_k", "c_v"), ("query_proj", "key_proj", "value_proj"),
    ("Wq", "Wk", "Wv"), ("to_query", "to_key", "to_value"), ("lin_query", "lin_key", "lin_value"),
)  # fmt: skip
_JOINT = ("add_q_proj", "add_k_proj", "add_v_proj")
_FUSED = (*IN_ORDER, "query_key_value", "wqkv", "to_kv")
"""Attributes of attention modules: separate layers W_q, W_k and W_v; those of a second stream in the same module, as
text beside images; and layers that fuse all of them in a known layout."""

QK_NORMS = (
    *("query_norm", "key_norm", "q_norm", "k_norm", "q_layernorm", "k_layernorm", "norm_q", "norm_k"),
    *("query_layernorm", "key_layernorm", "q_layer_norm", "k_layer_norm", "qk_norm"),
)
"""Attributes of attention modules that are the norms of queries and keys."""

_DIVIDED = (
    *("EsmSelfAttention", "EvollaSaProtSelfAttention"),  # queries, before they are rotated
    "OpenAIPrivacyFilterAttention",  # queries and keys by the fourth root each
    "VideoPrismMultiheadAttentionPoolingHead",  # queries, by a learned vector whose softplus starts at log 2
)
_UNDIVIDED = (
    *("GPTNeoSelfAttention", "T5Attention", "MT5Attention", "UMT5Attention", "LongT5Attention", "LongT5LocalAttention"),
    *("LongT5TransientGlobalAttention", "SwitchTransformersAttention", "UdopAttention", "Pop2PianoAttention"),
    *("Pix2StructVisionAttention", "Pix2StructTextAttention"),
)
"""Classes that divide queries or keys by the root of a head's size whatever `scaling` says, and that divide nothing."""


@dataclass(frozen=True)
class Projection:
    """W_q, W_k or W_v and its bias: a linear layer, or one of the projections fused in one.

    Args:
        layer: module with the weight and possibly a bias.
        view: layout of its weight.
        part: index of the projection among the view's matrices, counted over its blocks.
        weight: the layer's attribute for the weight.
        bias: its attribute for the bias.
        name: the attention module's attribute for the layer.

    >>> Projection(nn.Linear(4, 8)).rows()["weight"].shape
    torch.Size([8, 4])
    """

    layer: nn.Module
    view: View = field(default_factory=Matrix)
    part: int = 0
    weight: str = "weight"
    bias: str = "bias"
    name: str = ""

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
        found = {"weight": getattr(self.layer, self.weight), "bias": getattr(self.layer, self.bias, None)}
        return {name: self._rows_of(_whole(x)) for name, x in found.items() if x is not None}

    @property
    def count(self) -> int:
        """Number of rows, from shapes alone."""
        return len(self._rows_of(torch.empty(self.parameters["weight"].shape, device="meta")))

    def expand(self, factors: Tensor) -> dict[Tensor, Tensor]:
        """Expand factors per row to factors per entry of the layer's parameters.

        Args:
            factors: one per row of the projection, `(heads * head_dim,)`.

        Returns:
            Parameter -> factors of its shape, 1 in the rows of other projections.
        """
        expanded: dict[Tensor, Tensor] = {}
        for p in self.parameters.values():
            entries = self._rows_of(torch.arange(p.numel(), device=p.device).reshape(p.shape))
            full = torch.ones(p.numel(), dtype=p.dtype, device=p.device)
            full[entries] = factors.to(p.dtype).reshape(-1, *(1,) * (entries.ndim - 1)).expand(entries.shape)
            expanded[p] = full.reshape(p.shape)
        return expanded

    def _rows_of(self, x: Tensor) -> Tensor:
        """This projection's rows of a tensor that is laid out as the layer's weight or bias."""
        view = self.view.inner if isinstance(self.view, Transposed) and x.ndim < 2 else self.view
        if x.ndim < 2 and isinstance(self.layer, nn.MultiheadAttention):
            view = Fused(3)  # the bias of all three, whose weights may be apart
        elif x.ndim < 2 and isinstance(view, Matrix):
            view = Vector()
        rows = [rows for block in view.split(x) for rows in block.unbind()]
        return rows[self.part if len(rows) > 1 else 0]


def _whole(x: Tensor) -> Tensor:
    """A weight's values, gathered if it is a `DTensor`, at least in float32."""
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    return wide.full_tensor() if hasattr(wide, "full_tensor") else wide


def head_dim_of(module: nn.Module) -> int | None:
    """Features per head of an attention module: by its attributes, or query rows over the number of heads."""
    sizes = (getattr(getattr(module, "heads", None), "dim", None), *(getattr(module, n, None) for n in HEAD_DIMS))
    if size := next((size for size in sizes if isinstance(size, int) and size), None):
        return size
    if not (count := number(module, COUNTS)) or not {"query", "key"} <= (known := parts(module)).keys():
        return None
    if any(getattr(known[what].layer._parameters.get("weight"), "ndim", 0) != 2 for what in ("query", "key")):
        return None  # a wrapper around the layer, or a convolution
    size, rest = divmod(known["query"].count, count)
    keys = number(module, KEY_COUNTS)
    return None if rest or (keys and known["key"].count != keys * size) else size


def scale_of(module: nn.Module) -> float | None:
    """Factor on products of queries and keys: `heads.scale`, `scaling`, by class, torch's own; None without these."""
    scale = getattr(getattr(module, "heads", None), "scale", getattr(module, "scaling", None))
    names = class_names(module)
    divided = isinstance(module, nn.MultiheadAttention) or any(name in names for name in _DIVIDED)
    if divided and (size := head_dim_of(module)):
        return float(size**-0.5)
    if any(name in names for name in _UNDIVIDED) or (type(scale) is int and scale == 1):
        return 1.0
    return scale if isinstance(scale, float) and math.isfinite(scale) else None


def normed(module: nn.Module) -> bool:
    """Whether an attention module has a norm of queries or keys under a known name."""
    return any(not isinstance(module._modules.get(name) or nn.Identity(), nn.Identity) for name in QK_NORMS)


def parts(owner: nn.Module) -> dict[str, Projection]:
    """The projections of an attention module that give queries, keys and values, as far as they are known.

    Args:
        owner: any module.

    Returns:
        "query", "key", "value" -> the projection; empty for a module without them.

    >>> layer = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("wq", "wk", "wv", "wo")})
    >>> {what: part.name for what, part in parts(layer).items()}
    {'query': 'wq', 'key': 'wk', 'value': 'wv'}
    """
    if isinstance(owner, nn.MultiheadAttention):
        one, bias = owner.in_proj_weight is not None, "in_proj_bias"
        weights = ("in_proj_weight",) * 3 if one else [f"{x}_proj_weight" for x in "qkv"]
        view = Fused(3) if one else Matrix()
        return {x: Projection(owner, view, i, weights[i], bias, weights[i]) for i, x in enumerate(_PARTS)}
    layouts, layers = layouts_of(owner), {n: layer for n, layer in owner._modules.items() if layer is not None}

    def view_of(name: str) -> View:
        view, layer = layouts.get(name) or Matrix(), layers[name]
        return Transposed(view) if is_linear(layer) and not isinstance(layer, nn.Linear) else view

    for names in _SEPARATE:
        found = {x: n for x, n in zip(_PARTS, names, strict=True) if n in layers}
        if {"query", "key"} <= found.keys():
            return {x: Projection(layers[n], view_of(n), name=n) for x, n in found.items()}
    for name in (n for n, view in layouts.items() if n in _FUSED and view and n in layers):
        weight = own_parameters(layers[name]).get("weight", torch.empty(()))
        count = sum(block[0] for block in blocks_of(view_of(name), weight)) or 3  # 3 where the layout does not fit
        order = ("query", "value", "key") if "CodeGenAttention" in class_names(owner) else _PARTS
        apart = {"query": Projection(layers["to_q"], name="to_q")} if name == "to_kv" else {}  # two are keys and values
        return apart | {x: Projection(layers[name], view_of(name), i, name=name) for i, x in enumerate(order[-count:])}
    return {}


def projections(owner: nn.Module) -> list[tuple[str, Projection]]:
    """The projections that `parts` finds, and those of a second stream that is attended to with the first.

    Args:
        owner: any module.

    Returns:
        Pairs of "query", "key" or "value" and a projection that gives it.
    """
    named = zip(_PARTS, _JOINT, strict=True)
    return [*parts(owner).items(), *((x, Projection(m, name=n)) for x, n in named if (m := owner._modules.get(n)))]


def found_heads(owner: nn.Module) -> dict[nn.Module, Heads]:
    """Heads of an attention module's linear layers, by the names of its attributes.

    Args:
        owner: any module.

    Returns:
        Layer -> its heads, with 0 rows if unknown; empty for a module that is no attention layer by its
        attributes.

    >>> layer = nn.Module()
    >>> layer.query, layer.key, layer.value, layer.head_dim = (*(nn.Linear(8, 8) for _ in "qkv"), 4)
    >>> [(heads.dim, heads.why) for heads in found_heads(layer).values()]
    [(4, 'query by the name `query`'), (4, 'key by the name `key`')]
    """
    known, size, found = projections(owner), head_dim_of(owner), dict[nn.Module, Heads]()
    if not known and (by := attention_by(owner)):
        why = f"in a module with {by}, but no name that is known tells whether these are queries or keys: {UNSPLIT}"
        return dict.fromkeys(filter(is_linear, owner.children()), Heads(0, (), why))
    for layer in dict.fromkeys(part.layer for _, part in known):
        named = {what: part.name for what, part in known if part.layer is layer}
        names = tuple(named)
        why = f"{', '.join(names)} by the name `{named[names[0]]}`"
        if len(names) > 1 and names[-1] != "value":
            found[layer] = Heads(0, names, f"{why}, {names[-1]} last: one norm for each")
        elif names != ("value",):
            why += "" if size else f", but {_UNKNOWN} says how many rows a head has: {UNSPLIT}"
            found[layer] = Heads(size or 0, names, why)
    return found


def heads(search: Search, kinds: Kinds) -> Kinds:
    """Add to the kinds the heads of query and key matrices, or the reason why these are not known."""
    by_running = fed(search, kinds)
    found, layers = kinds | by_running, dict[nn.Module, Heads]()
    for by_name in map(found_heads, search.own):
        passed = [by_running.get(search.name(layer, "weight") or "") for layer in by_name]
        if not any(kind and kind.heads for kind in passed):  # the pass tells of all or of none
            layers |= by_name
    for layer, given in layers.items():
        name, weight = search.own[layer].get("weight", ("", None))
        if weight is None or not (kind := kinds[name]) or kind.name != "linear":
            continue
        blocks = blocks_of(kind.view or Matrix(), weight)
        if given.dim and blocks and all(block[-2] % given.dim == 0 for block in blocks):
            found[name] = replace(kind, heads=given)
        else:
            how = f", whose rows are no whole number of heads of {given.dim}: {UNSPLIT}" if given.dim else ""
            found[name] = replace(kind, why=f"{kind.why}; {given.why}{how}")
    return found


def attention_by(owner: nn.Module) -> str | None:
    """The attribute by which a module seems to be an attention layer though no name tells its queries; else None."""
    named = [name for name in (*HEAD_DIMS, *COUNTS) if isinstance(getattr(owner, name, None), int)]
    by = named[0] if named else "heads.dim" if head_dim_of(owner) else "the rows of its heads" if fused(owner) else None
    two = by and len(list(filter(is_linear, owner.children()))) > 1
    return None if not two or layouts_of(owner) or any(map(parts, owner.modules())) else by
