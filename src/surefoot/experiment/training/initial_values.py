"""Initial values of the baselines: torch's, and muP's."""

import math

import torch
from torch import Tensor, nn

from surefoot.experiment.models.layers import Experts
from surefoot.initialise import generator_for
from surefoot.plan import Plan


@torch.no_grad()
def torch_(model: nn.Module, seed: int) -> None:
    """Write torch's own initial values: uniform within `1/sqrt(d_in)` for Linear and each expert, std 1 for Embedding.

    A table that is also the head, whose logits nothing divides, gets a Linear's: with an Embedding's the first logits
    have a standard deviation of `sqrt(d)`, which costs AdamW .1 to .9 nats after 150 steps.

    Args:
        model: written to.
        seed: the values are a function of it and of the parameters' names.

    Raises:
        ValueError: a module of another type with parameters of its own; the message names it.
    """
    owners = {name.rpartition(".")[0] for name, _ in model.named_parameters()}  # a tied head's is the table's
    divided = bool(getattr(model, "output_multiplier", None))
    heads = {m.weight for m in model.modules() if isinstance(m, nn.Linear) and not divided}
    for name, module in model.named_modules():
        if name not in owners:
            continue
        if isinstance(module, nn.Linear | Experts) or (isinstance(module, nn.Embedding) and module.weight in heads):
            for key, parameter in module.named_parameters(recurse=False):
                bound = 1 / math.sqrt(getattr(module, "in_features", parameter.shape[-1]))
                nn.init.uniform_(parameter, -bound, bound, generator=generator_for(f"{name}.{key}", seed))
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, generator=generator_for(f"{name}.weight", seed))
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.reset_parameters()  # ones and zeros, nothing random
        else:
            known = "AdamW's initial values cover Linear, Experts, Embedding, LayerNorm and RMSNorm"
            raise ValueError(f"{name or 'the model'} is a {type(module).__name__}: {known}")


@torch.no_grad()
def mup_(model: nn.Module, seed: int, base_width: int) -> None:
    """Write the `mup` package's initial values: torch's own, the head's rescaled by `sqrt(base_width/width)`.

    With `m = width/base_width` the package multiplies the head's weight by `sqrt(m)` and the logits by `1/m`; here
    both are in the weight. (Its other option, a head that starts at 0, trained worse at 120 steps.)

    Source: `MuReadout` in https://github.com/microsoft/mup; G. Yang et al., "Tensor Programs V", table 3.

    Args:
        model: written to; its width is that of `input_embedding`.
        seed: as in `torch_`.
        base_width: the width at which the head's values are torch's.

    Raises:
        ValueError: as `torch_`, and a tied head without a multiplier on the logits.
    """
    torch_(model, seed)
    width = input_embedding(model).shape[-1]
    for name, placement in mup_plan(model).placements.items():
        if placement.role.name == "head" and model.get_parameter(name).requires_grad:
            model.get_parameter(name).mul_(math.sqrt(base_width / width))


def mup_plan(model: nn.Module) -> Plan:
    """The model's roles; raise ValueError for a tied head, which needs a multiplier of its own on the logits."""
    plan, embedding = Plan.of(model), input_embedding(model)
    for name, placement in plan.placements.items():
        if placement.role.name == "head" and model.get_parameter(name) is embedding:
            remedy = "untie the head, or multiply the logits by 1/width (head='tied_scaled')"
            raise ValueError(f"mup_adamw cannot scale {name} as embedding and head at once; {remedy}")
    return plan


def input_embedding(model: nn.Module) -> Tensor:
    """The model's token table, which has as many columns as the model is wide; ValueError if the model names none."""
    declared = getattr(model, "get_input_embeddings", None)
    if declared is None:
        raise ValueError("mup_adamw reads the width from get_input_embeddings(), which the model lacks")
    weight: Tensor = declared().weight
    return weight
