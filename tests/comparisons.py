"""Steps taken, weights compared bit for bit and the norm of a linear weight, for the tests of several folders."""

import math
from functools import partial

import torch
from torch import Tensor, nn

from surefoot.geometry.base import ChangeBounds

INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of each parameter, by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def bits(x: Tensor) -> Tensor:
    """The bits of x's entries as integers, so that -0 differs from 0 and a NaN equals itself."""
    return x.detach().contiguous().view(INTEGERS[x.element_size()])


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """True if both have the same names and, bit for bit, the same values."""
    return a.keys() == b.keys() and all(torch.equal(bits(a[name]), bits(b[name])) for name in a)


def advanced(scheme, w, m, eta, geometry, ball=None, cache=None):
    """The scheme's next weight and cache, by its direction under geometry; w stays as it is."""
    ball = ball or geometry
    active = (eta > 0).to(w.dtype) if isinstance(eta, Tensor) else 1.0
    d, cache = scheme.direct(w, m, geometry, ball, cache, active)
    longest = partial(ChangeBounds.of(geometry).direction_norm_bound, shape=tuple(w.shape))
    return scheme.move(w.clone(), d, eta, ball, cache, longest)


def train(model, optimizer, steps):
    """Take these steps with random gradients, which a step's number determines."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def natural_norm(w: Tensor) -> float:
    """`sqrt(in/out) * spectral norm` of w `(out, in)`, by an SVD in float64."""
    return float(torch.linalg.matrix_norm(w.detach().double(), 2)) * math.sqrt(w.shape[1] / w.shape[0])
