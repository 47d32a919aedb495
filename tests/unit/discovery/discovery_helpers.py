"""Modules made for one test: with given parameters, of a given class name, with experts; and the kinds of a plan."""

import torch
from torch import nn

from surefoot import Plan


class Own(nn.Module):
    """A module that owns what it is given."""

    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, nn.Parameter(value) if isinstance(value, torch.Tensor) else value)


def kinds(model, *args, **kwargs):
    plan = Plan.of(model, *args, **kwargs)
    return {name: plan[name].role.name for name in plan}


def of_class(full_name, base=Own, **attributes):
    """A module whose class has this full name, as if it came from there."""
    module, _, name = full_name.rpartition(".")
    return type(name, (base,), {"__module__": module, "__qualname__": name})(**attributes)


def mixture(transposed=False, whole=True, gated=True, router=None):
    up, f, d = ("gate_up_proj", 12, 5) if gated else ("up_proj", 6, 5)
    shapes = {up: (4, f, d), "down_proj": (4, d, 6)}
    if transposed:
        shapes = {name: (e, b, a) for name, (e, a, b) in shapes.items()}
    flags = {"has_gate": gated, "is_transposed": transposed, "is_concatenated": whole}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    biases = {f"{up}_bias": torch.zeros(4, f), "down_proj_bias": torch.zeros(4, d)}
    return Own(experts=Own(**tensors, **biases, **flags), gate=router or Own(weight=torch.randn(4, 5)))
