"""The process groups that hold a parameter together, and the gathering and scattering of whole parameters."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from surefoot.mesh.slabs import Slab, cutting, slabs


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut over processes.

    Args:
        slabs: each process's part, in the order of `ranks`.
        mine: this process's index in the group.
        ranks: the processes of the group, ascending.
        group: the processes whose parts make up the whole; None if this one holds all of it.
        name: the parameter's name, for messages.
    """

    slabs: tuple[Slab, ...]
    mine: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None
    name: str = ""

    @property
    def slab(self) -> Slab:
        """This process's part."""
        return self.slabs[self.mine]


class Groups(dict[tuple[int, ...], dist.ProcessGroup]):
    """Process groups of meshes, each made once: ascending ranks, as torch numbers them, -> group."""

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
        mesh = p.device_mesh
        try:
            axes = [axis for axis in cutting(p.placements) if mesh.shape[axis] > 1]
            slab_of_rank = _slabs(p)
        except ValueError as error:
            raise ValueError(f"{name} is a DTensor that cannot be stepped: {error}; redistribute it first") from None
        ranks = self.along(mesh, axes)
        kept = tuple(slab_of_rank[rank] for rank in ranks)
        found = Cut(kept, ranks.index(dist.get_rank()), ranks, self[ranks] if axes else None, name)
        assert tuple(p.to_local().shape) == found.slab.size, f"{name}: {tuple(p.to_local().shape)} is not {found.slab}"
        return found

    def along(self, mesh: Any, axes: Collection[int]) -> tuple[int, ...]:
        """The ranks that differ from this one only along these mesh axes; makes their group if it is new."""
        places = tuple(slice(None) if axis in axes else i for axis, i in enumerate(mesh.get_coordinate()))
        ranks = tuple(sorted(mesh.mesh[places].flatten().tolist()))
        if ranks not in self:
            self[ranks] = _group(mesh, ranks, axes)
        return ranks


_made = threading.local()  # under torch's threaded backend each thread is a process


def _groups() -> Groups:
    """The groups that this process has made, as long as its default group lives."""
    default = dist.distributed_c10d._get_default_group()
    if getattr(_made, "default", None) is not default:
        _made.default, _made.groups = default, Groups()
    groups: Groups = _made.groups
    return groups


def _group(mesh: Any, ranks: tuple[int, ...], axes: Collection[int]) -> Any:
    """The process group of these ranks, which differ along these axes."""
    if ranks == tuple(range(dist.get_world_size())):
        return dist.distributed_c10d._get_default_group()
    if len(axes) == 1:
        return mesh.get_group(*axes)
    if mesh.mesh_dim_names and axes:
        names = tuple(mesh.mesh_dim_names[axis] for axis in axes)
        return (mesh if len(names) == mesh.ndim else mesh[names])._flatten().get_group()
    return dist.new_group(list(ranks), use_local_synchronization=True) if axes else None


def _slabs(x: Any) -> dict[int, Slab]:
    """Rank -> the slab of a `DTensor` that it holds."""
    mesh = x.device_mesh
    return dict(zip(mesh.mesh.flatten().tolist(), slabs(tuple(x.shape), tuple(mesh.shape), x.placements), strict=True))


def slab_of(x: Any) -> Slab:
    """The slab of a `DTensor` that this process holds."""
    return _slabs(x)[dist.get_rank()]


def gather(x: Any, cut: Cut | None = None, owner: int | None = None) -> Tensor:
    """Gather a whole `DTensor` from every process's part: a collective, and no part of a step.

    torch's `full_tensor` does not support uneven parts where several mesh dimensions cut.

    Args:
        x: the tensor.
        cut: how it is cut, if that is known.
        owner: index in the group of the only process that gets it; default: all do.

    Returns:
        The whole tensor; an empty one where another process gets it.
    """
    cut = cut or _groups().cut(x, "a tensor")
    local: Tensor = x.to_local().detach()
    if cut.group is None:
        return local
    mine, own = owner in (None, cut.mine), local.reshape(-1)
    parts = [own if owner in (None, rank) else own[:0] for rank in range(len(cut.slabs))]
    received = _exchanged(parts, [slab.numel * mine for slab in cut.slabs], cut.group)
    if not mine:
        return received[0]
    whole = local.new_empty(x.shape)
    for slab, part in zip(cut.slabs, received, strict=True):
        whole[slab.within(Slab.of(x.shape))] = part.reshape(slab.size)
    return whole


def scatter_(parameters: Mapping[Tensor, Callable[[Tensor], None]]) -> None:
    """Draw whole values and scatter them into the shards, bit for bit as in one process: a collective.

    Cost: each process draws about its share of the entries, and holds one whole parameter at a time.

    Args:
        parameters: `DTensor` -> function that writes all of its values to a tensor on the CPU.
    """
    groups, loads = _groups(), Counter[Any]()
    cuts = {p: groups.cut(p, "a parameter") for p in parameters}  # may make groups, so before any exchange
    for p, draw_ in parameters.items():
        cut, local = cuts[p], p.to_local().detach()  # type: ignore[attr-defined]
        owner = min(range(len(cut.slabs)), key=lambda i: loads[cut.ranks, i])
        loads[cut.ranks, owner] += p.numel()
        parts = [local.new_empty(0)] * len(cut.slabs)
        if owner == cut.mine:
            draw_(whole := torch.empty(p.shape, dtype=p.dtype))
            whole = whole.to(local.device)
            parts = [whole[slab.within(Slab.of(p.shape))].reshape(-1) for slab in cut.slabs]
        sizes = [local.numel() * (rank == owner) for rank in range(len(parts))]
        received = parts if cut.group is None else _exchanged(parts, sizes, cut.group)
        local.copy_(received[owner].reshape(local.shape))


def _exchanged(parts: Sequence[Tensor], sizes: list[int], group: dist.ProcessGroup) -> Sequence[Tensor]:
    """All-to-all of flat parts, one per process; returns the received ones, of these sizes."""
    incoming = parts[0].new_empty(sum(sizes))
    dist.all_to_all_single(incoming, torch.cat(list(parts)), sizes, [len(part) for part in parts], group)
    return torch.split(incoming, sizes)


def apart(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Split a flat tensor into consecutive tensors of these shapes.

    >>> [x.tolist() for x in apart(torch.arange(3), [(1, 2), ()])]
    [[[0, 1]], 2]
    """
    pieces = torch.split(flat, [math.prod(shape) for shape in shapes])
    return [x.reshape(tuple(shape)) for x, shape in zip(pieces, shapes, strict=True)]


def as_dtensor(local: Tensor, mesh: Any, placements: Sequence[Any], shape: tuple[int, ...]) -> DTensor:
    """A contiguous `DTensor` of which this process holds local, on local's device.

    FSDP2 makes its own this way: `DTensor.from_local` would move CPU-offloaded weights to the mesh's device.
    """
    whole = torch.empty(shape, dtype=local.dtype, device="meta")
    spec = DTensorSpec(mesh, tuple(placements), TensorMeta(whole.shape, whole.stride(), whole.dtype))
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def along(placement: Any, dim: int) -> Any:
    """The same placement along another tensor dimension."""
    return type(placement)(dim, **({"split_factor": f} if (f := getattr(placement, "split_factor", None)) else {}))
