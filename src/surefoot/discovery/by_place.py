"""Initial values and scales that differ within a parameter, by the place of its blocks.

In a matrix of queries, keys and values the heads of queries and keys are one stack of two or more, the values one
matrix behind it: so blocks tell what they are, where their rows do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.initialise import Initial
from surefoot.scaling import Scale
from surefoot.views import Grouped, Projections, View


@dataclass(frozen=True)
class BesideValuesScale(Scale):
    """One scale for the heads of queries and keys, and another for the values that are fused with them.

    Args:
        heads: the scale of stacks of heads.
        values: that of a single matrix.

    >>> from surefoot.scaling import Constant
    >>> scale = BesideValuesScale(Constant(2.0), Constant(1.0))
    >>> scale((5, 4, 8)), scale((1, 4, 8))
    (2.0, 1.0)
    """

    heads: Scale
    values: Scale

    def __call__(self, shape: tuple[int, ...]) -> float:
        """By the number of matrices."""
        return (self.heads if shape[0] > 1 else self.values)(shape)


@dataclass(frozen=True)
class BesideValues(Initial):
    """Initial values of the heads of queries and keys, and others of the values that are fused with them.

    Args:
        heads: those of stacks of heads.
        values: those of a single matrix.

    >>> from surefoot.initialise import Fill
    >>> BesideValues(Fill(2.0), Fill(1.0)).describe((5, 4, 8)), BesideValues(Fill(2.0), Fill(1.0)).describe((1, 4, 8))
    ('2', '1')
    """

    heads: Initial
    values: Initial

    def describe(self, shape: tuple[int, ...]) -> str:
        """By the number of matrices."""
        return self._of(shape).describe(shape)

    def fill_(self, block: Tensor, generator: torch.Generator) -> None:
        """By the number of matrices."""
        self._of(tuple(block.shape)).fill_(block, generator)

    def _of(self, shape: tuple[int, ...]) -> Initial:
        return self.heads if shape[0] > 1 else self.values


def queries_with_keys(view: View, head_dim: int) -> View:
    """A layout in which a single head of keys and one of values are told apart: keys are counted with the queries.

    Args:
        view: the layout of queries, keys and values.
        head_dim: rows of a head.

    Returns:
        The same rows in two projections where there is one head of values, else the view.

    >>> queries_with_keys(Projections((16, 4, 4)), 4), queries_with_keys(Grouped(2, (16, 4, 4)), 4)
    (Projections(sizes=(20, 4)), Grouped(groups=2, sizes=(16, 4, 4)))
    """
    if isinstance(view, Projections) or (isinstance(view, Grouped) and view.groups == 1):
        *before, values = view.sizes
        return Projections((sum(before), values)) if values == head_dim else view
    return view
