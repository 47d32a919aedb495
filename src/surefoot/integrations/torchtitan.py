"""torchtitan: `SteepestDescent` in its trainer, as the container of optimizers that a configuration selects."""

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
    """`Plan.of` for a torchtitan model, or for the part of it that belongs to a pipeline stage.

    The head is the module `lm_head`; a stage whose `lm_head` is None has no head, which its wiring does not show.

    Args:
        part: the model or a stage of it, before or after torchtitan has wrapped it.
        *args: positional arguments of `Plan.of` after the model: a recipe.
        **options: keyword arguments of `Plan.of`: `stabiliser`, `overrides`, ...

    Returns:
        The plan of the part.
    """
    if hasattr(part, "lm_head"):
        options.setdefault("head", () if part.lm_head is None else "lm_head")
    return Plan.of(part, *args, **options)


class SteepestDescentContainer(OptimizersContainer):
    """One `SteepestDescent` per model part, under torchtitan's schedules, hooks and checkpoints.

    torchtitan makes every parameter a `DTensor`, on one device too. The parameters must be replicated; every device
    takes the same step on the local tensor of each.

    Args:
        config: learning rate, plan and seed, see `Config`.
        model_parts: the model, or the pipeline stages of this process.

    Raises:
        ValueError: a parameter that is split over devices or that the plan lacks; an option of torchtitan's own
            optimizers in the configuration.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """Section of the trainer's configuration for the optimizer.

        Args:
            lr: learning rate in natural units; torchtitan's schedule scales it.
            plan: function from a model part to its plan.
            seed: seed of the plan's initial values; None leaves the model's initial values. Checkpoints are loaded
                after initialisation.
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
        self._local: list[tuple[Any, nn.Parameter]] = []  # (DTensor, its local tensor)
        for part in model_parts:
            wrapped = config.plan(part)
            placements = {canonical_fqn(name): placement for name, placement in wrapped.placements.items()}
            plan = Plan(wrapped.recipe, placements)
            trainable = [(canonical_fqn(name), p) for name, p in part.named_parameters() if p.requires_grad]
            local = {name: self._local_tensor(name, p) for name, p in trainable}
            if config.seed is not None:
                for name, p in local.items():
                    plan[name].fill_(p, name, config.seed)
            self.optimizers.append(SteepestDescent(local.items(), plan, lr=config.lr))
        self._post_init([p for part in model_parts for p in part.parameters() if p.requires_grad])

    def _local_tensor(self, name: str, p: nn.Parameter) -> nn.Parameter:
        """The parameter, or the local tensor of a `DTensor`, over the same memory."""
        if not isinstance(p, DTensor):
            return p
        axes = zip(p.placements, p.device_mesh.shape, strict=True)
        if any(size > 1 and not placement.is_replicate() for placement, size in axes):
            raise ValueError(
                f"{name} is split over devices, {p.placements} on {tuple(p.device_mesh.shape)}, and SteepestDescent "
                "takes whole parameters: set parallelism.data_parallel_replicate_degree to the number of devices, "
                "data_parallel_shard_degree to 1, and no tensor, context or expert parallelism"
            )
        local = nn.Parameter(p.to_local().detach())
        self._local.append((p, local))
        return local

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Take one step of every part's optimizer.

        Args:
            closure: None; torchtitan's trainer has no closures.
        """
        assert closure is None, "torchtitan's trainer has no closures"
        for p, local in self._local:
            local.data = p.to_local()  # a wrapper may have moved it
            local.grad = None if p.grad is None else p.grad.redistribute(p.device_mesh, p.placements).to_local()
        for optimizer in self.optimizers:
            optimizer.step()
        for _, local in self._local:
            local.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the model's parameters, which are not the local tensors that the optimizers step.

        Args:
            set_to_none: set gradients to None instead of zero.
        """
        Optimizer.zero_grad(self, set_to_none)
