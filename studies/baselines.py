"""What studies vary of the command line's baselines: their initial values, and the rate of each kind of layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from surefoot.experiment.models.layers import MLP, Block, GatedMLP
from surefoot.experiment.training.initial_values import torch_
from surefoot.experiment.training.methods import AdamW, Method
from surefoot.initialise import generator_for
from surefoot.layers import Attention
from surefoot.plan import Plan

Initialise = Callable[[nn.Module, int], None]
"""Writes a model's initial weights in place: `(model, seed)`, never from the global random generator."""


@dataclass(frozen=True)
class Started(Method):
    """A method with other initial values."""

    method: Method
    initialise: Initialise

    @property
    def clip(self) -> float | None:  # type: ignore[override]
        """That of `method`."""
        return self.method.clip

    def initialise_(self, model: nn.Module, seed: int) -> None:
        """Write the initial values of `initialise`."""
        self.initialise(model, seed)

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """Build the optimizer of `method`."""
        return self.method.optimizer(model, lr)


@dataclass(frozen=True)
class Factored(Method):
    """AdamW, or that under muP, with factors on the rates of some roles; the decay of a step stays `lr * decay`."""

    method: AdamW
    factors: Mapping[str, float]

    @property
    def clip(self) -> float | None:  # type: ignore[override]
        """That of `method`."""
        return self.method.clip

    def initialise_(self, model: nn.Module, seed: int) -> None:
        """Write those of `method`."""
        self.method.initialise_(model, seed)

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """A group for each parameter, its rate that of `method` times its factor."""
        whole, placements = self.method.optimizer(model, lr), Plan.of(model).placements
        roles = {p: placements[name].role.name for name, p in model.named_parameters()}
        groups = []
        for group in whole.param_groups:
            for p in group["params"]:
                rate = group["lr"] * self.factors.get(roles[p], 1.0)
                groups.append({"params": [p], "lr": rate, "weight_decay": group["weight_decay"]})
        return torch.optim.AdamW(groups, lr=lr, betas=self.method.betas, eps=whole.defaults["eps"], fused=True)


@torch.no_grad()
def gpt2_(model: nn.Module, seed: int) -> None:
    """Write GPT-2's initial values: std 0.02; for layers that add to the residual stream `0.02/sqrt(2 * depth)`.

    Source: Radford et al. 2019, section 2.3, and its released code.

    Args:
        model: written to.
        seed: the values are a function of it and of the parameters' names.

    Raises:
        ValueError: a module of another type with parameters of its own; the message names it.
    """
    depth = sum(isinstance(module, Block) for module in model.modules())
    modules = [*model.modules()]
    residual = {module.output for module in modules if isinstance(module, Attention)}
    residual |= {module.down for module in modules if isinstance(module, MLP | GatedMLP)}
    torch_(model, seed)  # norms; and it refuses modules of other types
    owners = {name.rpartition(".")[0] for name, _ in model.named_parameters()}  # a tied head is none
    for name in owners:
        module = model.get_submodule(name)
        if isinstance(module, nn.Linear | nn.Embedding):
            std = 0.02 / math.sqrt(2 * depth) if module in residual else 0.02
            nn.init.normal_(module.weight, std=std, generator=generator_for(f"{name}.weight", seed))
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.zero_()
