"""MOGA's theorem in numbers: the largest gradients found on the ball of block norm 1, at several widths.

Networks of three linear layers and ReLU, 8 one-hot inputs, 8 classes, mean cross entropy, float64; seconds on a CPU.
"worst": constant features and logits against the label, a point that attains the bound of every layer. "random": the
largest of 8 Gaussian points whose every block has norm 1. "plain": the worst point for the same norms without their
width factors `d_in**(1/p) / d_out**(1/q)`. "curvature": the largest `mean_p((D x)**2)` over steps D of norm 1, for x of
ones: the second derivative of a layer of activations, at the worst weights behind it.

    python studies/moga.py            print the table of docs/moga.md
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.geometry import MeanOperator
from surefoot.monitor.moga import block_dual_norm, block_norm, lipschitz_bound

WIDTHS, CLASSES, SEEDS = (32, 128, 512), 8, 8
PAIRS = ((1, 2), (1, 4), (1, math.inf), (1.5, math.inf), (2, math.inf), (2, 2))


def mlp(width: int) -> nn.Sequential:
    """Three linear layers and ReLU."""
    first, hidden, last = nn.Linear(CLASSES, width), nn.Linear(width, width), nn.Linear(width, CLASSES)
    return nn.Sequential(first, nn.ReLU(), hidden, nn.ReLU(), last).double()


def worst(width: int) -> nn.Sequential:
    """The point of block norm 1, for every p <= q, whose features and changes are as large as the bound allows."""
    model = mlp(width)
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
    sign = torch.ones(CLASSES, dtype=torch.float64)
    sign[0] = -1
    model[2].weight.data.div_(width)
    model[4].weight.data.mul_(sign[:, None] / width)
    model[4].bias.data.mul_(sign)
    return model


def random(width: int, p: float, q: float, seed: int) -> nn.Sequential:
    """Gaussians, each parameter scaled to norm 1."""
    model, generator = mlp(width), torch.Generator().manual_seed(seed)
    values = [torch.randn(w.shape, generator=generator, dtype=torch.float64) for w in model.parameters()]
    for own, value in zip(model.parameters(), values, strict=True):
        for parameter in model.parameters():
            parameter.data.zero_()
        own.data.copy_(value)
        value /= block_norm(model, p, q)
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.data.copy_(value)
    return model


def gradient(model: nn.Sequential) -> None:
    """That of the mean loss over all inputs, each of class 0."""
    x, y = torch.eye(CLASSES, dtype=torch.float64), torch.zeros(CLASSES, dtype=torch.int64)
    F.cross_entropy(model(x), y).backward()


def dual(model: nn.Sequential, p: float, q: float) -> float:
    """The dual block norm of the gradient."""
    gradient(model)
    return block_dual_norm(model, p, q)


def plain(width: int, p: float, q: float) -> float:
    """The worst point's dual norm under the norms without width factors, whose ball has larger logits."""
    model, up, down = worst(width), width ** (1 / p), width ** (1 / q)
    factors = ((model[0], 1 / down), (model[2], up / down), (model[4], up))  # natural norm -> plain norm
    for layer, factor in factors:
        layer.weight.data.mul_(factor)
    gradient(model)
    for layer, factor in factors:
        layer.weight.grad.mul_(factor)
    return block_dual_norm(model, p, q)


def curvature(width: int, p: float, q: float) -> float:
    """`mean_p((D x)^2)` at x of ones, the larger of two steps of norm 1: on one output, and on all alike."""
    norm, one = MeanOperator(p, q), torch.zeros(width, width, dtype=torch.float64)
    one[0] = 1

    def along(g: Tensor) -> float:
        squares = norm.direction(g).sum(1) ** 2
        return float(squares.max() if math.isinf(p) else squares.pow(p).mean() ** (1 / p))

    return max(along(one), along(torch.ones_like(one)))


def rows() -> Iterator[str]:
    """The table."""
    bound = lipschitz_bound(1.0, layers=3)
    measured = ("worst", "random", "plain", "curvature")
    yield "| (p, q) | smoothness exponent | bound | " + " | ".join(measured) + " |"
    yield "|---|---|---|---|---|---|---|"
    for p, q in PAIRS:
        numbers = [
            [dual(worst(width), p, q) for width in WIDTHS],
            [max(dual(random(width, p, q, seed), p, q) for seed in range(SEEDS)) for width in WIDTHS],
            [plain(width, p, q) for width in WIDTHS],
            [curvature(width, p, q) for width in WIDTHS],
        ]
        cells = [", ".join(f"{number:.3g}" for number in cell) for cell in numbers]
        yield f"| ({p}, {q}) | {MeanOperator(p, q).smoothness_exponent:g} | {bound:g} | {' | '.join(cells)} |"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("\n".join(rows()))
