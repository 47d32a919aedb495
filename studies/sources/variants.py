"""The methods of this study that are no recipe of the package."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from surefoot import recipes
from surefoot.geometry import Adaptive, Spectral
from surefoot.geometry.base import Geometry
from surefoot.momentum import Adam, Momentum, Smoothing, State
from surefoot.recipes.steady import DECAY
from surefoot.recipes.steady import HIDDEN as HIDDEN_MOMENTUM
from surefoot.scaling import Constant, Moonlight, Times
from surefoot.stabilise import DecoupledWeightDecay, PostClip

HIDDEN, TABLES = ("linear", "heads", "conv"), ("embedding", "head")
RADIUS = 2.0
OTHERS_RATE = -3.125


def bounded() -> recipes.Recipe:
    """The default with `PostClip` in place of its decay, on hidden matrices in units of the step's factor.

    Returns:
        The recipe.
    """
    base = recipes.steady_bounded()
    table = {kind: replace(role, stabiliser=PostClip(RADIUS)) for kind, role in base.table.items()}
    return replace(base, name="bounded", table=table)


def moonlight_hidden(log2_lr: float) -> recipes.Recipe:
    """The default under one rate of hidden matrices, in Moonlight's convention; all else stays at `OTHERS_RATE`.

    Moonlight's step is `0.2 sqrt(max(d_out, d_in)) msign`. The parameters beside the hidden matrices keep their natural
    units and the default's best rate, whatever the group's is.

    Args:
        log2_lr: log2 of the group's learning rate.

    Returns:
        The recipe.
    """
    base, others = recipes.steady(per_head=False), 2.0 ** (OTHERS_RATE - log2_lr)
    table = {kind: replace(role, lr_scale=Times(others, role.lr_scale)) for kind, role in base.table.items()}
    for kind in TABLES:
        decay = DecoupledWeightDecay(others * DECAY, table[kind].lr_scale)
        table[kind] = replace(table[kind], stabiliser=decay)
    decay = DecoupledWeightDecay(DECAY, Moonlight())
    table["linear"] = replace(base.table["linear"], lr_scale=Moonlight(), stabiliser=decay)
    return replace(base, name="moonlight_hidden", table=table)


@dataclass(frozen=True)
class GraftedAdam(Smoothing):
    """The default's smoothed gradient at the Frobenius norm that Adam's step has: `m |a|_F / |m|_F`.

    Args:
        direction: what is smoothed for the direction.
        length: whose step gives the length.
    """

    averages: ClassVar[tuple[str, ...]] = ("momentum", "exp_avg", "exp_avg_sq")

    direction: Momentum = HIDDEN_MOMENTUM
    length: Adam = Adam(0.9, 0.95)  # noqa: RUF009

    def init_state(self, w: Tensor) -> State:
        """Both."""
        return self.direction.init_state(w) | self.length.init_state(w)

    def active(self, g: Tensor, finite: Tensor, couples: frozenset[int]) -> Tensor | float:
        """As for Adam."""
        return self.length.active(g, finite, couples)

    def __call__(self, state: State, g: Tensor, active: Tensor | float) -> tuple[State, Tensor]:
        """Both, the first at the second's norm."""
        kept, m = self.direction({"momentum": state["momentum"]}, g, active)
        adam, a = self.length({name: state[name] for name in ("exp_avg", "exp_avg_sq", "step")}, g, active)
        norms = (torch.linalg.matrix_norm(x, keepdim=True) for x in (a, m))
        return kept | adam, m * torch.div(*norms).nan_to_num(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class FrobeniusGraft(Adaptive):
    """The matrix sign at the Frobenius norm of the smoothed gradient."""

    reads: ClassVar[frozenset[str]] = frozenset({"m"})

    norm_of: Geometry = Spectral()  # noqa: RUF009

    def take(self, w: Tensor, m: Tensor, active: Tensor | float, memory: State) -> tuple[Tensor, State]:
        """`msign(m) |m|_F / |msign(m)|_F`."""
        d, memory = self.inner(w, m, active, memory)
        size, own = (torch.linalg.matrix_norm(x, keepdim=True) for x in (m, d))
        return d * (size / torch.where(own == 0, 1, own)), memory


def graft(log2_lr: float) -> recipes.Recipe:
    """The default, hidden matrices stepping along the matrix sign as far, in the Frobenius norm, as Adam would.

    Beside them everything stays at `OTHERS_RATE`, as in `moonlight_hidden`; their decay is the default's, by the rate.

    Args:
        log2_lr: log2 of the group's learning rate.

    Returns:
        The recipe.
    """
    base = moonlight_hidden(log2_lr)
    linear = replace(
        base.table["linear"],
        geometry=FrobeniusGraft(),
        momentum=GraftedAdam(),
        lr_scale=Constant(),
        stabiliser=DecoupledWeightDecay(DECAY, Constant()),
        weight_norm=Spectral(),
    )
    return replace(base, name="graft", table={**base.table, "linear": linear})
