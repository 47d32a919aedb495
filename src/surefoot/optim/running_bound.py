"""When running bounds on an accelerator are proven anew: by what the host knows without asking it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from surefoot.linalg import device
from surefoot.momentum import State
from surefoot.plan import Placement

log = logging.getLogger("surefoot")
COUNT = "steps_on_device"
"""Of a group, saved with it: a run that was resumed proves bounds at the steps at which it would have."""


class Looks:
    """Proves running bounds where the host cannot read whether a weight has changed: `before` a step, `after` it.

    A bound is doubted when its parameter was written to since this optimizer's own write: the parameter's version says
    so. (A write through `.data` leaves the version; the next proof finds it.) It is proven anew when the last proof has
    served its steps, and at every step while a CUDA graph is captured, since a graph repeats what it has seen.
    """

    def __init__(self) -> None:
        self._versions: dict[Tensor, int] = {}
        self._told = False

    def before(
        self,
        chunk: Sequence[Tensor],
        weights: list[Tensor],
        kept: list[State],
        placement: Placement,
        group: dict[str, Any],
    ) -> list[State]:
        """What is kept of the chunk's blocks, its bounds true of the weights."""
        geometry = placement.role.weight_geometry
        if not self._told:
            log.warning(
                "PostClip on %s: matrices are scaled down by a proven bound on their norm, where a CPU clips singular "
                "values, so that no step waits for the device",
                chunk[0].device.type,
            )
            self._told = True
        if any(self._versions.get(p) != p._version for p in chunk):
            kept = [x | geometry.revalidate(w, {"upper": x["upper"]}) for w, x in zip(weights, kept, strict=True)]
        each = zip(placement.stabilisers, placement.blocks, strict=True)
        serves = min(
            stabiliser.certificate_period(group["lr"] * placement.role.lr_scale(block)) for stabiliser, block in each
        )
        captured = chunk[0].is_cuda and torch.cuda.is_current_stream_capturing()
        if not captured and group.get(COUNT, 0) % serves:
            return kept
        return [x | {"upper": geometry.bounds(w)[1]} for w, x in zip(weights, kept, strict=True)]

    def after(self, chunk: Sequence[Tensor]) -> None:
        """These are now as this optimizer wrote them."""
        self._versions.update((p, p._version) for p in chunk)

    def count(self, group: dict[str, Any]) -> None:
        """One more step of a group on an accelerator."""
        if not all(device.on_cpu(p) for p in group["params"]):
            group[COUNT] = group.get(COUNT, 0) + 1

    def clear(self) -> None:
        """Nothing is known of any weight."""
        self._versions.clear()
