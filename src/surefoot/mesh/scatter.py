"""Initial values of parameters that several processes hold: an owner draws all, and sends each process its part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch import distributed as dist

from surefoot.mesh.groups import Cut, Groups
from surefoot.mesh.slabs import Slab, owners


def scatter_(parameters: Mapping[Tensor, Callable[[Tensor], None]]) -> None:
    """Write values that are drawn whole, the same as in one process to the last bit: a collective.

    Cost: each process draws about its share of the entries, and holds one whole parameter at a time.

    Args:
        parameters: `DTensor` -> what writes all of its values to a tensor on the CPU.
    """
    groups = Groups()
    found: dict[tuple[int, ...], list[tuple[Tensor, Cut]]] = defaultdict(list)
    for p in parameters:
        cut = groups.cut(p, "a parameter")
        found[cut.ranks].append((p, cut))
    for like in found.values():
        drawn_by = owners([p.numel() for p, _ in like], len(like[0][1].slabs))
        for (p, cut), owner in zip(like, drawn_by, strict=True):
            whole = None
            if owner == cut.mine:
                whole = torch.empty(p.shape, dtype=p.dtype)
                parameters[p](whole)
            _send(p.to_local().detach(), whole, cut, owner)  # type: ignore[attr-defined]


def _send(local: Tensor, whole: Tensor | None, cut: Cut, owner: int) -> None:
    """Every process's part of what the owner has."""
    if cut.group is None:
        assert whole is not None
        local.copy_(whole)
        return
    parts: list[Tensor] = []
    if whole is not None:
        everything = Slab((0,) * whole.ndim, tuple(whole.shape))
        parts = [whole[slab.within(everything)].reshape(-1) for slab in cut.slabs]
    outgoing = torch.cat(parts).to(local.device) if parts else local.new_empty(0)
    incoming = local.new_empty(local.numel())
    received = [local.numel() if rank == owner else 0 for rank in range(len(cut.slabs))]
    sent = [part.numel() for part in parts] or [0] * len(cut.slabs)
    dist.all_to_all_single(incoming, outgoing, received, sent, cut.group)
    local.copy_(incoming.reshape(local.shape))
