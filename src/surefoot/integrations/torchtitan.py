"""torchtitan: `SteepestDescent` in its trainer, as the container of optimizers that a configuration selects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer

from surefoot.optim.create import named
from surefoot.optim.optimizer import SteepestDescent
from surefoot.plan import Plan
from surefoot.scaling import Run


def plan_of(part: nn.Module, *args: Any, **options: Any) -> Plan:
    """`Plan.of` for a torchtitan model, or for the part of it that belongs to a pipeline stage.

    The head is the module `lm_head`. A stage whose `lm_head` is None has no head; its wiring does not show that.

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

    torchtitan makes every parameter a `DTensor`, on one device too; `SteepestDescent` takes them as they are, split by
    FSDP, tensor or expert parallelism or replicated (docs/scaling.md).

    Args:
        config: learning rate or run, plan and seed, see `Config`.
        model_parts: the model, or the pipeline stages of this process.

    Raises:
        ValueError: a parameter that the plan lacks, or whose shard is not contiguous; an option of torchtitan's own
            optimizers in the configuration; neither a rate nor a run with a law.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """Section of the trainer's configuration for the optimizer.

        Args:
            lr: learning rate in natural units, which torchtitan's schedule scales; None: that of the run.
            run: its length, `Run(training.steps, training.global_batch_size * training.seq_len)`; None: unknown.
            recipe: name of the recipe, as in `create_optimizer`; None: the default of `plan`.
            plan: function from a model part, and `run=` and `recipe=` if given, to its plan.
            seed: seed of the plan's initial values; None leaves the model's initial values. Checkpoints are loaded
                after initialisation.
        """

        lr: float | None = None
        run: Run | None = None
        recipe: str | None = None
        plan: Callable[..., Plan] = plan_of
        seed: int | None = None

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        theirs = OptimizersContainer.Config()
        if ignored := [f.name for f in fields(theirs) if getattr(config, f.name) != getattr(theirs, f.name)]:
            raise ValueError(f"{', '.join(ignored)}: for torchtitan's own optimizers; give lr or run, plan and seed")
        self.model_parts = model_parts
        self.optimizers: list[SteepestDescent] = []
        self._by_law: bool = config.lr is None
        options = {"run": config.run, "recipe": config.recipe and named(config.recipe)}
        for part in model_parts:
            wrapped = config.plan(part, **{name: option for name, option in options.items() if option})
            if config.seed is not None:
                wrapped.initialise_(part, config.seed)
            placements = {canonical_fqn(name): placement for name, placement in wrapped.placements.items()}
            trainable = [(canonical_fqn(name), p) for name, p in part.named_parameters() if p.requires_grad]
            optimizer = SteepestDescent(trainable, replace(wrapped, placements=placements), lr=config.lr)
            for _, p in trainable:
                optimizer._state(p)  # else torchtitan makes it by a step of rate 0, which counts
            self.optimizers.append(optimizer)
        self._post_init([p for part in model_parts for p in part.parameters() if p.requires_grad])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torchtitan's. Schedules go on from the configuration's rate: if set by law, it must be the checkpoint's.

        Args:
            state_dict: what `state_dict` returned.

        Raises:
            ValueError: it is of another plan or run, or the law gave it another rate.
        """
        super().load_state_dict(state_dict)
        for optimizer in self.optimizers if self._by_law else ():
            now = optimizer.defaults["lr"]
            if (then := optimizer.param_groups[0].get("initial_lr", now)) != now:
                raise ValueError(f"the run began at lr={then}, but the law now gives {now}: give lr={then}")
