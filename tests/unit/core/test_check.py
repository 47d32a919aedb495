"""`surefoot.check` on a user's geometry: a sound one passes, each broken law is named."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import surefoot as sf
from surefoot.geometry.base import Cache


@dataclass(frozen=True)
class Halved(sf.RowRMS):
    """The row norm of somebody else's making: everything in half the unit."""

    def norm(self, w: Tensor) -> Tensor:
        return 2 * super().norm(w)

    def direction(self, g: Tensor) -> Tensor:
        return super().direction(g) / 2

    def project(self, w: Tensor, radius: float | Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        return super().project(w, radius / 2, cache)


class Descending(Halved):
    def direction(self, g: Tensor) -> Tensor:
        return -super().direction(g)


class Epsilon(Halved):
    def direction(self, g: Tensor) -> Tensor:
        return g / (2 * g.square().mean(-1, keepdim=True).sqrt() + 1e-8)


class Short(Halved):
    def direction(self, g: Tensor) -> Tensor:
        return super().direction(g) / 3


class WrongBall(Halved):
    def project(self, w: Tensor, radius: float | Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        return super().project(w, 2 * radius, cache)


class TooFar(Halved):
    def project(self, w: Tensor, radius: float | Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        nearest, cache = super().project(w, radius, cache)
        return torch.where(nearest == w, w, nearest / 2), cache


class Signed(Halved):
    def direction(self, g: Tensor) -> Tensor:
        return g.sign() / 2


class Writes(Halved):
    def direction(self, g: Tensor) -> Tensor:
        d = super().direction(g)
        g.mul_(2)
        return d


class AcrossTheBatch(Halved):
    def direction(self, g: Tensor) -> Tensor:
        return super().direction(g.flatten(0, -2)[None]).reshape(g.shape) * (1 if len(g.shape) > 2 else 0.9)


class Optimistic(Halved):
    def bounds(self, w: Tensor, cache: Cache = None) -> tuple[Tensor, Tensor, Cache]:
        norm = self.norm(w)
        return norm, 0.9 * norm, cache


def test_a_sound_geometry_passes() -> None:
    assert max(sf.check(Halved()).values()) < 1e-9


@pytest.mark.parametrize(
    ("broken", "law"),
    [
        (Descending, "maximal"),
        (Epsilon, "scale-free"),
        (Short, "unit"),
        (WrongBall, "feasible"),
        (TooFar, "nearest"),
        (Signed, "maximal"),
        (Writes, "untouched"),
        (AcrossTheBatch, "batch"),
        (Optimistic, "bounds"),
    ],
)
def test_a_broken_law_is_named(broken: type[Halved], law: str) -> None:
    with pytest.raises(ValueError, match=law):
        sf.check(broken())


def test_every_shipped_geometry_passes() -> None:
    inf = float("inf")
    operators = [sf.MeanOperator(p, q) for p, q in ((1, 2), (1, 1.5), (1, inf), (1.5, inf), (3, inf), (2, 2))]
    for geometry in (sf.Spectral(), sf.RowRMS(), sf.HeadRMS(), sf.RowMean(3), sf.MaxNorm(), sf.RMS(), sf.Frobenius()):
        sf.check(geometry)
    for geometry in operators:
        sf.check(geometry)
