"""Routers, the matrices that choose among experts: by what stands beside them."""

import re
from collections.abc import Collection

from torch import nn

from surefoot.discovery.kinds import Kind, Kinds, Search, children_of
from surefoot.views import Stack, Transposed, View

_NAMED = re.compile("(^|_)(gate|gating|router)")
"""In the name of a router behind a list of as many modules, where it could also be a head of as many classes."""


def routers(search: Search, kinds: Kinds) -> Kinds:
    """Add the routers to the kinds: modules whose matrices are all `(E, d)`, beside E experts in a stack or a list.

    A list of E modules that read d holds experts if a module before it, or inside of a block beside it, is `(E, d)`.
    Elsewhere a module behind the list may be a head of E classes behind blocks, and is a router by its name alone.
    """
    found = dict(kinds)
    by_pass = {n for n, k in kinds.items() if k and k.name == "linear" and _is_stack(k.view) and not k.heads}
    stacked = {name for name, k in kinds.items() if (search.said(name) or (k and k.name)) == "experts"} | by_pass
    several = (m for m in search.own if isinstance(m, nn.ModuleList | nn.Sequential) and len(children_of(m)) > 1)
    inside = {inner for blocks in several for block in blocks.children() for inner in block.modules()}
    for owner in search.own:
        children = children_of(owner)
        stacks = [p for m in (owner, *children.values()) for name, p in search.own[m].values() if name in stacked]
        sizes = {(p.shape[0], width) for p in stacks for width in p.shape[-2:]}
        lists = {name: _listed(m) for name, m in children.items() if isinstance(m, nn.ModuleList)}
        every = {*lists.values()}
        for name, module in children.items():
            lists.pop(name, None)
            behind = {*lists.values()}
            named = owner not in inside and behind != every and _NAMED.search(name)
            known = sizes | (every if named or owner in inside else behind)
            found |= _router(search, kinds, module, known, f" by the name `{name}`" if named else "")
    return found


def _is_stack(view: View | None) -> bool:
    """Whether it is a stack of matrices, stored `(E, out, in)` or `(E, in, out)`."""
    return isinstance(view.inner if isinstance(view, Transposed) else view, Stack)


def _listed(modules: nn.ModuleList) -> tuple[int, int]:
    """The number of modules in a list, and the width that all read first (0 if they differ, or of a single module)."""
    first = {next((m.in_features for m in x.modules() if isinstance(m, nn.Linear)), 0) for x in modules.children()}
    return len(modules), first.pop() if len(first) == 1 < len(modules) else 0


def _router(search: Search, kinds: Kinds, module: nn.Module, sizes: Collection[tuple[int, ...]], how: str) -> Kinds:
    """The kinds of a module's matrices, and of their biases, if all are of these sizes and free to be routers."""
    found = Kinds()
    for layer in module.modules():
        for attribute, (name, p) in search.own[layer].items():
            kind, bias = kinds[name], search.name(layer, "bias")
            fits = attribute == "weight" and tuple(p.shape) in sizes
            if p.ndim < 2 or not (fits or p.requires_grad):  # a frozen row is of corrections, as ERNIE's
                continue
            if not fits or (kind and (kind.name not in ("linear", "router") or kind.view)):
                return {}
            found[name] = Kind("router", f"router {type(layer).__name__} beside {len(p)} experts{how}")
            found |= {bias: Kind("bias", f"bias of {type(layer).__name__}")} if bias else {}
    return found
