"""Training methods by name: how a model is initialised and which optimizer it gets."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Self, get_args

import torch
from torch import nn

from surefoot import contrib, recipes, stabilise
from surefoot.experiment.errors import Respell, with_remedy
from surefoot.experiment.training import names
from surefoot.experiment.training.initial_values import input_embedding, mup_, mup_plan, torch_
from surefoot.momentum import Adam, Momentum
from surefoot.optim.create import RECIPES
from surefoot.optim.optimizer import SteepestDescent
from surefoot.plan import Plan
from surefoot.recipes import HorizonRule, Recipe
from surefoot.scaling import Constant, Moonlight
from surefoot.stabilise import Stabiliser


class Method(ABC):
    """Initial values and optimizer of a training run, for any learning rate.

    Attributes:
        clip: bound on the l2 norm of the whole gradient; None for none.
    """

    clip: float | None

    @abstractmethod
    def initialise_(self, model: nn.Module, seed: int) -> None:
        """Write the initial weights, a function of the seed alone: the same on every device."""

    @abstractmethod
    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """The optimizer of a model; a scheduler multiplies the rates of all its groups by the same factor."""

    def over(self, steps: int) -> Self:
        """The method for a run of so many steps."""
        return self


@dataclass(frozen=True)
class Steepest(Method):
    """Steepest descent: the initial weights and the optimizer of a recipe's plan.

    Args:
        recipe: the role of every kind of layer.
        clip: see `Method`.
        stabiliser: of every role, in place of the recipe's own.
    """

    recipe: Recipe
    clip: float | None = None
    stabiliser: Stabiliser | None = None

    def initialise_(self, model: nn.Module, seed: int) -> None:
        """Write the initial weights of the recipe's plan."""
        Plan.of(model, self.recipe).initialise_(model, seed)

    def over(self, steps: int) -> Self:
        """The method with the recipe's decay for a run of so many steps."""
        return replace(self, recipe=self.recipe.over(steps))

    def plan(self, model: nn.Module) -> Plan:
        """The recipe's plan for a model, with the stabiliser if one is given."""
        return Plan.of(model, self.recipe, stabiliser=self.stabiliser)

    def optimizer(self, model: nn.Module, lr: float) -> SteepestDescent:
        """`SteepestDescent` with the plan."""
        return SteepestDescent(model, self.plan(model), lr=lr)


@dataclass(frozen=True)
class AdamW(Method):
    """torch's own AdamW, with weight decay on matrices only and gradient clipping.

    The defaults are the best of a fixed grid: studies/defaults, `run.py adamw`.

    Args:
        betas: coefficients of the two moments' running means.
        weight_decay: rate on parameters of two or more dimensions; each step takes `lr * weight_decay` of them.
        clip: see `Method`.
    """

    betas: tuple[float, float] = (0.6, 0.8)
    weight_decay: float = 0.1
    clip: float | None = 1.0

    def initialise_(self, model: nn.Module, seed: int) -> None:
        """Write torch's own initial weights."""
        torch_(model, seed)

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.AdamW:
        """Fused AdamW with two groups, matrices and vectors."""
        groups: dict[bool, dict[str, Any]] = {}
        for name, p in model.named_parameters():
            if p.requires_grad:
                options = {"params": [], "weight_decay": self.weight_decay * (p.ndim >= 2)}
                groups.setdefault(p.ndim >= 2, options)["params"].append((name, p))
        return torch.optim.AdamW(list(groups.values()), lr=lr, betas=self.betas, fused=True)


# Gradients fall with width; under torch's 1e-8 the smallest would stop being scale-free.
MUP_EPS = 1e-15


@dataclass(frozen=True)
class MupAdamW(AdamW):
    """AdamW under muP: with `m = width / base_width`, the rate of hidden matrices is `lr / m`, as `convert` has it.

    Embedding and vectors take the plain rate. The head's multiplier `1/m` on the logits is folded into its weight:
    under Adam, `W/m` at rate lr is a weight of its own at rate `lr/m`. Decay keeps `lr * weight_decay` the same at
    every width, as the package does.

    Args:
        betas: see `AdamW`.
        weight_decay: see `AdamW`.
        clip: see `Method`.
        base_width: the width at which all rates are `lr`, as under standard AdamW: the unit of muP's rate.

    Source: G. Yang et al., "Tensor Programs V", table 3 and appendix D.2; the `mup` package.
    """

    base_width: int = 64

    def initialise_(self, model: nn.Module, seed: int) -> None:
        """Write the initial weights of muP's table."""
        mup_(model, seed, self.base_width)

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.AdamW:
        """Fused AdamW with a group for every kind of scaling: matrices, embeddings and vectors."""
        m = input_embedding(model).shape[-1] / self.base_width
        groups: dict[str, dict[str, Any]] = {
            "matrices": {"params": [], "lr": lr / m, "weight_decay": self.weight_decay * m},
            "embeddings": {"params": [], "weight_decay": self.weight_decay},
            "vectors": {"params": [], "weight_decay": 0.0},
        }
        for name, placement in mup_plan(model).placements.items():
            parameter = model.get_parameter(name)
            kind = "vectors" if parameter.ndim < 2 else "matrices"
            kind = "embeddings" if placement.role.name in ("embedding", "positions") else kind
            groups[kind]["params"].append((name, parameter))
        used = [group for group in groups.values() if group["params"]]
        return torch.optim.AdamW(used, lr=lr, betas=self.betas, eps=MUP_EPS, fused=True)


def moonlight_tuned() -> Recipe:
    """Muon under Moonlight's scale, with the nine settings that the search of studies/search found together.

    Like the default's, its decay was found in short runs, and falls with a run's length.
    """
    hidden, adam, decay = Momentum(0.76, 0.5), Adam(0.92, 0.984), 0.085
    factors = {"embedding": 3.5, "head": 0.7, **dict.fromkeys(("gain", "bias", "scalar"), 0.9)}
    table = dict(recipes.muon(Moonlight()).table)
    table["linear"] = replace(
        table["linear"], momentum=hidden, stabiliser=stabilise.DecoupledWeightDecay(decay, Moonlight())
    )
    for kind, factor in factors.items():
        table[kind] = replace(table[kind], momentum=adam, lr_scale=Constant(factor))
        if kind in ("embedding", "head"):
            table[kind] = replace(table[kind], stabiliser=stabilise.DecoupledWeightDecay(decay, Constant(factor)))
    return Recipe("moonlight_tuned", table, horizon=HorizonRule())


_NOT_IN_RECIPES: dict[str, Method] = {
    "moonlight_tuned": Steepest(moonlight_tuned()),
    "adamw": AdamW(),
    "mup_adamw": MupAdamW(),
}

METHODS: dict[str, Method] = {name: _NOT_IN_RECIPES.get(name) or Steepest(RECIPES[name]()) for name in names.METHODS}
"""Every method by its name; those that are not made here are the package's recipes with their defaults."""


_STABILISERS = (
    "free", "weight_decay", "cautious_decay", "independent_decay", "post_clip", "pre_decay", "streaming_post_clip",
    "streaming_pre_decay", "rescale", "normalise", "spectral_sphere", "row_sphere", "column_sphere", "stiefel",
    "hyperball",
)  # fmt: skip
STABILISERS: dict[str, Callable[..., Stabiliser]] = {
    name: getattr(contrib if kind in contrib.__all__ else stabilise, kind)
    for name in _STABILISERS
    for kind in [name.title().replace("_", "")]
}
"""Stabilisers of the command line: `name:value`, the value being a radius or a rate; a period or a number of vectors
may follow, `post_clip:2:8`; `row_sphere`, without a value, keeps what the weights start with."""


def stabiliser(text: str) -> Stabiliser:
    """A stabiliser from its text.

    Args:
        text: `name:value`, with a name of `STABILISERS`.

    Returns:
        The stabiliser.

    Raises:
        ValueError: an unknown name, or values that it does not take.

    >>> stabiliser("post_clip:2"), stabiliser("streaming_post_clip:2:8")
    (PostClip(radius=2.0, period=None), StreamingPostClip(radius=2.0, vectors=8))
    """
    name, *values = text.split(":")
    if name not in STABILISERS:
        error = ValueError(f"unknown stabiliser {name!r}; choose one of {', '.join(STABILISERS)}, as in post_clip:2")
        raise with_remedy(error, Respell(name, list(STABILISERS)))
    known = signature(STABILISERS[name], eval_str=True).parameters.values()
    taken = [p for p in known if {float, int} & {p.annotation, *get_args(p.annotation)}]
    least = sum(p.default is p.empty for p in taken)
    try:
        numbers = [*map(float, values[:1]), *map(int, values[1:])]
    except ValueError:
        numbers = []
    if len(numbers) != len(values) or not least <= len(values) <= len(taken):
        form = "".join(f":{p.name.upper()}" if p.default is p.empty else f"[:{p.name.upper()}]" for p in taken)
        raise ValueError(f"stabiliser {text!r} must be written {name}{form}")
    try:
        return STABILISERS[name](*numbers)
    except ValueError as error:
        raise ValueError(f"stabiliser {text!r}: {error}") from None


def method(name: str, bound: str | None = None) -> Method:
    """A method by its name.

    Args:
        name: of `METHODS`; a value may follow, see `names.parse`.
        bound: a stabiliser for every role, as `stabiliser` reads it.

    Returns:
        The method.

    Raises:
        ValueError: an unknown name, or a value that it does not take. Or a stabiliser for a baseline.

    >>> method("adamw").clip
    1.0
    """
    kind, value = names.parse(name)
    try:
        chosen = METHODS[kind] if value is None else Steepest(RECIPES[kind](value))
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None
    if bound is None:
        return chosen
    if not isinstance(chosen, Steepest):
        raise ValueError(f"{name} is torch's own optimizer, without stabilisers: for {bound!r} choose a recipe")
    return replace(chosen, stabiliser=stabiliser(bound))
