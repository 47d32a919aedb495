"""Copies of a model that share the matrix signs: each process steps some matrices, one all-gather brings the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from surefoot.geometry.base import Eta
from surefoot.mesh.schedule import cost
from surefoot.mesh.slabs import owners
from surefoot.momentum import State
from surefoot.plan import Placement
from surefoot.roles import Role
from surefoot.stabilise import Stabiliser
from surefoot.step import Step, smooth


class Sharing:
    """Which matrices this process steps for all, and the exchange of what is stepped.

    Every process smooths every gradient, so momentum is its own; of a matrix that is another's it takes the next
    weight and what the stabiliser keeps. Matrices go to owners by the cost of their signs, the longest first.

    Args:
        group: processes with the same parameters and gradients.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._rank, self._ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self._owner: dict[Tensor, int] = {}

    def divide(self, placements: dict[Tensor, Placement]) -> None:
        """Give every matrix an owner.

        Args:
            placements: of all parameters; those without a matrix sign, or that are `DTensor`, stay everybody's.
        """
        shared = [p for p, placement in placements.items() if _is_dear(p, placement)]
        costs = [sum(cost(*block) for block in placements[p].blocks) for p in shared]
        self._owner = dict(zip(shared, owners(costs, self._ranks), strict=True))

    def step_of(self, p: Tensor) -> Step | None:
        """What takes the step of a parameter that another process steps: its momentum's; None for all others."""
        return None if self._owner.get(p, self._rank) == self._rank else smoothed_only

    def exchange(self, states: Any, placements: dict[Tensor, Placement]) -> None:
        """Give every process what the owners have stepped: one all-gather, padded to the longest share.

        Args:
            states: the optimizer's state by parameter.
            placements: of all parameters.
        """
        shares: list[list[Tensor]] = [[] for _ in range(self._ranks)]
        for p, owner in self._owner.items():
            shares[owner] += _stepped(p, states[p], placements[p].role)
        sizes = [sum(x.nbytes for x in share) for share in shares]
        if not any(sizes):
            return
        own = [_as_bytes(x) for x in shares[self._rank]]
        device = next(iter(self._owner)).device
        sent = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
        if own:
            torch.cat(own, out=sent[: sizes[self._rank]])
        received = sent.new_empty(self._ranks, max(sizes))
        dist.all_gather(list(received.unbind()), sent, self._group)
        for rank, share in enumerate(shares):
            if rank != self._rank:
                for x, part in zip(share, _cut(received[rank], share), strict=True):
                    x.copy_(part.clone().view(x.dtype).reshape(x.shape))  # a copy begins at a multiple of the dtype


def smoothed_only(
    role: Role, stabiliser: Stabiliser, w: Tensor, g: Tensor, state: State, eta: Eta, finite: Tensor
) -> tuple[Tensor, State]:
    """The first half of a step, for a weight that comes from its owner: arguments and results as of `step`."""
    return w, {**state, **smooth(role, g, state, finite)[0]}


def _is_dear(p: Tensor, placement: Placement) -> bool:
    """Whether a step takes a matrix sign, of a parameter that is whole here."""
    role = placement.role
    return role.geometry.couples == {-2, -1} and not role.owned and not hasattr(p, "placements")


def _stepped(p: Tensor, state: State, role: Role) -> list[Tensor]:
    """What only the owner changes."""
    names = sorted(state.keys() - role.smoothed - {"skipped", "rounds"})
    return [p.detach(), *(state[name] for name in names)]


def _as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def _cut(row: Tensor, share: Sequence[Tensor]) -> Iterator[Tensor]:
    start = 0
    for x in share:
        yield row[start : start + x.nbytes]
        start += x.nbytes
