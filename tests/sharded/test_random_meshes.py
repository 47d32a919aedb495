"""Random meshes, roles, schemes and gradients, each case by its number: the weights and counts of one process."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_cases import KINDS, STACKS, VIEWS, distribute, whole
from test_sharded_steps import STABILISERS
from threads import run
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import surefoot as sf
from surefoot import contrib
from surefoot.experiment.training.methods import METHODS, Steepest
from surefoot.mesh.slabs import Slab, slabs
from surefoot.plan import Placement, Plan

F64 = torch.float64
LR, DENSE, SPARSE = 0.05, 2, 4  # steps: with all of a gradient at first, so that momentum is there, and at last again
PARAMETERS = 12
MESHES = [(1,), (2,), (3,), (4,), (1, 1), (1, 2), (2, 1), (2, 2), (2, 2), (2, 3), (3, 2), (2, 2, 2)]
RECIPES = [method.recipe for method in METHODS.values() if isinstance(method, Steepest)]
MOMENTA = [
    sf.Momentum(0.0), sf.Momentum(0.9), sf.Momentum(0.99, 0.9), sf.Adam(), sf.RowAdam(), contrib.Whitened(), sf.SOAP(),
    contrib.ScheduledMomentum(((0, sf.Momentum(0.5)), (20, sf.Momentum(0.9, 0.7)))),
]  # fmt: skip
CHANGES = [
    contrib.DualScaled, sf.RMSScaled, contrib.RadialBrake, contrib.UpdateFloor, contrib.MeanLookahead,
    sf.NormalisedRows,
]  # fmt: skip
PATTERNS = ("dense", "entries", "rows", "columns", "first", "zero", "zero slab", "not finite", "missing", "absent")


@dataclass(frozen=True)
class Gradient:
    """One step's gradient of a parameter, as each place of the mesh has it.

    Args:
        g: without what follows.
        missing: places that have none.
        bad: a place with an entry that is not finite, and that entry.
    """

    g: Tensor
    missing: frozenset[int] = frozenset()
    bad: tuple[int, float] | None = None

    def at(self, place: int, cut: list[Slab]) -> Tensor | None:
        """The part of a place of the mesh."""
        if place in self.missing:
            return None
        local = self.g[cut[place].within(_all(self.g))].clone()
        if self.bad and self.bad[0] == place and local.numel():
            local.view(-1)[-1] = self.bad[1]
        return local

    def alone(self, cut: list[Slab], copies: bool) -> Tensor | None:
        """What all places together have: zeros where one lacks its part, nothing where one lacks a copy."""
        if len(self.missing) == len(cut) or (copies and self.missing):
            return None
        g = self.g.clone()
        for place, slab in enumerate(cut):
            local = self.at(place, cut)
            if local is None or not local.isfinite().all():  # copies of what is not finite are not all so
                g[slab.within(_all(g))] = 0 if local is None else local
        return g


def _all(x: Tensor) -> Slab:
    return Slab((0,) * x.ndim, tuple(x.shape))


@dataclass(frozen=True)
class Case:
    """A model on a mesh; `str` says what is needed to see it again.

    Args:
        mesh: its sizes.
        ranks: the processes in the mesh's order.
        placements: role and shape of each parameter.
        cuts: how each is cut.
        weights: before the first step.
        gradients: of each step.
        maximize: the option.
    """

    mesh: tuple[int, ...]
    ranks: list[int]
    placements: dict[str, Placement]
    cuts: dict[str, tuple[Any, ...]]
    weights: dict[str, Tensor]
    gradients: list[dict[str, Gradient]]
    maximize: bool

    def slabs(self, name: str) -> list[Slab]:
        return slabs(self.placements[name].shape, self.mesh, self.cuts[name])

    def optimizer(self, params: dict[str, nn.Parameter], **options: Any) -> sf.SteepestDescent:
        plan = Plan("random", self.placements)
        return sf.SteepestDescent([*params.items()], plan, lr=LR, maximize=self.maximize, **options)

    def copies(self, name: str) -> bool:
        return any(n > 1 and x.is_replicate() for n, x in zip(self.mesh, self.cuts[name], strict=True))


def case(number: int) -> Case:
    """Everything that is random, of one number."""
    rng, generator = random.Random(number), torch.Generator().manual_seed(number)
    mesh = rng.choice(MESHES)
    ranks = rng.sample(range(math.prod(mesh)), math.prod(mesh))
    placements = dict(_placement(rng, i) for i in range(PARAMETERS))
    cuts = {name: _cut(rng, mesh, placement.shape) for name, placement in placements.items()}
    made = Case(mesh, ranks, placements, cuts, {}, [], rng.random() < 0.2)
    for name, placement in placements.items():
        made.weights[name] = torch.randn(placement.shape, generator=generator, dtype=F64) * rng.choice([0.1, 0.5, 1.0])
        if rng.random() < 0.1 and placement.shape:
            made.weights[name][:1] = 0
    for step in range(DENSE + SPARSE + 1):
        dense = step < DENSE or step == DENSE + SPARSE
        made.gradients.append(
            {n: _gradient(rng, generator, made.slabs(n), x.shape, dense) for n, x in placements.items()}
        )
    return made


def _placement(rng: random.Random, i: int) -> tuple[str, Placement]:
    """A parameter of any kind, whose recipe and scheme are its own; what is refused in one process is drawn again."""
    while True:
        recipe = rng.choice(RECIPES)
        kind = rng.choice(["linear", "linear", "linear", "embedding", "head", *KINDS, *VIEWS, *STACKS])
        if kind in VIEWS or kind in STACKS:
            shape, view = (VIEWS | STACKS)[kind]
            role = replace(recipe.role("linear" if kind in VIEWS else "experts"), view=view)
        else:
            two = kind in ("linear", "embedding", "head")
            shape = (rng.randrange(1 - (i % 4 == 0), 9), rng.randrange(1, 9)) if two else KINDS[kind][0]
            role = recipe.role(kind)
        scheme = rng.choice([role.stabiliser, *STABILISERS, *STABILISERS])
        try:
            role = replace(role, stabiliser=scheme)
            if rng.random() < 0.2:
                role = replace(role, momentum=rng.choice(MOMENTA))
            if rng.random() < 0.2:
                role = replace(role, geometry=rng.choice(CHANGES)(role.geometry))
            placement = Placement(role, recipe.name, shape)
            p = nn.Parameter(torch.ones(shape, dtype=F64))
            optimizer = sf.SteepestDescent([("p", p)], Plan("one", {"p": placement}), lr=LR)
            for zeros in (0, 1, p.numel()):  # `Whitened` takes no mask of entries, or of rows
                p.grad = torch.ones_like(p)
                p.grad.view(-1)[:zeros] = 0
                optimizer.step()
        except (ValueError, IndexError, RuntimeError):
            continue
        return f"{i} {kind} {recipe.name}", placement


def _cut(rng: random.Random, mesh: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Any, ...]:
    """A copy or a cut along each dimension of the mesh."""
    while True:
        dims = [rng.randrange(-1, len(shape)) if rng.random() < 0.9 else -1 for _ in mesh]
        cut: list[Any] = [Replicate() if dim < 0 else Shard(dim) for dim in dims]
        for axis, dim in enumerate(dims):
            right = math.prod(n for n, other in zip(mesh[axis + 1 :], dims[axis + 1 :], strict=True) if other == dim)
            if dim >= 0 and right > 1 and rng.random() < 0.5:
                cut[axis] = _StridedShard(dim, split_factor=right)
        try:
            slabs(shape, mesh, cut)
        except ValueError:
            continue
        return tuple(cut)


def _gradient(
    rng: random.Random, generator: torch.Generator, cut: list[Slab], shape: tuple[int, ...], dense: bool
) -> Gradient:
    """By a pattern, or two of them."""
    g = torch.randn(shape, generator=generator, dtype=F64)
    found = Gradient(g)
    for _ in range(0 if dense else rng.choice([1, 1, 2])):
        pattern, place = rng.choice(PATTERNS), rng.randrange(len(cut))
        if pattern == "entries":
            g[torch.rand(shape, generator=generator) < rng.choice([0.2, 0.5, 0.9])] = 0
        elif pattern in ("rows", "columns", "first") and g.numel() and g.ndim:
            dim = {"rows": max(0, g.ndim - 2), "columns": g.ndim - 1, "first": 0}[pattern]
            kept = torch.rand(g.shape[dim], generator=generator) < 0.5
            g.mul_(kept.reshape([-1 if i == dim else 1 for i in range(g.ndim)]))
        elif pattern == "zero":
            g.zero_()
        elif pattern == "zero slab":
            g[cut[place].within(_all(g))] = 0
        elif pattern == "not finite":
            found = replace(found, bad=(place, rng.choice([math.nan, math.inf, -math.inf])))
        elif pattern == "missing":
            found = replace(found, missing=found.missing | {place})
        elif pattern == "absent":
            found = replace(found, missing=frozenset(range(len(cut))))
    return found


def alone(case: Case) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Weights and skipped steps of one process."""
    params = {name: nn.Parameter(w.clone()) for name, w in case.weights.items()}
    optimizer = case.optimizer(params)
    for gradients in case.gradients:
        for name, p in params.items():
            p.grad = gradients[name].alone(case.slabs(name), case.copies(name))
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}, optimizer.skipped()


def on_mesh(rank: int, case: Case) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The same on a mesh, gathered."""
    mesh = DeviceMesh("cpu", torch.tensor(case.ranks).reshape(case.mesh), mesh_dim_names=tuple("abc"[: len(case.mesh)]))
    place = case.ranks.index(rank)
    params = {name: nn.Parameter(distribute(w, mesh, case.cuts[name])) for name, w in case.weights.items()}
    optimizer = case.optimizer(params)
    for gradients in case.gradients:
        for name, p in params.items():
            local = gradients[name].at(place, case.slabs(name))
            cut = {"run_check": False, "shape": p.shape, "stride": p.stride()}
            p.grad = None if local is None else DTensor.from_local(local, mesh, p.placements, **cut)
        optimizer.step()
    return {name: whole(p) for name, p in params.items()}, optimizer.skipped()


def shared(rank: int, case: Case) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Copies of all parameters and gradients that divide the matrices."""
    params = {name: nn.Parameter(w.clone()) for name, w in case.weights.items()}
    optimizer = case.optimizer(params, replicas=dist.group.WORLD)
    for gradients in case.gradients:
        for name, p in params.items():
            p.grad = gradients[name].alone(case.slabs(name), case.copies(name))
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}, optimizer.skipped()


def differing(case: Case, function: Any) -> Iterator[str]:
    """What is not as in one process, in words."""
    want, skipped = alone(case)
    for weights, counts in run(len(case.ranks), function, case):
        if counts != skipped:
            yield f"skipped {counts}, not {skipped}"
        for name, w in want.items():
            if w.numel() and not float((weights[name] - w).abs().max()) <= 1e-12:
                way = f"{case.placements[name].role} of {tuple(w.shape)} cut by {case.cuts[name]} of {case.mesh}"
                yield f"{name}: {float((weights[name] - w).abs().max()):.1e}, {way}"


QUICK = (14, 41, 49, 110, 185)
"""Cases of two processes that differed once: resting entries of signs, an empty parameter under SOAP, a copy that one
process lacks and another has not finite, a vector under `RowAdam`."""


@pytest.mark.parametrize("number", [pytest.param(i, marks=() if i in QUICK else pytest.mark.slow) for i in range(200)])
def test_a_random_mesh_steps_as_one_process(number):
    made = case(number)
    assert sorted({*differing(made, on_mesh)}) == []


@pytest.mark.parametrize("number", [pytest.param(i, marks=pytest.mark.slow if i else ()) for i in range(0, 200, 10)])
def test_copies_that_share_matrices_step_as_one_process(number):
    made = case(number)
    assert sorted({*differing(made, shared)}) == []
