"""The optimizers that the benchmarks compare: torch's, ours, and those of PyPI where they are installed.

Most rivals multiply in bfloat16. If their code has an option for float32, or a function that can be replaced by one in
float32, they run in float32 as well. That is always the more accurate rival, and without bfloat16 units the faster one.
The function is replaced during a step only, which costs some microseconds.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor
from torch.optim import Optimizer, _muon

import surefoot as sf

LR = 0.01
ADAMW = ("torch AdamW, fused", "torch AdamW, foreach")
PEER = "torch Muon"
OURS = "surefoot, linear"
PACKAGES = ("pytorch_optimizer", "heavyball", "emerging-optimizers", "gram-newton-schulz")
Build = Callable[[list[Tensor]], Optimizer]
Unit = Callable[[tuple[int, ...]], float]


class Absent(Exception):
    """An optimizer cannot be timed here; the message gives the reason."""


@dataclass(frozen=True)
class Rival:
    """How to build an optimizer.

    Args:
        build: from parameters to an optimizer at the rate `LR`; raises ImportError or Absent if it cannot be timed.
        products: dtype of its matrix products, "" if it has none.
        unit: the norm that its step should have, over `LR`, by shape; None for a step that is not spectral.
    """

    build: Build
    products: str = ""
    unit: Unit | None = None


def keller(shape: tuple[int, ...]) -> float:
    return math.sqrt(max(1.0, shape[0] / shape[1]))


def natural(shape: tuple[int, ...]) -> float:
    return math.sqrt(shape[0] / shape[1])


def with_(optimizer: Optimizer, module: object, name: str, function: object) -> Optimizer:
    """Replace a function of a module during the optimizer's steps, and return the optimizer."""
    optimizer.step = mock.patch.object(module, name, function)(optimizer.step)  # type: ignore[method-assign]
    return optimizer


def newton_schulz(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Run torch's five steps in the dtype of x."""
    a, b, c = coefficients
    wide = x.mT if x.shape[0] > x.shape[1] else x
    y = wide / wide.norm().clamp(min=eps)
    for _ in range(steps):
        gram = y @ y.mT
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y if wide is x else y.mT


def torch_muon(params: list[Tensor]) -> Optimizer:
    return torch.optim.Muon(params, lr=LR, weight_decay=0.0)


def torch_muon_float32(params: list[Tensor]) -> Optimizer:
    return with_(torch_muon(params), _muon, "_zeropower_via_newtonschulz", newton_schulz)


def pytorch_optimizer(params: list[Tensor], method: str = "newton_schulz") -> Optimizer:
    from pytorch_optimizer import Muon

    return Muon([{"params": params, "use_muon": True}], lr=LR, ns_method=method)


def pytorch_optimizer_float32(params: list[Tensor], method: str, name: str) -> Optimizer:
    optimizer = pytorch_optimizer(params, method)
    from pytorch_optimizer.optimizer.muon import base

    return with_(optimizer, base, name, functools.partial(getattr(base, name), dtype=torch.float32))


def heavyball(params: list[Tensor]) -> Optimizer:
    from heavyball import Muon

    return Muon(params, lr=LR)


def heavyball_float32(params: list[Tensor]) -> Optimizer:
    optimizer = heavyball(params)
    from heavyball import utils

    return with_(optimizer, utils, "stochastic_round_", lambda x: x)  # the rounding to bfloat16


def emerging_optimizers(params: list[Tensor], precision: str) -> Optimizer:
    from emerging_optimizers.orthogonalized_optimizers import Muon

    options = {"weight_decay": 0.0, "nesterov": True, "scale_mode": "shape_scaling"}
    return Muon(params, lr=LR, fp32_matmul_prec=precision, **options)


def gram_newton_schulz(params: list[Tensor]) -> Optimizer:
    import gram_newton_schulz  # noqa: F401

    raise Absent("float16 inside, which a CPU emulates; pytorch_optimizer's Gram form is the same method in float32")


def surefoot(params: list[Tensor]) -> Optimizer:
    return sf.SteepestDescent([{"params": params, "role": "linear"}], lr=LR)


RIVALS: dict[str, Rival] = {
    ADAMW[0]: Rival(lambda ps: torch.optim.AdamW(ps, lr=LR, fused=True)),
    ADAMW[1]: Rival(lambda ps: torch.optim.AdamW(ps, lr=LR, foreach=True)),
    PEER: Rival(torch_muon, "bfloat16", keller),
    "torch Muon, float32": Rival(torch_muon_float32, "float32", keller),
    "pytorch_optimizer Muon": Rival(pytorch_optimizer, "bfloat16", keller),
    "pytorch_optimizer Muon, float32": Rival(
        lambda ps: pytorch_optimizer_float32(ps, "newton_schulz", "zero_power_via_newton_schulz_5"), "float32", keller
    ),
    "pytorch_optimizer Muon, Gram, float32": Rival(
        lambda ps: pytorch_optimizer_float32(ps, "gram_newton_schulz", "zero_power_via_gram_newton_schulz"),
        "float32",
        keller,
    ),
    "heavyball Muon": Rival(heavyball, "bfloat16", keller),
    "heavyball Muon, float32": Rival(heavyball_float32, "float32", keller),
    "emerging-optimizers Muon": Rival(lambda ps: emerging_optimizers(ps, "medium"), "bfloat16", keller),
    "emerging-optimizers Muon, float32": Rival(lambda ps: emerging_optimizers(ps, "highest"), "float32", keller),
    "gram-newton-schulz Muon": Rival(gram_newton_schulz, "float16", keller),
    OURS: Rival(surefoot, "float32", natural),
}


def absent() -> dict[str, str]:
    """Return the rivals that cannot be timed here -> the reason."""
    reasons = {}
    for name, rival in RIVALS.items():
        try:
            rival.build([torch.nn.Parameter(torch.ones(2, 2))])
        except (ImportError, Absent) as error:
            reasons[name] = str(error)
    return reasons


def versions() -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    installed = {name for name in PACKAGES if importlib.util.find_spec(name.replace("-", "_"))}
    return {name: importlib.metadata.version(name) for name in PACKAGES if name in installed}
