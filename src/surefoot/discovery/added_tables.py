"""What is added to the rows of a tied table: learned positions, token types. They take the table's scale.

A table `W (V, d)` that is embedding and head has rows of RMS `1/d` under the head's rule, so that its logits are
Theta(1). A position of RMS 1, added to such a row, leaves a `1/d` of the token: at d = 768 the model sees positions
only. Added rows therefore get the table's rule, its initial values and its unit of radii.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from surefoot.discovery.known_classes import adds_projected_tables
from surefoot.discovery.torch_layers import Kind
from surefoot.scaling import Constant, LogRows

ADDED = ("embedding", "positions")


def added_kinds(
    model: nn.Module, tied: Mapping[str, nn.Parameter], kinds: Mapping[str, Kind | None]
) -> dict[str, Kind]:
    """Kinds of the parameters whose rows are added to those of a tied table.

    By the tree of modules: a module that has the table, or a child with nothing but tables in which it is, adds its
    other tables of the same width to it. By class: tables that are added after a projection to another width.

    Args:
        model: any module.
        tied: name -> parameter that is embedding and head, and has the head's rule.
        kinds: parameter name -> kind found so far.

    Returns:
        Parameter name -> kind, of those that change.

    >>> model = nn.ModuleDict({"tokens": nn.Embedding(9, 4), "types": nn.Embedding(2, 4), "out": nn.Linear(4, 9)})
    >>> model["out"].weight = model["tokens"].weight
    >>> kinds = {"tokens.weight": None, "types.weight": Kind("embedding", ""), "out.bias": Kind("bias", "")}
    >>> list(added_kinds(model, {"tokens.weight": model["tokens"].weight}, kinds))
    ['types.weight']
    """
    parameters = dict(model.named_parameters())
    candidates = {parameters[n]: n for n, kind in kinds.items() if kind and kind.name in ADDED and n not in tied}
    changed = {}
    for table_name, table in tied.items():
        unit = Constant(LogRows()(tuple(table.shape)))
        for p in _added_to(model, table, candidates):
            if (kind := kinds[candidates[p]]) is not None:
                why = f"{kind.why}; added to {table_name}, which is tied: its rule, rows of RMS 1/d"
                changed[candidates[p]] = Kind("tied_positions", why, initial=kind.initial, radius_unit=unit)
    return changed


def _added_to(model: nn.Module, table: nn.Parameter, candidates: Mapping[nn.Parameter, str]) -> Iterator[nn.Parameter]:
    """The candidates that are added to the rows of a table."""

    def only_tables(module: nn.Module) -> bool:
        own = [p for p in module.parameters() if p.requires_grad or p is table or p in candidates]
        return bool(own) and all(p is table or p in candidates for p in own)

    for owner in model.modules():
        if only_tables(owner) and owner is not model:  # what contains it decides
            continue
        children = [m for m in owner.children() if only_tables(m) and not isinstance(m, nn.Linear | nn.ModuleList)]
        together = [*owner.parameters(recurse=False), *(p for m in children for p in m.parameters())]
        if any(p is table for p in together):
            same_width = not adds_projected_tables(owner)
            yield from (p for p in together if p in candidates and (p.shape[-1] == table.shape[-1] or not same_width))
