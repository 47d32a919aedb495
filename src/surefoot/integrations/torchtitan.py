"""torchtitan: `SteepestDescent` in its trainer, as the container of optimizers that a configuration names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer

from surefoot.optim.optimizer import SteepestDescent
from surefoot.plan import Plan


def plan_of(part: nn.Module, *args: Any, **options: Any) -> Plan:
    """`Plan.of` for a torchtitan model, or for the part of it that a pipeline stage holds.

    The head is the module `lm_head`; a stage without one has none, which its wiring alone does not tell.

    Args:
        part: the model, before or after torchtitan has wrapped it.
        args: those of `Plan.of`: a recipe.
        options: likewise: `stabiliser`, `overrides`, ...
    """
    if hasattr(part, "lm_head"):
        options.setdefault("head", () if part.lm_head is None else "lm_head")
    return Plan.of(part, *args, **options)


class SteepestDescentContainer(OptimizersContainer):
    """One `SteepestDescent` for each model part, under torchtitan's schedules, hooks and checkpoints.

    torchtitan makes every parameter a `DTensor`, on one device too. Where every device holds the whole of it, the step
    is taken on the plain tensor inside, by each device alike.

    Args:
        config: see `Config`.
        model_parts: the model, or the stages of a pipeline that this process runs.

    Raises:
        ValueError: a parameter that is split over devices, or that the plan lacks; an option of torchtitan's own
            optimizers.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """What the trainer's configuration says of the optimizer.

        Args:
            lr: learning rate in natural units; torchtitan's schedule acts on it.
            plan: from a model part to its roles.
            seed: of the plan's initial values; None keeps the model's own. A checkpoint is loaded after either.
        """

        lr: float
        plan: Callable[[nn.Module], Plan] = plan_of
        seed: int | None = None

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        theirs = OptimizersContainer.Config()
        ignored = [f.name for f in fields(theirs) if getattr(config, f.name) != getattr(theirs, f.name)]
        if ignored:
            raise ValueError(f"{', '.join(ignored)}: of torchtitan's own optimizers; say lr, plan and seed instead")
        self.model_parts = model_parts
        self.optimizers = []
        self._inside: list[tuple[Any, nn.Parameter]] = []  # each DTensor and the plain tensor inside
        for part in model_parts:
            found = config.plan(part)
            plan = Plan(found.recipe, {canonical_fqn(name): placement for name, placement in found.placements.items()})
            trainable = [(canonical_fqn(name), p) for name, p in part.named_parameters() if p.requires_grad]
            plain = {name: self._plain(name, p) for name, p in trainable}
            if config.seed is not None:
                for name, p in plain.items():
                    plan[name].fill_(p, name, config.seed)
            self.optimizers.append(SteepestDescent(plain.items(), plan, lr=config.lr))
        self._post_init([p for part in model_parts for p in part.parameters() if p.requires_grad])

    def _plain(self, name: str, p: nn.Parameter) -> nn.Parameter:
        """The parameter; of a `DTensor` the plain tensor inside, over the same memory."""
        if not isinstance(p, DTensor):
            return p
        axes = zip(p.placements, p.device_mesh.shape, strict=True)
        if any(size > 1 and not placement.is_replicate() for placement, size in axes):
            raise ValueError(
                f"{name} is split over devices, {p.placements} on {tuple(p.device_mesh.shape)}, and SteepestDescent "
                "takes whole parameters: set parallelism.data_parallel_replicate_degree to the number of devices, "
                "data_parallel_shard_degree to 1, and no tensor, context or expert parallelism"
            )
        plain = nn.Parameter(p.to_local().detach())
        self._inside.append((p, plain))
        return plain

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step of every part."""
        assert closure is None, "torchtitan's trainer has no closures"
        for p, plain in self._inside:
            plain.data = p.to_local()  # where a wrapper has moved it to
            plain.grad = None if p.grad is None else p.grad.redistribute(p.device_mesh, p.placements).to_local()
        for optimizer in self.optimizers:
            optimizer.step()
        for _, plain in self._inside:
            plain.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Those of the model's parameters, which the optimizers need not hold themselves."""
        Optimizer.zero_grad(self, set_to_none)
