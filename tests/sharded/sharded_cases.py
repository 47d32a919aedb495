"""Parameters of every layout, gradients of every kind, and a comparison of sharded steps with those of one process."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import surefoot as sf
from surefoot import Plan
from surefoot.mesh.slabs import Slab, slabs
from surefoot.plan import Placement
from surefoot.views import AlternatingStack, Fused, FusedStack, Interleaved, PerHead, Projections, Transposed

LINEAR = {"square": (8, 8), "one": (1, 6), "three": (3, 5), "five": (5, 3), "column": (9, 1), "empty": (0, 4)}
VIEWS = {
    "fused": ((12, 6), Fused(3)),
    "projections": ((10, 6), Projections((6, 2, 2))),
    "interleaved": ((12, 6), Interleaved(2, 3)),
    "transposed": ((6, 12), Transposed(Fused(3))),
    "heads": ((8, 6), PerHead(2, sf.views.Matrix())),
}
STACKS = {
    "gates": ((4, 6, 5), FusedStack(2)),
    "alternating": ((5, 6, 4), AlternatingStack(2)),
    "turned": ((4, 5, 6), Transposed(FusedStack(2))),
}
KINDS = {
    "embedding": ((11, 6), "embedding"),
    "positions": ((1, 7, 6), "positions"),
    "head": ((11, 6), "head"),
    "gain": ((7,), "gain"),
    "bias": ((7,), "bias"),
    "scalar": ((), "scalar"),
    "experts": ((4, 6, 5), "experts"),
    "conv": ((6, 2, 3, 3), "conv"),
}
SOME = ("square", "five", "projections", "gates", "embedding", "head", "bias")
"""Names of one parameter of each kind of layout: even and uneven rows, unequal blocks, a stack, tables, a vector."""


def plan_of(
    recipe: sf.recipes.Recipe,
    stabiliser: sf.Stabiliser | None,
    names: Collection[str] | None = None,
    some: bool = False,
) -> Plan:
    """A plan with a parameter of every kind, and matrices in every layout; or only with these names, or with `SOME`."""
    names = SOME if some else names
    placements = {}

    def add(name: str, shape: Sequence[int], role: sf.Role) -> None:
        role = replace(role, stabiliser=stabiliser) if stabiliser else role
        if names is None or name in names:
            placements[name] = Placement(role, "given", tuple(shape))

    for name, shape in LINEAR.items():
        add(name, shape, recipe.role("linear"))
    for name, (shape, view) in VIEWS.items():
        add(name, shape, replace(recipe.role("linear"), view=view))
    for name, (shape, view) in STACKS.items():
        add(name, shape, replace(recipe.role("experts"), view=view))
    for name, (shape, kind) in KINDS.items():
        add(name, shape, recipe.role(kind))
    return Plan(recipe.name, placements)


def gradient(name: str, shape: Sequence[int], step: int, dtype: torch.dtype) -> Tensor | None:
    """Random; at some steps a zero one, absent rows, a resting expert, one that is not finite, none, sparse entries."""
    g = torch.randn(
        tuple(shape), generator=torch.Generator().manual_seed(1000 * step + sum(map(ord, name))), dtype=dtype
    )
    if step == 1 and name in ("embedding", "head"):
        g[2:7] = 0
    if step == 2 and name in ("square", "five", "bias", "projections"):
        g.zero_()
    if step == 3 and name in ("square", "three", "embedding", "experts", "gain"):
        g.view(-1)[-1] = torch.nan
    if step == 4 and name in ("experts", *STACKS):
        g[1] = 0
    if step == 4 and name in ("fused", "interleaved"):
        g[:4] = 0
    if step == 5 and name in ("heads", "head", "gain", "conv"):
        return None
    if step == 6:  # momentum is there; half of the entries rest
        g.view(-1)[::2] = 0
    return g


def weights(plan: Plan, dtype: torch.dtype) -> dict[str, Tensor]:
    """Initial values, larger than a radius for some."""
    found = {}
    for name, placement in plan.placements.items():
        seed = sum(map(ord, name))
        found[name] = torch.randn(placement.shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) / 2
    return found


def alone(plan: Plan, steps: int, dtype: torch.dtype, lr: float, **options: Any) -> dict[str, Tensor]:
    """The weights after some steps in one process."""
    params = {name: nn.Parameter(w.clone()) for name, w in weights(plan, dtype).items()}
    optimizer = sf.SteepestDescent(list(params.items()), plan, lr=lr, **options)
    for step in range(steps):
        for name, p in params.items():
            p.grad = gradient(name, p.shape, step, dtype)
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


def distribute(x: Tensor, mesh: Any, placements: Sequence[Any]) -> DTensor:
    """x's part on this rank as a `DTensor`; `_StridedShard` is what torch's own function does not take."""
    own = slabs(tuple(x.shape), tuple(mesh.shape), placements)[_number(mesh)]
    local = x[own.within(Slab((0,) * x.ndim, tuple(x.shape)))].clone()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=x.shape, stride=x.stride())


def _number(mesh: Any) -> int:
    number = 0
    for size, i in zip(mesh.shape, mesh.get_coordinate(), strict=True):
        number = number * size + i
    return number


def whole(p: Tensor) -> Tensor:
    """All of a parameter, from everybody's parts."""
    if not isinstance(p, DTensor):
        return p.detach().clone()
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, (p.to_local().detach(), tuple(p.device_mesh.get_coordinate())))
    result = torch.full(p.shape, torch.nan, dtype=torch.promote_types(p.dtype, torch.float32))
    cut = slabs(tuple(p.shape), tuple(p.device_mesh.shape), p.placements)
    for local, coordinate in parts:
        number = 0
        for size, i in zip(p.device_mesh.shape, coordinate, strict=True):
            number = number * size + i
        place = cut[number].within(Slab((0,) * p.ndim, tuple(p.shape)))
        known = result[place]
        assert bool((known.isnan() | (known == local)).all()), "copies differ"
        result[place] = local.to(result.dtype)
    return result.to(p.dtype)


def fsdp(name: str, shape: Sequence[int]) -> tuple[Any, ...]:
    return (Shard(0),) if len(shape) else (Replicate(),)


def sharded(
    rank: int,
    plan: Plan,
    mesh: tuple[int, ...],
    placements: Callable[[str, Sequence[int]], Sequence[Any]],
    steps: int,
    dtype: torch.dtype,
    lr: float,
    options: dict[str, Any],
) -> dict[str, Tensor]:
    """The weights after some steps on a mesh, gathered."""
    device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("a", "b", "c")[: len(mesh)])
    params = {
        name: nn.Parameter(distribute(w, device_mesh, placements(name, w.shape)))
        for name, w in weights(plan, dtype).items()
    }
    optimizer = sf.SteepestDescent(list(params.items()), plan, lr=lr, **options)
    for step in range(steps):
        for name, p in params.items():
            g = gradient(name, p.shape, step, dtype)
            p.grad = None if g is None else distribute(g, device_mesh, p.placements)
        optimizer.step()
    return {name: whole(p) for name, p in params.items()}
