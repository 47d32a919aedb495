"""Kinds of the weights that feed attention, and of bare matrices, from how a forward pass uses them."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from surefoot.discovery.kinds import NO_VIEW, UNCLEAR, UNSPLIT, Heads, Kind, Kinds, Search, blocks_of
from surefoot.discovery.rows import Use, uses_of
from surefoot.views import Fused, Grouped, Interleaved, Matrix, Projections, Stack, Transposed, View

Own = Mapping[str, tuple[str, nn.Parameter]]
"""A module's own parameters: attribute -> name and parameter."""


@torch.inference_mode(False)
def fed(search: Search, kinds: Kinds) -> Kinds:
    """Kinds of the weights that feed attention, and of bare matrices, by a forward pass on the inputs, if any."""
    if search.inputs is None:
        return {}
    owned = [(own, *each) for own in search.own.values() for each in own.items()]
    tables = [own["weight"][1].shape for module, own in search.own.items() if isinstance(module, nn.Embedding)]
    head = max(tables, default=None)  # a bare matrix of the shape of the table with most rows may be it
    matrices = [(name, p, kinds[name]) for *_, (name, p) in owned if p.ndim > 1]
    free = {p for name, p, kind in matrices if not kind and not search.said(name) and p.shape != head}
    weights = dict.fromkeys(p for _, p, kind in matrices if p in free or (kind and kind.name == "linear"))
    home = torch.get_default_device()
    with torch.device("cpu" if home.type == "meta" else home):
        uses, found = uses_of(search.model, weights, search.inputs), Kinds()
        for own, attribute, (name, p) in owned:
            if p in uses and (uses[p].heads or not kinds[name]):
                found |= _kinds_of(own, attribute, uses[p], kinds)
    return found


def _kinds_of(own: Own, attribute: str, use: Use, kinds: Kinds) -> Kinds:
    """Kinds of a matrix, by its use, and of its bias; empty if no view has its rows and nothing else is known."""
    name, kind, what = own[attribute][0], kinds[own[attribute][0]], f"{', '.join(use.heads)} by the forward pass"
    if (layout := layout_of(use, kind.view if kind else None)) is None:
        known = Heads(0, (), what) if use.clear else None
        why = f"{what}, {NO_VIEW if known else UNCLEAR}: {UNSPLIT}"
        return {name: replace(kind, heads=known, why=f"{kind.why}; {why}")} if kind else {}
    view, parts, dim = layout
    new = kind or Kind("linear", "matrix, by its products in the forward pass")
    if use.heads:
        new = replace(new, heads=Heads(dim, parts, what))
        new = new if dim else replace(new, why=f"{new.why}; {what}{', one norm for each' if len(parts) > 1 else ''}")
    bias, x = own.get(attribute.replace("weight", "bias"), ("", None))
    inner = view.inner if isinstance(view, Transposed) else view
    if not kind and inner == Matrix() and x is not None and x.shape == (use.shape[-2 if inner is view else -1],):
        return {name: replace(new, view=view), bias: Kind("bias", f"bias of {name}")}
    if view == (new.view or Matrix()):
        return {name: new}
    if kind and kind.view:
        new = replace(new, why=f"{new.why}, whose rows are in another order than its name says")
    found = Kinds({name: replace(new, view=view)})
    if x is not None and x.ndim == 1 and blocks_of(inner, x):
        usual = k if (k := kinds[bias]) and k.name == "bias" else Kind("bias", "bias of the matrix")
        found[bias] = replace(usual, why=f"{usual.why}, {what}", view=inner)
    return found


def layout_of(use: Use, usual: View | None = None) -> tuple[View, tuple[str, ...], int] | None:
    """Find the view of a parameter from its use.

    Args:
        use: how a forward pass uses the parameter.
        usual: the view that other rules found; kept where it has the same rows.

    Returns:
        The view; the names of its projections in order, "other" for rows that are no query, key or value; the rows of a
        head of queries or keys, 0 where each projection has one norm. None where no view has these rows.

    >>> layout_of(Use((8, 4), {False}, {"query": {(0, 1, 2), (4, 5, 2)}}))  # per head a query and its gate
    (Interleaved(heads=2, parts=2), ('query', 'other'), 2)
    """
    if len(use.transposed) != 1 or not use.clear:
        return None
    turned = use.transposed == {True}
    shape = (*use.shape[:-2], use.shape[-1 if turned else -2], 1)
    rows = torch.arange(math.prod(shape)).reshape(shape)
    if (parts := _parts(use, rows.numel())) is None:
        return None
    wanted = [torch.tensor(part) for part in parts.values()]
    count, groups, sizes = len(parts), 1 + int((wanted[0].diff() != 1).sum()), tuple(map(len, wanted))
    grouped = Grouped(groups, tuple(size // groups for size in sizes))
    inner = usual.inner if isinstance(usual, Transposed) else usual
    views = inner, Matrix(), Stack(), Fused(count), Projections(sizes), Interleaved(groups, count), grouped
    for view in filter(None, views):
        if blocks_of(view, rows):
            found = [x.flatten() for block in view.split(rows) for x in block.unbind()]
            alike = len(found) == count and all(map(torch.equal, found, wanted))
            if alike or not use.heads:  # without heads, the first view that fits
                return Transposed(view) if turned else view, tuple(parts), _dim(use, *parts)
    return None


def _parts(use: Use, count: int) -> dict[str, list[int]] | None:
    """Projection -> its rows, in order; None where heads are not contiguous, differ in size or overlap."""
    parts = dict[str, list[int]]()
    for name, heads in use.heads.items():
        if any(last - first + 1 != size for first, last, size in heads) or len({size for *_, size in heads}) != 1:
            return None
        rows = [row for first, last, _ in sorted(heads) for row in range(first, last + 1)]
        parts |= {} if rows in parts.values() else {name: rows}  # one matrix for queries and keys, or keys and values
    every = [row for rows in parts.values() for row in rows]
    if other := sorted({*range(count)} - {*every}):
        parts["other"] = other
    return dict(sorted(parts.items(), key=lambda part: part[1])) if len({*every}) == len(every) else None


def _dim(use: Use, *parts: str) -> int:
    """Rows of a head, if the only projection, or all but the last, are queries and keys; else 0."""
    *before, last = parts
    sizes = {size for name in before or parts for *_, size in use.heads.get(name, ())}
    fits = {*before} <= {"query", "key"} and (last in ("query", "key")) == (not before)
    return sizes.pop() if fits and len(sizes) == 1 else 0
