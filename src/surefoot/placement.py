"""`Placement`: a parameter's role, or the roles of its blocks, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from surefoot.geometry import Identity
from surefoot.identity import digest, label
from surefoot.initialise import generator_for
from surefoot.roles import Role
from surefoot.stabilise import Stabiliser
from surefoot.views import Shape


@dataclass(frozen=True)
class Placement:
    """One parameter's role and the reason for it.

    Args:
        role: the role; where blocks differ that of the first, whose layout, norms and momentum all share.
        why: the reason, in words.
        shape: of the parameter.
        by_block: the role of each block where they differ in rate, initial values or stabiliser, else none.
        parts: what is fused in the parameter, in order: names for the lines of a plan's table.

    Raises:
        ValueError: the role's view does not fit the shape, or its geometry not the view's blocks.

    >>> from surefoot.roles import NATURAL
    >>> Placement(NATURAL["linear"], "as given", (8, 4)).blocks
    ((1, 8, 4),)
    """

    role: Role
    why: str
    shape: tuple[int, ...]
    by_block: tuple[Role, ...] = ()
    parts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.by_block) in (0, len(self.blocks))
        for geometry in (self.role.geometry, self.role.weight_geometry):
            if not isinstance(geometry, Identity) and len(self.blocks[0]) - 1 != geometry.ndim:
                takes = f"{type(geometry).__name__} takes {('vectors', 'matrices')[geometry.ndim - 1]}, the view"
                raise ValueError(f"{takes} {type(self.role.view).__name__} gives blocks of shape {self.blocks[0]}")

    @cached_property
    def blocks(self) -> tuple[Shape, ...]:
        """The shapes of the blocks that the norm is taken over."""
        return self.role.view.blocks(self.shape)

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        """A role for each block."""
        return self.by_block or (self.role,) * len(self.blocks)

    def with_roles(self, change: Callable[[Role], Role]) -> Placement:
        """The same place with every role changed."""
        return replace(self, role=change(self.role), by_block=tuple(map(change, self.by_block)))

    @cached_property
    def lr_scales(self) -> tuple[float, ...]:
        """The factor on the learning rate for each block."""
        return tuple(role.lr_scale(block) for role, block in zip(self.roles, self.blocks, strict=True))

    @property
    def projections(self) -> tuple[Shape, ...]:
        """`blocks`, before they were cut into heads."""
        return self.role.view.whole.blocks(self.shape)

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits of shape and roles, the same in every process; a checkpoint carries it."""
        return digest((self.shape, self.by_block or self.role))

    @property
    def promise(self) -> str:
        """What holds of the weight's norm, in words; the norm is named where it is not the step's."""
        return _once(map(self._promise, range(len(self.blocks))))

    def _promise(self, i: int) -> str:
        """What holds of a block's norm."""
        name = "norm" if self.role.weight_norm is None else f"{type(self.role.weight_norm).__name__} norm"
        return self.stabilisers[i].describe(name, self.role.step_norm_bound(self.blocks[i]))

    @cached_property
    def stabilisers(self) -> tuple[Stabiliser, ...]:
        """The stabiliser of each block, with its radius in plain numbers."""
        pairs = zip(self.roles, self.blocks, strict=True)
        return tuple(role.stabiliser.scaled(role.radius_unit(block), block) for role, block in pairs)

    @torch.no_grad()
    def fill_(self, parameter: Tensor, name: str, seed: int) -> None:
        """Write the parameter's initial value: that of its role, deterministic in (name, seed)."""
        view, generator = self.role.view, generator_for(name, seed)
        blocks = [block.clone() for block in view.split(parameter)]  # also of strides no view follows
        for role, block in zip(self.roles, blocks, strict=True):
            role.initial.fill_(block, generator)
        parameter.copy_(view.join(blocks, self.shape))

    def rows(self, name: str) -> Iterator[dict[str, str]]:
        """Lines of a plan's table: one, or of fused parts one each where their roles differ.

        Args:
            name: of the parameter.

        Yields:
            Column -> text.
        """
        count, projections = len(self.blocks), [block[1:] for block in self.projections for _ in range(block[0])]
        if not self.by_block:
            yield self._row(name, range(count), projections)
            return
        last = len(projections) - 1
        parts = self.parts if len(self.parts) == last + 1 else map(str, range(last + 1))
        for i, part in enumerate(parts):  # heads of several parts may be one block; the part left whole is the last
            blocks = [count - 1 if i == last else min(i, count - 2)]
            yield self._row(f"{name}[{part}]", blocks, projections[i : i + 1])

    def _row(self, name: str, blocks: Sequence[int], projections: Sequence[Shape]) -> dict[str, str]:
        return {
            "name": name,
            "shape": "x".join(map(str, self.shape)) or "scalar",
            "layout": label(self.role.view),
            "role": self.role.name,
            "fan in": _once(str(shape[-1]) for shape in projections),
            "fan out": _once(str(shape[0]) if len(shape) > 1 else "-" for shape in projections),
            "norm": label(self.role.geometry),
            "init": _once(self.roles[i].initial.describe(self.blocks[i]) for i in blocks),
            "lr scale": _once(f"{self.lr_scales[i]:.4g}" for i in blocks),
            "promise": _once(map(self._promise, blocks)),
            "why": self.why,
        }


def _once(texts: Iterable[str]) -> str:
    """The texts of a parameter's blocks, equal ones once."""
    return ", ".join(dict.fromkeys(texts))
