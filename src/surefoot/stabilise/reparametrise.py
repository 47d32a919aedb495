"""A weight at a fixed norm by reparametrisation: `f(x; tau w / |w|)`."""

from typing import final

import torch
from torch import Tensor, nn

from surefoot.geometry import Geometry
from surefoot.geometry.base import expand
from surefoot.views import View


@final
class Reparametrised(nn.Module):
    """The parametrization `w -> tau w / |w|`, for each of a parameter's independent matrices or vectors.

    The norm is exact, and differentiated. A zero matrix stays zero, with the gradient of `tau w` there, so it can leave
    zero; after its first step it has norm tau.

    Args:
        geometry: the norm, in natural units.
        view: how the parameter is laid out in blocks.
        radii: tau of each block, positive.

    Raises:
        ValueError: a radius that is not positive.

    Source: "Beyond MuP 4", initial thoughts; T. Salimans and D. Kingma 2016, arXiv:1602.07868 (by the Euclidean norm),
    T. Miyato et al. 2018, arXiv:1802.05957 (by the spectral one).

    >>> from surefoot.geometry import MaxNorm
    >>> from surefoot.views import Vector
    >>> Reparametrised(MaxNorm(), Vector(), (2.0,))(torch.tensor([3.0, -6.0]))
    tensor([ 1., -2.])
    """

    def __init__(self, geometry: Geometry, view: View, radii: tuple[float, ...]) -> None:
        super().__init__()
        if wrong := [radius for radius in radii if not radius > 0]:
            raise ValueError(f"the radius of a normalised weight must be positive, not {wrong[0]}")
        self.geometry: Geometry = geometry
        self.view: View = view
        self.radii: tuple[float, ...] = radii

    def forward(self, w: Tensor) -> Tensor:
        """Return `tau w / |w|`, in the shape and dtype of w."""
        blocks = zip(self.view.split(w), self.radii, strict=True)
        return self.view.join([self._normalised(block, radius) for block, radius in blocks], tuple(w.shape))

    def right_inverse(self, w: Tensor) -> Tensor:
        """Return w itself, which gives `tau w / |w|`."""
        return w

    def extra_repr(self) -> str:
        """The norm and the radii."""
        return f"{type(self.geometry).__name__}, radius {', '.join(f'{radius:g}' for radius in self.radii)}"

    def _normalised(self, block: Tensor, radius: float) -> Tensor:
        dims = tuple(range(-self.geometry.ndim, 0))
        is_zero = (block.detach() == 0).all(dims[0], keepdim=True).all(dims[-1], keepdim=True)
        norm = expand(self.geometry.norm(torch.where(is_zero, 1, block)), self.geometry)
        return (radius * (block / torch.where(is_zero, 1, norm))).to(block.dtype)
