"""`SOAP`: the momentum divided by a second moment in the basis of the gradients' own factors, before a direction."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from surefoot.geometry.base import Eta, State
from surefoot.linalg import device
from surefoot.linalg.bounds import max_abs_or_one
from surefoot.linalg.polar import choose_ops
from surefoot.momentum.base import Momentum, Smoothing

SHIFT = 1e-5
"""Added to a factor's largest entry of 1 before a power step: without it, rounding would choose the vectors where no
gradient was, and so the result. Eigenvectors stay; those of eigenvalues below it are not told apart."""


@dataclass(frozen=True)
class SOAP(Smoothing):
    """`Q_L ((Q_L^T m Q_R) / sqrt(V)) Q_R^T`: the momentum over the root of a second moment, in another basis.

    Q_L and Q_R follow the eigenvectors of L and R, the running means of `g g^T` and `g^T g`; V is the running mean of
    the squares of `Q_L^T g Q_R`. At a matrix's first step, and then every `every` steps,
    `Q <- orthonormal((L + shift) Q)`: one power step and a QR; V stays as it is, as in SOAP. The direction taken next
    must ignore scale: neither V nor the means are corrected for their start at 0. Entries of V count as at least
    `floor` of the largest, so directions without gradients are not blown up.

    A side longer than `largest`, or than the other one with `sides="shorter"`, has no factor and keeps its own basis.
    SOAP is then one-sided; it is Adam where both sides are too long.

    Cost of a step, for each side with a factor: its Gram matrix, the product of that with Q, a QR, three products with
    Q. On an accelerator a QR is taken at every step, since only the device knows which matrices are due. Squares of
    float32 gradients below 1e-19 are 0, and whiten nothing.

    State: that of `of`, 4 bytes per parameter for V, and `8 d^2` bytes for each side d with a factor: with the momentum
    24 per parameter of a square matrix. All but the momentum belongs to the rank that owns the matrix.

    Args:
        of: smoothing of the gradient.
        memory: kept fraction of L, R and V.
        every: steps from one turn of the bases to the next.
        largest: longest side that has a factor.
        floor: smallest entry of V over the largest.
        sides: which sides have a factor: "both", or "shorter" (a square matrix: both).

    Raises:
        ValueError: a fraction outside [0, 1), a floor that is not between 0 and 1, fewer than one step between turns,
            other sides.

    Source: N. Vyas et al., "SOAP: improving and stabilizing Shampoo using Adam", 2024, arXiv:2409.11321, algorithm 3;
    before a matrix sign as in "SOAP-Muon".

    >>> soap, g = SOAP(Momentum(0.0), memory=0.0), torch.diag(torch.tensor([8.0, -2.0]))[None]
    >>> state = {name: x[None] for name, x in soap.init_memory(g).items()}
    >>> soap(state, g[None], 1.0)[1][0, 0].diagonal()  # the basis is that of the entries, and g / |g| of size 1 each
    tensor([ 8., -8.])
    """

    squares: ClassVar[bool] = True
    owned: ClassVar[tuple[str, ...]] = ("left", "right", "left_basis", "right_basis", "second", "turns")

    of: Smoothing = Momentum(0.9)  # noqa: RUF009
    memory: float = 0.95
    every: int = 1
    largest: int = 8192
    floor: float = 1e-6
    sides: Literal["both", "shorter"] = "both"

    def __post_init__(self) -> None:
        if not 0 <= self.memory < 1 or not 0 < self.floor < 1:
            raise ValueError(f"memory must lie in [0, 1) and floor in (0, 1), not {self.memory} and {self.floor}")
        if not self.every >= 1 or self.every % 1:
            raise ValueError(f"SOAP turns its bases every 1 step or more, not {self.every}")
        if self.sides not in ("both", "shorter"):
            raise ValueError(f'SOAP turns "both" sides or the "shorter", not {self.sides!r}')

    @property
    def averages(self) -> tuple[str, ...]:  # type: ignore[override]
        """Those of `of`."""
        return self.of.averages

    @property
    def by_problem(self) -> bool:  # type: ignore[override]
        """That of `of`."""
        return self.of.by_problem

    def init_state(self, w: Tensor) -> State:
        """That of `of`."""
        return self.of.init_state(w)

    def init_memory(self, block: Tensor) -> State:
        """Zero means, the entries' own bases, no turns; empty factors of sides that have none."""
        *batch, d_out, d_in = block.shape
        found = {"second": torch.zeros_like(block), "turns": block.new_zeros(batch)}
        for name, side, other in (("left", d_out, d_in), ("right", d_in, d_out)):
            size = side if self._turns(side, other) else 0
            found[name] = block.new_zeros(*batch, size, size)
            found[f"{name}_basis"] = torch.eye(size, dtype=block.dtype, device=block.device).repeat(*batch, 1, 1)
        return found

    def active(self, g: Tensor, finite: Tensor, couples: frozenset[int]) -> Tensor | float:
        """That of `of`, of the whole matrix: its factors couple what a norm of rows does not."""
        return self.of.active(g, finite, couples | {-2, -1})

    def __call__(self, state: State, g: Tensor, active: Tensor | float) -> tuple[State, Tensor]:
        """Smoothed, then turned into the new bases, divided, and turned back."""
        kept, m = self.of(state, g, active)
        turns = state["turns"][..., None, None]
        due = (turns % self.every == 0) & (device.scalar_like(active, g) > 0)
        kept["turns"] = (turns + active)[..., 0, 0]
        rate = (1 - self.memory) * active
        with device.full_precision(g.device):
            sides = (self._turned(state, name, x, rate, due) for name, x in (("left", g), ("right", g.mT)))
            (left, new), (right, also) = sides
            square = _between(left, g, right, inverse=True).square()
            second = torch.lerp(state["second"][..., : g.shape[-2], : g.shape[-1]], square, rate)
            root = (second / max_abs_or_one(second)).clamp_min(self.floor).sqrt()
            white = _between(left, _between(left, m, right, inverse=True) / root, right)
        return {**kept, **new, **also, "second": second}, white

    def _turns(self, side: int, other: int) -> bool:
        """Whether a side, beside the other one, has a factor."""
        return side <= self.largest and (side <= other or self.sides == "both")

    def _turned(self, state: State, name: str, g: Tensor, rate: Eta, due: Tensor) -> tuple[Tensor | None, State]:
        """The next basis of g's rows and what is kept of it; None for a side that has none."""
        size, other = g.shape[-2:]
        gram, basis = (state[one][..., :size, :size] for one in (name, f"{name}_basis"))
        if not self._turns(size, other):
            return None, {name: state[name], f"{name}_basis": state[f"{name}_basis"]}
        gram = torch.lerp(gram, _product(g, g.mT), rate)
        if g.numel() and not (device.may_branch(due) and not bool(due.any())):
            turned = torch.linalg.qr(gram / max_abs_or_one(gram) @ basis + SHIFT * basis).Q
            basis = torch.where(due, turned, basis).contiguous()
        return basis, {name: gram, f"{name}_basis": basis}


def _product(a: Tensor, b: Tensor) -> Tensor:
    """`a b`, by what multiplies fastest here."""
    flat = choose_ops(a.flatten(0, -3)).multiply(a.flatten(0, -3), b.flatten(0, -3))
    return flat.reshape(*a.shape[:-1], b.shape[-1])


def _between(left: Tensor | None, x: Tensor, right: Tensor | None, inverse: bool = False) -> Tensor:
    """`left x right^T`, inverse `left^T x right`; a basis that is None counts as the identity."""
    if left is not None:
        x = _product(left.mT if inverse else left, x)
    if right is not None:
        x = _product(x, right if inverse else right.mT)
    return x
