"""`RunningBound`: an upper bound on each weight's norm, kept from step to step, so that costly projections are rare.

A projection under the spectral norm costs an eigendecomposition. But a step of size eta raises a norm by at most
`eta * norm(direction)`, so an upper bound that was once proven grows by known amounts, and only a weight whose bound
exceeds its radius is projected. The bound is a tensor "upper" in the optimizer's state: one number a matrix.
"""

import logging
import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from surefoot.geometry.base import Eta, Geometry, NormBounds, State, Taken, expand
from surefoot.linalg import device

log: logging.Logger = logging.getLogger("surefoot")

MARGIN, MARGIN_STEPS = 0.25, 16
"""How far inside its ball a weight is projected by default: this part of the radius, or this many steps if less."""

MARGIN_ASKED = 0.5
"""At most this part of the radius for a requested period: all of it would leave nothing of the weight."""

SLACK = 1e-6
"""A bound is kept if the norm is proven to exceed it by at most this relative amount, far below every tolerance."""

ROW = 1024
"""Number of entries that a fingerprint sums together, where rows are shorter."""


def enforce(
    w: Tensor, state: State, geometry: Geometry, radius: float, eta: Eta, longest: float, period: int | None
) -> Taken:
    """Enforce `norm(w) <= radius` after a step; skips the projection where the bound already proves it.

    Weights are projected `(period - 1) * eta` inside the ball, so that the next `period - 1` steps need no projection.
    On an accelerator nothing is read on the host: each weight is multiplied by `min(1, radius / upper)` instead.

    Args:
        w: weights after their step, `(..., out, in)`.
        state: with "upper", `(...)`, for the weights before it.
        geometry: the one whose norm is bounded.
        radius: in natural units.
        eta: size of the step, broadcasting against w; where it is 0 the weight stays as it is.
        longest: upper bound on the norm of the step's direction; inf if unknown.
        period: steps between projections; None chooses, at most a quarter of the radius inside.

    Returns:
        `(weights, state)`.
    """
    if not w.numel():
        return w, state
    eta = device.scalar_like(eta, w, w.dtype)
    eta = (eta.amax(tuple(range(-geometry.ndim, 0))) if eta.ndim else eta).expand(w.shape[: -geometry.ndim])
    reach = eta * longest
    rounding = math.sqrt(min(w.shape[-geometry.ndim :])) * torch.finfo(w.dtype).eps
    upper = torch.where(eta > 0, state["upper"] * (1 + 2 * rounding) + reach, state["upper"])
    if not device.on_cpu(w):
        bounds = NormBounds.of(geometry)
        upper = torch.minimum(bounds.quick_bound(w), upper if math.isfinite(longest) else bounds.certificate(w))
        scaled = w * expand(torch.where(eta > 0, radius / upper.clamp_min(radius), 1), geometry)
        held = torch.where(upper > radius, radius * (1 + 4 * rounding), upper)
        return scaled, {**state, "upper": torch.where(eta > 0, held, state["upper"])}
    outside = (upper > radius) & (eta > 0)
    if not bool(outside.any()):
        return w, {**state, "upper": upper}
    inside = radius - margin(radius, reach, period)
    w = w.index_put((outside,), geometry.project(w[outside], expand(inside, geometry)[outside])[0])
    return w, {**state, "upper": torch.where(outside, inside * (1 + 4 * rounding), upper)}


def margin(radius: float, reach: Tensor | float, period: int | None) -> Tensor:
    """How far inside the ball a weight is projected, for steps of norm reach; 0 for steps of unknown length."""
    steps, most = (MARGIN_STEPS, MARGIN) if period is None else (period, MARGIN_ASKED)
    reach = torch.as_tensor(reach, device="cpu")
    return torch.where(reach.isfinite(), reach * (steps - 1), 0).clamp(max=most * radius)


class RunningBound:
    """Decides before each step whether the bounds in the state still hold, and computes new ones where they do not.

    When it is trusted: a bound holds for the weights that this optimizer wrote last. Before a step the weights' present
    fingerprint is compared with the one after the last step; where they differ (a loaded checkpoint, `p.data.copy_`,
    rounding to half precision), the bound is revalidated.

    When it is proven anew: on a CPU, when it exceeds the radius, by an exact projection. On an accelerator the host
    must not read a number, so bounds are certified on a schedule that it knows: after `PostClip.certificate_period`
    steps, after a write that the parameter's version shows, and at every step of a captured CUDA graph.

    What an outside write does: on a CPU the old bound is kept where one Cholesky factor proves it, else the weight is
    projected. On an accelerator the fingerprint is compared on the device; after a write that the host cannot see
    (`p.data.mul_`) the Frobenius norm is the bound until the next certificate. That may scale the weight down further
    than needed, never less.
    """

    def __init__(self) -> None:
        self._fingerprints: dict[Tensor, Tensor] = {}
        self._versions: dict[Tensor, int] = {}
        self._announced = False

    def revalidate(
        self, params: Sequence[Tensor], weights: Sequence[Tensor], states: list[State], norm: Geometry, due: bool
    ) -> list[State]:
        """Make each state's "upper" bound these weights: kept where it still does, else reset or certified anew.

        Args:
            params: k like parameters.
            weights: their blocks, each `(k, n, out, in)`.
            states: of each block, with an "upper", as the last step returned it.
            norm: the norm.
            due: on an accelerator, whether the last certificates' period is over.

        Returns:
            The states, of each block; the argument itself where nothing is to be changed.
        """
        blocks = [(w, state["upper"]) for w, state in zip(weights, states, strict=True)]
        if not device.on_cpu(weights[0]):
            uppers = self._on_device(params, blocks, norm, due)
        elif not bool((changed := self._changed(params, fingerprint(weights))).any()):
            return states
        else:
            uppers = [upper.index_put((changed,), _proven(w[changed], upper[changed], norm)) for w, upper in blocks]
        return [state | {"upper": upper} for state, upper in zip(states, uppers, strict=True)]

    def _on_device(
        self, params: Sequence[Tensor], blocks: list[tuple[Tensor, Tensor]], norm: Geometry, due: bool
    ) -> list[Tensor]:
        """New bounds, on an accelerator, of blocks given as (weights, present bound)."""
        if not self._announced:
            log.warning(
                f"PostClip on {params[0].device.type}: matrices are scaled down by a proven bound on their norm, so "
                "that no step waits for the device; a CPU clips singular values"
            )
            self._announced = True
        if due or (params[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            return [NormBounds.of(norm).certificate(w) for w, _ in blocks]
        if any(self._versions.get(p) != p._version for p in params):
            return [_proven(w, upper, norm) for w, upper in blocks]
        changed = self._changed(params, fingerprint([w for w, _ in blocks]))
        return [upper.masked_fill(changed[:, None], math.inf) for _, upper in blocks]

    def record(self, params: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """Remember that these parameters are now as this optimizer wrote them; weights are their blocks."""
        self._fingerprints.update(zip(params, fingerprint(weights), strict=True))
        if not device.on_cpu(weights[0]):
            self._versions.update((p, p._version) for p in params)

    def clear(self) -> None:
        """Forget all fingerprints: every bound is revalidated before the next step."""
        self._fingerprints.clear()
        self._versions.clear()

    def _changed(self, params: Sequence[Tensor], present: Tensor) -> Tensor:
        """Whether each parameter differs from what was recorded, `(k,)`; True for one that never was."""
        unknown = present.new_full(present.shape[1:], -1 if present.dtype == torch.int64 else math.nan)
        recorded = torch.stack([self._fingerprints.get(p, unknown) for p in params])
        return (recorded != present).any(1)


def fingerprint(weights: Sequence[Tensor]) -> Tensor:
    """Pseudo-randomly weighted sums of each parameter's rows, which a write or a permutation changes.

    Short rows are summed together, `ROW` entries at most, since a product with rows of 128 takes twice as long. On a
    CPU `w @ r` in w's dtype: one pass; if another memory layout changes the rounding, that costs one Cholesky factor.
    On an accelerator the sum of `bits(w) * r` over 64-bit integers, the same in every order of summation.

    Args:
        weights: blocks of k like parameters, each `(k, n, out, in)` or `(k, n, size)`.

    Returns:
        `(k, sums)`: of all blocks, float32 (float64), or int64 on an accelerator.

    >>> w = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    >>> bool((fingerprint([w]) == fingerprint([w.flip(-1)])).any())
    False
    """
    rows = [w.shape[-1] * math.gcd(w.shape[1:-1].numel(), max(1, ROW // w.shape[-1])) for w in weights]
    return torch.cat([_row_sums(w.reshape(-1, n)).reshape(len(w), -1) for w, n in zip(weights, rows, strict=True)], 1)


def _row_sums(w: Tensor) -> Tensor:
    """Weighted sums of a matrix's rows; another memory layout has another order of summation."""
    if device.on_cpu(w):
        with device.full_precision(w.device):
            return torch.mv(w, _column_weights(w.shape[-1], w.dtype))
    bits = w.contiguous().view(torch.int32)  # in float64, two for each column
    return (bits * _hashes(bits.shape[-1], bits.device)).sum(-1)


@lru_cache(maxsize=64)
def _column_weights(count: int, dtype: torch.dtype) -> Tensor:
    """Pseudo-random numbers between 1 and 2, `(count,)`, on the CPU."""
    return _hashes(count, torch.device("cpu")).to(dtype) * 2.0**-64 + 1.5


def _hashes(count: int, where: torch.device) -> Tensor:
    """A pseudo-random int64 for each column, `(count,)`: a multiplicative hash of its number."""
    columns = torch.arange(1, count + 1, device=where) * 0x2545F4914F6CDD1D
    return columns.bitwise_xor_(columns >> 32).mul_(0x2545F4914F6CDD1D)


def _proven(w: Tensor, upper: Tensor, geometry: Geometry) -> Tensor:
    """upper where it is proven to bound w, up to `SLACK`; elsewhere inf, or on an accelerator a certificate."""
    other = math.inf if device.on_cpu(w) else NormBounds.of(geometry).certificate(w)
    return torch.where(NormBounds.of(geometry).is_below(w, upper * (1 + SLACK)), upper, other)
