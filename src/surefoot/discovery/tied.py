"""Parameters that several modules share, such as a table that is embedding and head, and tables added to its rows.

A matrix `W (V, d)` that is both embedding and head ("tied") has one norm, and its two roles want different ones: an
embedding's rows `x = W_i` have RMS 1, a head's logits `<W_i, x>` are Theta(1) where its rows have RMS `1/d`. Under the
head's rule inputs have RMS `1/d`, which the first norm layer undoes. A model whose logits are `<W_i, x> / d` has rows
of RMS 1 in both. Hence the choices of `Plan.of(tied=...)`.

Under the head's rule a residual stream starts small, and branches as large as beside rows of RMS 1 would hide which
token it is: `small_rows` makes the first rows larger and the branches smaller, where the model multiplies neither rows
nor logits (decision 32).

Rows that are added to such a table's, as learned positions or token types, take its scale: beside a position of RMS 1 a
token's row is only `1/d`, so that at d = 768 the model sees positions only. Added rows therefore get the head's rule,
its initial values and the table's unit of radii.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from functools import partial

from torch import nn

from surefoot.discovery.kinds import Guess, Kind, Kinds, Search, Tied, scaled
from surefoot.discovery.known_classes import adds_projected_tables
from surefoot.discovery.multiplied import constants_of
from surefoot.scaling import Constant, LogRows

ADDED = ("embedding", "positions")

COUNT = 4
"""How many branches each counts as where the stream starts at small rows."""

_BEFORE = ("linear", "experts", "conv", "patches")
"""Kinds of what comes before the last norm."""

_NORMS = {
    *("word_embeddings_layernorm", "layernorm_embedding", "layer_norm_emb", "embedding_layernorm"),
    "embeddings_layer_norm",
}
"""Attributes of modules that are the norm of what their table gives."""


def tied(search: Search, kinds: Kinds) -> Kinds:
    """Resolve the kinds of all names of each parameter to be placed to one; an override fills in where no rule applies.

    Args:
        search: the model and its overrides, any of which resolves conflicting kinds.
        kinds: every name of a parameter -> kind.

    Returns:
        The first name of a parameter -> kind.

    Raises:
        ValueError: two kinds and no override, two parameters over one memory, a table that is tied against the policy.
    """
    _refuse_overlaps(search.parameters)
    uses: dict[nn.Parameter, list[str]] = defaultdict(list)
    for own in search.own.values():
        for name, parameter in own.values():
            uses[parameter].append(name)
    found = Kinds()
    for name, parameter in search.parameters.items():
        kind, said = _resolved(search, name, {use: kinds[use] for use in uses[parameter]}), search.said(name)
        found[name] = Kind(said, search.changes[name][1]) if said and not kind else kind
    return found


def _resolved(search: Search, name: str, uses: Kinds) -> Kind | None:
    """Resolve the kinds of all names of one parameter to a single kind."""
    names = ", ".join(uses)
    confident: list[Kind | None] = [kind for kind in uses.values() if kind and not isinstance(kind, Guess)]
    candidates = confident or [*uses.values()]
    different = {(kind.name, kind.view) if kind else None for kind in candidates}
    if len(different) == 1:
        kind = candidates[0]
        return replace(kind, why=f"{kind.why}; shared by {names}") if kind and len(uses) > 1 else kind
    if {kind.name if kind else None for kind in candidates} == {"embedding", "head"}:
        return tied_kind(search, name, names)
    if name in search.changes:
        return None
    described = ", ".join(f"{use}: {kind.name if kind else 'unknown'}" for use, kind in uses.items())
    raise ValueError(f"one parameter has two roles ({described}); choose one by an override")


def tied_kind(search: Search, name: str, names: str) -> Kind:
    """Kind of a matrix that is embedding and head, called `names` in its reason; `Plan.of` explains the policies."""
    policy = None if search.said(name) else search.tied
    multiplier, d = _multiplier(search.model), search.parameters[name].shape[-1]
    multiplied = multiplier is not None and 0.25 <= multiplier * d <= 4
    if policy == "error":
        raise ValueError(f"{names} are one matrix, tied, and tied='error'; untie them, or give tied='head'")
    if policy == "embedding" and not multiplied:
        remedy = f"set its attribute output_multiplier, here {multiplier}; otherwise give tied='head'"
        what = f"rows of RMS 1 make logits of size d = {d}, so the model must multiply them by 1/d"
        raise ValueError(f"tied='embedding' for {names}: {what} and {remedy}")
    if policy == "embedding" or (policy is None and multiplied):
        return Tied("embedding", f"tied ({names}); output_multiplier gives the head its width factor")
    return Tied("head", f"tied ({names}); the head's rule, since its outputs are the logits")


def _refuse_overlaps(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ValueError if two parameters start at the same address."""
    owners: dict[int, str] = {}
    for name, p in parameters.items():
        address = p.data_ptr()  # 0 on the meta device, of an empty one, of a subclass around a tensor, as DTensor
        if address and (other := owners.setdefault(address, name)) != name:
            raise ValueError(f"{other} and {name} are two parameters sharing memory; to tie them, assign one to both")


def added(search: Search, kinds: Kinds) -> Kinds:
    """The kinds, where tables that are added to a tied table under the head's rule become `tied_positions`.

    By the tree of modules: a module that has the table, itself or in a child with nothing but tables, adds its other
    tables of the same width to it. By class: tables that are added after a projection to another width.
    """
    heads = _as_heads(search, kinds)
    candidates = {search.parameters[n]: (n, k) for n, k in kinds.items() if k and k.name in ADDED and n not in heads}
    changed = Kinds()
    for table_name in heads:
        table = search.parameters[table_name]
        units = (partial(replace, radius_unit=Constant(LogRows()(tuple(table.shape)))),)
        for p in _added_to(search.model, table, candidates.keys()):
            name, kind = candidates[p]
            why = f"{kind.why}; added to {table_name}, which is tied: the head's rule, rows of RMS 1/d"
            changed[name] = Kind("tied_positions", why, initial=kind.initial, units=units)
    return kinds | changed


def small_rows(search: Search, kinds: Kinds) -> Kinds:
    """The kinds, where a tied table under the head's rule starts larger and branches of streams as wide count as more.

    The table starts at `log V` times an untied head's initial values, the unit of its radius. Each branch counts as
    four, so that `Recipe.depth` makes what writes into the stream start and move by less, but not where a norm of the
    embedding makes its rows large. Neither applies to a table that is frozen or named by an override, or whose rows or
    logits the model multiplies by a constant.
    """
    if _multiplier(search.model) not in (None, 1):
        return kinds
    multiplied = {p for use, p in constants_of(search.model) if use in ("embedding", "head")}
    own = {p: (n, k) for n, k in _as_heads(search, kinds).items() if (p := search.parameters[n]).requires_grad}
    small = {p: pair for p, pair in own.items() if p not in multiplied and not search.said(pair[0])}
    found = dict(kinds)
    for p, (name, table) in small.items():
        found[name] = replace(table, initial=partial(scaled, factor=LogRows()(tuple(p.shape))))
    widths = {p.shape[-1] for p in small.keys() - _normed(search.model)}
    for name, kind in kinds.items():
        if kind and kind.stream and kind.stream.width in widths:
            why = f"{kind.why}; each counts as {COUNT} in streams as wide as a tied table, whose rows are small"
            found[name] = replace(kind, stream=kind.stream._replace(branches=COUNT * kind.stream.branches), why=why)
    return found


def last_gain(search: Search, kinds: Kinds) -> Kinds:
    """The kinds, where logits of a tied table are multiplied by 1/d: the gain of the last norm sets their size.

    The table's rows keep RMS 1 as an embedding's, so that it would otherwise take them many steps (decision 36). The
    last norm is what follows the last matrix; there is none where the norm before the head has no gain.
    """
    shapes, found = {name: tuple(search.parameters[name].shape) for name in kinds}, dict(kinds)
    tables = {n: kind for n, kind in kinds.items() if isinstance(kind, Tied) and kind.name == "embedding"}
    names = [n for n in kinds if (kind := kinds[n]) and (kind.name in _BEFORE or kind.name == "gain")]
    names = [n for n in names if not _NORMS & {*n.split(".")}]  # of an embedding, wherever it is defined
    for name in names[-1:]:
        if (kind := kinds[name]) and kind.name == "gain" and shapes[name] in {shapes[n][-1:] for n in tables}:
            found[name] = replace(kind, name="last_gain", why=f"{kind.why}; sets the size of logits")
            return found
    for name, table in tables.items():
        found[name] = replace(table, why=f"{table.why}; no last gain sets the size of logits: better no multiplier")
    return found


def _multiplier(model: nn.Module) -> float | None:
    """The number that the model or a module within has as `output_multiplier`, the first; None where none has."""
    said = (getattr(module, "output_multiplier", None) for module in model.modules())
    return next((each for each in said if isinstance(each, float | int)), None)


def _normed(model: nn.Module) -> set[nn.Parameter]:
    """Tables in modules that have a norm for their rows."""
    owners = (module for module in model.modules() if module._modules.keys() & _NORMS)
    return {p for m in owners for child in m.children() if isinstance(child, nn.Embedding) for p in child.parameters()}


def _as_heads(search: Search, kinds: Kinds) -> dict[str, Tied]:
    """Tied tables under the head's rule."""
    tables = {name: kind for name, kind in kinds.items() if isinstance(kind, Tied)}
    return {name: kind for name, kind in tables.items() if (search.said(name) or kind.name) == "head"}


def _added_to(model: nn.Module, table: nn.Parameter, candidates: Set[nn.Parameter]) -> Iterator[nn.Parameter]:
    """The candidates that are added to the rows of a table."""

    def only_tables(module: nn.Module) -> bool:
        own = [p for p in module.parameters() if p.requires_grad or p is table or p in candidates]
        return bool(own) and all(p is table or p in candidates for p in own)

    for owner in model.modules():
        if only_tables(owner) and owner is not model:  # what contains it decides
            continue
        lists = {m for m in owner.children() if isinstance(m, nn.ModuleList)}
        apart = {m for m in lists if all(p is not table for p in m.parameters())}  # as a table for each layer
        children = [m for m in owner.children() if only_tables(m) and m not in apart and not isinstance(m, nn.Linear)]
        together = [*owner.parameters(recurse=False), *(p for m in children for p in m.parameters())]
        if any(p is table for p in together):
            same_width = not adds_projected_tables(owner)
            yield from (p for p in together if p in candidates and (p.shape[-1] == table.shape[-1] or not same_width))
