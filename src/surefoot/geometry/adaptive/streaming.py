"""The spectral norm whose direction follows the gradient's singular vectors from step to step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.geometry.adaptive.base import Adaptive, Taken
from surefoot.geometry.sizes import UNKNOWN, Sizes
from surefoot.geometry.spectral import ScaledSpectral, Spectral
from surefoot.linalg import device
from surefoot.linalg.power_iteration import require_iterations, streaming_msign


@dataclass(frozen=True)
class StreamingSpectral(Adaptive):
    """The spectral norm, its direction by one power iteration a step from the last step's singular vectors.

    `U <- orthonormal(m V)`, `V <- orthonormal(mᵀ U)`, `d = unit U Vᵀ`, see `linalg.power_iteration.streaming_msign`.
    Alignment `<d, m> / (|d| |m|_*)` over the training of a small GPT: docs/performance.md. A gradient of zero leaves
    the vectors as they are.

    State: V on the smaller side, `4 min(out, in)**2` bytes a matrix, up to 4 bytes a parameter; a matrix is not cut
    over ranks, so V goes with its owner. Blocks of unequal sizes in one parameter are stored at the largest one's size.

    Args:
        norm_of: the norm: `Spectral()`, or `TransposedConvSpectral` of some stride.
        iterations: power iterations a step.

    Raises:
        ValueError: a norm that is not spectral, fewer than one iteration.

    Source: "Streaming Power Iteration for Muon", cited in "Beyond MuP 4"; see `streaming_msign` for what differs.

    >>> streaming, m = StreamingSpectral(), torch.tensor([[[2.0, 0.0], [0.0, -1.0]]])
    >>> d, memory = streaming.take(m, m, 1.0, streaming.init_memory(m))
    >>> d.round(decimals=3) + 0
    tensor([[[ 1.,  0.],
             [ 0., -1.]]])
    """

    norm_of: ScaledSpectral = Spectral()  # noqa: RUF009
    iterations: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.norm_of, ScaledSpectral):
            raise ValueError(f"StreamingSpectral takes the direction of a spectral norm, not of {self.norm_of}")
        require_iterations("StreamingSpectral", self.iterations)

    def init_memory(self, w: Tensor) -> dict[str, Tensor]:
        """The identity on the smaller side of each matrix."""
        k = min(w.shape[-2:])
        return {"basis": torch.eye(k, dtype=w.dtype, device=w.device).repeat(*w.shape[:-2], 1, 1)}

    def take(self, w: Tensor, m: Tensor, active: Tensor | float, memory: dict[str, Tensor]) -> Taken:
        """The direction from the last basis, and the next one; where a block is stored at a larger size, its corner."""
        k = min(m.shape[-2:])
        old = memory["basis"][..., :k, :k]
        d, new = streaming_msign(m, old, self.iterations)
        new = torch.where(device.scalar_like(active, m) > 0, new, old)
        return d.mul_(self.norm_of.unit(m.shape)), {**memory, "basis": new}

    def direction_sizes(self, shape: tuple[int, ...], smoothed: Sizes = UNKNOWN) -> Sizes:
        """Those of the norm's own direction, which has as large a singular value or a larger one."""
        return self.norm_of.direction_sizes(shape, smoothed)
