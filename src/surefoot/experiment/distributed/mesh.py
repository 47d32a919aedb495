"""A mesh of processes: data-parallel copies, FSDP2 and tensor parallelism, by torch's own functions."""

import datetime
import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from surefoot.experiment.distributed.processes import Processes, blocks_of, local_of
from surefoot.experiment.models.decoder import Decoder
from surefoot.experiment.models.layers import Block
from surefoot.linalg import onednn_ops

AXES = ("replicate", "fsdp", "tp")
"""Axes of a mesh, the slowest links first: whole copies, parts of every parameter, parts of every matrix product."""


class MeshShape(NamedTuple):
    """How many processes lie along each axis.

    Args:
        replicate: copies of the model, each with its own part of the batch.
        fsdp: processes that share a copy by `fully_shard`, each with its own part of the batch.
        tp: processes that share matrix products, with the same part of the batch.
    """

    replicate: int = 1
    fsdp: int = 1
    tp: int = 1


def parse(text: str | None, ranks: int) -> MeshShape:
    """A mesh as it is written on the command line.

    Args:
        text: `fsdp=4,tp=2`; None: all processes along fsdp.
        ranks: number of processes there are.

    Returns:
        The mesh.

    Raises:
        ValueError: an unknown axis, one named twice, a size that is no positive number, or another number of processes.

    >>> parse("fsdp=4,tp=2", 8)
    MeshShape(replicate=1, fsdp=4, tp=2)
    """
    if text is None:
        return MeshShape(fsdp=ranks)
    parts = [re.fullmatch(rf"({'|'.join(AXES)})=0*([1-9][0-9]*)", part.strip()) for part in text.split(",")]
    sizes = {part[1]: int(part[2]) for part in parts if part}
    if len(sizes) < len(parts):
        raise ValueError(f"the mesh {text!r} must name {', '.join(AXES)} at most once, with sizes: fsdp=4,tp=2")
    shape = MeshShape(**sizes)
    if (size := math.prod(shape)) != ranks:
        remedy = f"torchrun --nproc-per-node {size}, or another mesh"
        raise ValueError(f"the mesh {text} needs {size} processes, but {ranks} were started: {remedy}")
    return shape


@contextmanager
def joined(mesh: str | None, device: torch.device, minutes: float) -> Iterator[Processes]:
    """The processes that `torchrun` started, as a mesh; their process group is destroyed at the end.

    Args:
        mesh: as `parse` takes it.
        device: where to train.
        minutes: a process that waits longer than this for another ends with an error.

    Yields:
        The mesh.

    Raises:
        ValueError: see `parse`.
    """
    shape = parse(mesh, int(os.environ["WORLD_SIZE"]))
    limit = datetime.timedelta(minutes=minutes)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    store, rank, ranks = next(iter(rendezvous("env://", timeout=limit)))
    # After a restart the store may still have the addresses of processes that are gone: keys of this attempt only.
    store = PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    try:
        _agree_on_products(ranks)
        yield Mesh(shape, device, limit)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _agree_on_products(ranks: int) -> None:
    """Have all processes use only products that are fast on each, so that copies of a weight stay the same."""
    fast: list[Any] = [None] * ranks
    dist.all_gather_object(fast, {name for name in ("onednn", "bfloat16") if onednn_ops.is_fast(name)})
    os.environ[onednn_ops.VARIABLE] = ",".join(["torch", *sorted(set.intersection(*fast))])


class Mesh(Processes):
    """All processes of torch's default group, as a mesh.

    Args:
        shape: processes along each axis; as many as there are.
        device: where to train.
        limit: how long a process waits for another in the collectives of checkpoints.
    """

    def __init__(self, shape: MeshShape, device: torch.device, limit: datetime.timedelta | None = None) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self._shape, self._mesh = shape, init_device_mesh(device.type, shape, mesh_dim_names=AXES)
        self.rank: int = dist.get_rank()
        self.count: int = math.prod(shape)
        self.shares: int = shape.replicate * shape.fsdp
        self.share: int = self.rank // shape.tp
        self.group: Any = dist.new_group(backend="gloo", timeout=limit)  # for threads that save while the run goes on
        self._signals = dist.new_group(backend="gloo", timeout=limit)  # for `highest`, beside such a thread

    def place(self, model: nn.Module, device: torch.device, bfloat16: bool) -> tuple[nn.Module, bool]:
        """Cut a model: matrix products over tp, then every block and the rest over fsdp and replicate.

        Args:
            model: whole, with its initial values, the same on every process.
            device: where to train.
            bfloat16: whether the forward pass is to compute in it; by `MixedPrecisionPolicy` where `fully_shard` cuts.

        Returns:
            The model, and whether the forward pass still needs `torch.autocast`.

        Raises:
            ValueError: a model that tensor parallelism does not know, or heads that its axis does not divide.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        model = model.to(device)
        if self._shape.tp > 1:
            _split_products(model, self._mesh["tp"])
        if self.shares == 1:
            return model, bfloat16
        axes = ("replicate", "fsdp") if self._shape.replicate > 1 else "fsdp"
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        options: dict[str, Any] = {"mesh": self._mesh[axes], **({"mp_policy": policy} if bfloat16 else {})}
        for module in _units(model):
            fully_shard(module, **options)
        return model, False

    def average_(self, x: Tensor) -> None:
        """The mean over all processes."""
        dist.all_reduce(x)
        x /= dist.get_world_size()

    def highest(self, value: int) -> int:
        """The largest of all processes' values, through host memory."""
        largest = torch.tensor(value)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._signals)
        return int(largest)

    def finish_gradients(self, model: nn.Module) -> None:
        """All-reduce over tp the gradients of per-head norms, of which each process sees its own heads alone."""
        if self._shape.tp > 1:
            group = self._mesh["tp"].get_group()
            for name, p in model.named_parameters():
                if p.grad is not None and ("query_norm" in name or "key_norm" in name):
                    dist.all_reduce(local_of(p.grad), group=group)

    def release(self, model: nn.Module) -> None:
        """Reshard weights: after a forward pass alone, the outermost module's stay whole for a backward pass."""
        from torch.distributed.fsdp import FSDPModule

        if isinstance(model, FSDPModule):
            model.reshard()

    @torch.no_grad()
    def clip_(self, model: nn.Module, limit: float) -> None:
        """Clip gradients as torch does, where parameters lie on several meshes."""
        squares: dict[Any, list[Tensor]] = {}
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for gradient in gradients:
            squares.setdefault(_cuts(gradient), []).append(local_of(gradient).float().square().sum())
        total = torch.zeros((), device=next(model.parameters()).device)
        for axes, parts in squares.items():
            own = torch.stack(parts).sum()
            for axis in axes:
                dist.all_reduce(own, group=self._mesh[axis].get_group())
            total += own
        factor = (limit / (total.sqrt() + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            local_of(gradient).mul_(factor)

    def together(self, value: Any) -> list[Any]:
        """Every process's value, by rank."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, self.group)
        return values


def _units(model: nn.Module) -> list[nn.Module]:
    """The units of `fully_shard`: each block that shares no parameter with other modules, then the whole model."""
    blocks = blocks_of(model)
    others = (part for _, part in model.named_modules(memo={*blocks}))
    users = Counter(p for part in others for p in {*part.parameters(recurse=False)})
    for block in blocks:
        users.update({*block.parameters()})
    return [*(block for block in blocks if all(users[p] == 1 for p in block.parameters())), model]


def _cuts(x: Any) -> tuple[str, ...]:
    """The axes along which a tensor is cut."""
    placed = zip(x.device_mesh.mesh_dim_names, x.placements, strict=True) if hasattr(x, "placements") else ()
    return tuple(name for name, one in placed if not one.is_replicate())


def _split_products(model: nn.Module, mesh: Any) -> None:
    """Cut the matrix products of a reference model over a tensor-parallel axis, heads and inner features."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if not isinstance(model, Decoder):
        raise ValueError("tensor parallelism needs a reference or published model: use fsdp=... for others")
    first = model.blocks[0]
    assert isinstance(first, Block)
    heads, names = first.attention.heads, dict(first.named_modules())
    if math.gcd(heads.count, heads.kv_count) % mesh.size():
        raise ValueError(f"tp={mesh.size()} does not divide {heads.count} heads and {heads.kv_count} key-value heads")
    outward = ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up")
    cuts = dict.fromkeys(outward, ColwiseParallel) | dict.fromkeys(("attention.output", "mlp.down"), RowwiseParallel)
    plan: dict[str, Any] = {f"blocks.*.{name}": cut() for name, cut in cuts.items() if name in names}
    plan["embedding"] = RowwiseParallel(input_layouts=Replicate())
    plan["head"] = ColwiseParallel(output_layouts=Replicate())
    tied = model.head.weight is model.embedding.weight
    parallelize_module(model, mesh, plan)
    if tied:
        model.head.weight = model.embedding.weight
