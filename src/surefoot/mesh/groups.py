"""The processes of a mesh that hold a parameter together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from surefoot.mesh.slabs import Slab, cutting, slabs


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut over processes.

    Args:
        slabs: the part of each process of the group.
        mine: this process's index in the group.
        ranks: the processes of the group, ascending.
        group: the processes whose parts make up the whole; None if this one holds all of it.
    """

    slabs: tuple[Slab, ...]
    mine: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None

    @property
    def slab(self) -> Slab:
        """This process's part."""
        return self.slabs[self.mine]


class Groups:
    """Process groups of meshes, each made once.

    Attributes:
        of: ranks -> group, in ascending order, in which torch numbers the processes of a group.
    """

    def __init__(self) -> None:
        self.of: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def cut(self, p: Any, name: str) -> Cut:
        """How a `DTensor` is cut.

        Args:
            p: the parameter.
            name: for messages.

        Returns:
            The slabs of all processes that hold parts of the same copy.

        Raises:
            ValueError: a placement that is neither a copy nor a contiguous part.
        """
        mesh, shape = p.device_mesh, tuple(p.device_mesh.shape)
        try:
            axes = tuple(axis for axis in cutting(p.placements) if shape[axis] > 1)
            everybody = slabs(tuple(p.shape), shape, p.placements)
        except ValueError as error:
            raise ValueError(f"{name} is a DTensor that cannot be stepped: {error}; redistribute it first") from None
        own = mesh.get_coordinate()
        assert own is not None, f"{name} is on a mesh that this process is not part of"
        kept = {_rank(mesh, c): everybody[position(shape, c)] for c in _along(shape, own, axes)}
        ranks = self.along(mesh, axes)
        mine = ranks.index(_rank(mesh, own))
        found = Cut(tuple(kept[rank] for rank in ranks), mine, ranks, self.of[ranks] if axes else None)
        assert tuple(p.to_local().shape) == found.slab.size, f"{name}: {tuple(p.to_local().shape)} is not {found.slab}"
        return found

    def along(self, mesh: Any, axes: Sequence[int]) -> tuple[int, ...]:
        """The ranks that differ from this one along some axes of the mesh; their group is in `of` from here on."""
        shape, own = tuple(mesh.shape), mesh.get_coordinate()
        ranks = tuple(sorted(_rank(mesh, c) for c in _along(shape, own, tuple(axes))))
        if ranks not in self.of and len(ranks) > 0:
            self.of[ranks] = _group(mesh, ranks, axes)
        return ranks


def gather(x: Any, cut: Cut | None = None, owner: int | None = None) -> Tensor:
    """All of a `DTensor`, from every process's part: a collective, and no part of a step.

    torch's `full_tensor` does not take uneven parts of what several mesh dimensions cut.

    Args:
        x: the tensor.
        cut: how it is cut, if that is known.
        owner: the one process of the group that gets it, the others nothing; default: all of them.

    Returns:
        The whole tensor; an empty one where another process gets it.
    """
    cut = cut or Groups().cut(x, "a tensor")
    local: Tensor = x.to_local().detach()
    if cut.group is None:
        return local
    sizes, own = [slab.numel for slab in cut.slabs], local.reshape(-1)
    sent = [own.numel() if owner in (None, rank) else 0 for rank in range(len(sizes))]
    received = sizes if owner in (None, cut.mine) else [0] * len(sizes)
    parts = local.new_empty(sum(received))
    dist.all_to_all_single(parts, own.repeat(sum(n > 0 for n in sent)), received, sent, cut.group)
    if owner not in (None, cut.mine):
        return parts
    shape = tuple(x.shape)
    whole = local.new_empty(shape)
    for slab, part in zip(cut.slabs, torch.split(parts, received), strict=True):
        whole[slab.within(Slab((0,) * len(shape), shape))] = part.reshape(slab.size)
    return whole


def _group(mesh: Any, ranks: tuple[int, ...], axes: Sequence[int]) -> Any:
    """The process group of these ranks, which differ along these axes."""
    if ranks == tuple(range(dist.get_world_size())):
        return dist.distributed_c10d._get_default_group()
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    if mesh.mesh_dim_names and axes:
        names = tuple(mesh.mesh_dim_names[axis] for axis in axes)
        return (mesh if len(names) == mesh.ndim else mesh[names])._flatten().get_group()
    return dist.new_group(list(ranks), use_local_synchronization=True) if axes else None


def _rank(mesh: Any, coordinate: Sequence[int]) -> int:
    """The process at a coordinate of a mesh."""
    return int(mesh.mesh[tuple(coordinate)])


def _along(shape: Sequence[int], coordinate: Sequence[int], axes: Sequence[int]) -> list[list[int]]:
    """The coordinates that differ from one along these axes only, in row-major order."""
    found = [list(coordinate)]
    for axis in axes:
        found = [[*c[:axis], i, *c[axis + 1 :]] for c in found for i in range(shape[axis])]
    return found


def position(shape: Sequence[int], coordinate: Sequence[int]) -> int:
    """The row-major number of a coordinate."""
    number = 0
    for size, i in zip(shape, coordinate, strict=True):
        number = number * size + i
    return number
