"""Norms that authors write and bounds that follow from them: what is wrong is found, what is right is not refused."""

from dataclasses import dataclass

import pytest
import torch

import surefoot as sf
from surefoot.geometry import RowMean


@dataclass(frozen=True)
class OfOneWeight(sf.Geometry):
    """Right for a matrix and a stack of them, wrong for the stacks of stacks that the optimizer steps."""

    couples = frozenset({-2, -1})

    def norm(self, w):
        return torch.linalg.matrix_norm(w)

    def direction(self, g):
        if g.ndim == 3:
            return torch.stack([self.direction(x) for x in g])
        return g / g.norm() if bool(g.any()) else torch.zeros_like(g)

    def project(self, w, radius, cache=None):
        return w * (radius / self.norm(w)[..., None, None].clamp_min(1e-30)).clamp(max=1), cache


@dataclass(frozen=True)
class OfBlocks(sf.Geometry):
    """The largest Frobenius norm of two halves of the columns: coupled with all, if not with each."""

    couples = frozenset({-2, -1})

    def norm(self, w):
        return torch.stack([torch.linalg.matrix_norm(x) for x in w.tensor_split(2, -1)]).amax(0)

    def _each(self, w, change):
        sizes = [torch.linalg.matrix_norm(x)[..., None, None] for x in w.tensor_split(2, -1)]
        return torch.cat([x * change(size) for x, size in zip(w.tensor_split(2, -1), sizes, strict=True)], -1)

    def direction(self, g):
        return self._each(g, lambda size: torch.where(size > 0, 1 / size, 0))

    def project(self, w, radius, cache=None):
        return self._each(w, lambda size: (radius / size.clamp_min(1e-300)).clamp(max=1)), cache


@dataclass(frozen=True)
class WithoutCache(OfBlocks):
    def project(self, w, radius):
        return super().project(w, radius)


def test_the_data_are_as_the_optimizer_has_them_and_blocks_may_be_coupled():
    assert max(sf.check(OfBlocks()).values()) < 1e-9
    with pytest.raises(ValueError, match=r"breaks .*unit by"):
        sf.check(OfOneWeight())
    with pytest.raises(TypeError, match="positional"):
        sf.check(WithoutCache())


def stepped_once(role, w, g):
    """The bound on a step's change, and what it was."""
    p = torch.nn.Parameter(w.clone())
    optimizer = sf.SteepestDescent([{"params": [("w", p)], "role": role}], lr=0.01)
    bound = optimizer.stability()["w"]["update_upper"]
    p.grad = g
    optimizer.step()
    return bound, optimizer.stability({"w": w})["w"]["update_measured"]


def test_scaled_columns_have_a_bound_of_a_column():
    role = sf.Role("m", sf.RMSScaled(sf.MeanOperator(1, 2)), momentum=sf.RowAdam(0.9, 0.98))
    g = torch.zeros(8, 64)
    g[:, 0] = -1
    bound, measured = stepped_once(role, torch.zeros(8, 64), g)
    assert 0 < measured <= bound < 3 * measured


@pytest.mark.parametrize("stabiliser", [sf.PostClip(1.0), sf.PreDecay(1.0)])
def test_nothing_is_promised_of_projections_that_move_more_than_the_excess(stabiliser):
    norm = RowMean(4.0)
    z = torch.full((1, 9001), (0.9 / 9000) ** 0.25)
    z[0, 0] = 0.1**0.25
    z /= norm.norm(z)
    bound, measured = stepped_once(
        sf.Role("embedding", norm, momentum=sf.Momentum(0.0), stabiliser=stabiliser), z, -(z**3)
    )
    assert measured <= bound
