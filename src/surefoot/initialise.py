"""Initial values in natural units: the norm is about 1 at every width, whatever the recipe's steps."""

import hashlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from surefoot.geometry import Geometry, Spectral
from surefoot.geometry.base import expand
from surefoot.identity import plain_name


class Initial(ABC):
    """Initial values of a role's weights.

    >>> Fill(1.0).describe((1, 4))
    '1'
    """

    @abstractmethod
    def describe(self, shape: tuple[int, ...]) -> str:
        """Short text for the plan's table.

        Args:
            shape: shape of a block, `(n, out, in)` or `(n, size)`.

        Returns:
            The values in a word or two, for example "std 0.25".
        """

    @abstractmethod
    def fill_(self, block: Tensor, generator: torch.Generator) -> None:
        """Write the initial values into a block.

        Args:
            block: `(n, out, in)` or `(n, size)`, on any device.
            generator: source of random numbers, on the CPU.
        """


class NormalInitial(Initial):
    """Normal values with mean 0 and a standard deviation that depends on the block's shape.

    >>> class Published(NormalInitial):
    ...     def std(self, shape):
    ...         return 0.02
    >>> Published().describe((1, 4, 4))
    'std 0.02'
    """

    @abstractmethod
    def std(self, shape: tuple[int, ...]) -> float:
        """Standard deviation of the entries.

        Args:
            shape: shape of a block, `(n, out, in)` or `(n, size)`.

        Returns:
            The standard deviation, a positive number.
        """

    def describe(self, shape: tuple[int, ...]) -> str:
        """The standard deviation to three digits, for example "std 0.25"."""
        return f"std {self.std(shape):.3g}"

    def fill_(self, block: Tensor, generator: torch.Generator) -> None:
        """Fill with normal values, drawn in float32 on the CPU: a seed gives the same weights on every device."""
        values = torch.empty(block.shape, dtype=torch.float32, device="cpu")
        block.copy_(values.normal_(0, self.std(tuple(block.shape)), generator=generator))


@dataclass(frozen=True)
class LinearNormal(NormalInitial):
    """Std `sqrt(d_out/d_in) / (sqrt(d_in) + sqrt(d_out))`: a normal matrix of that std has spectral norm about 1.

    Source: "Beyond MuP 2", initialisation.

    Args:
        stride: number of disjoint sets of columns of a transposed convolution, see `TransposedConvSpectral`; its fan-in
            is `d_in / stride`, so the std is `sqrt(stride)` times larger.

    >>> LinearNormal().std((1, 4, 4)), LinearNormal(stride=4).std((1, 4, 4))
    (0.25, 0.5)
    """

    stride: int = 1

    def std(self, shape: tuple[int, ...]) -> float:
        """`sqrt(stride d_out/d_in) / (sqrt(d_in) + sqrt(d_out))`."""
        d_out, d_in = max(1, shape[-2]), max(1, shape[-1])
        return math.sqrt(d_out / d_in) / (math.sqrt(d_in) + math.sqrt(d_out)) * math.sqrt(self.stride)


@dataclass(frozen=True)
class SquareNormal(NormalInitial):
    """Std `1/(2 sqrt(d_in))`, as `LinearNormal` on a square matrix: for heads of queries and keys.

    A head is a layer from `d_in` to a few outputs. At norm 1 its outputs on isotropic inputs would have an RMS of about
    `sqrt(d_head/d_in)`, and the first logits would vanish as models grow. With this std it is 1/2 at every width.

    >>> SquareNormal().std((4, 16, 64)), LinearNormal().std((1, 64, 64))
    (0.0625, 0.0625)
    """

    def std(self, shape: tuple[int, ...]) -> float:
        """`1/(2 sqrt(d_in))`."""
        return 0.5 / math.sqrt(max(1, shape[-1]))


@dataclass(frozen=True)
class UnitNormal(NormalInitial):
    """Std 1: the rows of an embedding have RMS 1.

    >>> UnitNormal().std((1, 50257, 768))
    1.0
    """

    def std(self, shape: tuple[int, ...]) -> float:
        """1 at every shape."""
        return 1.0


@dataclass(frozen=True)
class HeadNormal(NormalInitial):
    """Std `1/d`: the LM head's norm is about 1, its initial logits shrink as `1/sqrt(d)`.

    Source: "Beyond MuP 3", LM head (its table gives the variance).

    >>> HeadNormal().std((1, 50257, 512))
    0.001953125
    """

    def std(self, shape: tuple[int, ...]) -> float:
        """`1/d`, d being the last dimension of the shape."""
        return 1 / max(1, shape[-1])


@dataclass(frozen=True)
class Orthogonal(Initial):
    """`sqrt(d_out/d_in)` times a random matrix with orthonormal rows or columns: singular values 1 in natural units.

    Uniform among such matrices: the polar factor of a normal matrix, by QR in float64.

    >>> w = torch.empty(1, 2, 8)
    >>> Orthogonal().fill_(w, torch.Generator().manual_seed(0))
    >>> (w[0] @ w[0].T * 4 + 0).round(decimals=5).abs()  # singular values sqrt(2/8)
    tensor([[1., 0.],
            [0., 1.]])
    """

    def describe(self, shape: tuple[int, ...]) -> str:
        """The text "orthogonal"."""
        return "orthogonal"

    def fill_(self, block: Tensor, generator: torch.Generator) -> None:
        """Draw normal values on the CPU, orthonormalise their longer side."""
        d_out, d_in = block.shape[-2:]
        values = torch.empty(block.shape, dtype=torch.float64, device="cpu").normal_(generator=generator)
        q, r = torch.linalg.qr(values if d_out >= d_in else values.mT)
        signs = r.diagonal(dim1=-2, dim2=-1).sign()  # without them the distribution is not uniform
        q = q * torch.where(signs == 0, 1, signs)[..., None, :]
        block.copy_((q if d_out >= d_in else q.mT) * math.sqrt(d_out / max(1, d_in)))


@dataclass(frozen=True)
class ExactNorm(Initial):
    """Other initial values, scaled so that a norm is exactly 1 where theirs is about 1.

    Args:
        initial: the values.
        norm: default the spectral norm in natural units.

    >>> w = torch.empty(1, 4, 4)
    >>> ExactNorm(LinearNormal()).fill_(w, torch.Generator().manual_seed(0))
    >>> round(float(torch.linalg.matrix_norm(w[0], 2)), 5)
    1.0
    """

    initial: Initial
    norm: Geometry = field(default_factory=Spectral)

    def describe(self, shape: tuple[int, ...]) -> str:
        """The norm, for example "Spectral norm 1"."""
        return f"{type(self.norm).__name__} norm 1"

    def fill_(self, block: Tensor, generator: torch.Generator) -> None:
        """Fill with the values, then divide by the norm of each matrix; zeros stay."""
        self.initial.fill_(block, generator)
        wide = block.to(torch.promote_types(block.dtype, torch.float32))
        norm = expand(self.norm.norm(wide), self.norm)
        block.copy_(wide / torch.where(norm == 0, 1, norm))


@dataclass(frozen=True)
class Scaled(Initial):
    """Other initial values times a factor that depends on the model, such as its depth.

    Args:
        initial: the values.
        factor: on them.

    >>> Scaled(LinearNormal(), 0.5).describe((1, 4, 4))
    'std 0.25 x 0.5'
    """

    initial: Initial
    factor: float

    def describe(self, shape: tuple[int, ...]) -> str:
        """The values and the factor."""
        return f"{self.initial.describe(shape)} x {self.factor:.3g}"

    def fill_(self, block: Tensor, generator: torch.Generator) -> None:
        """Fill with the values times the factor, rounded once: computed in float32 whatever the dtype."""
        values = torch.empty_like(block, dtype=torch.float32)
        self.initial.fill_(values, generator)
        block.copy_(values * self.factor)


@dataclass(frozen=True)
class ZeroRow(Initial):
    """Other initial values, and 0 in the padding row of a table, whose gradient is always 0.

    Args:
        initial: the values.
        row: `padding_idx`.

    >>> ZeroRow(UnitNormal(), 3).describe((1, 9, 4))
    'std 1 but 0 in row 3'
    """

    initial: Initial
    row: int

    def describe(self, shape: tuple[int, ...]) -> str:
        """The values and the row."""
        return f"{self.initial.describe(shape)} but 0 in row {self.row}"

    def fill_(self, block: Tensor, generator: torch.Generator) -> None:
        """Fill with the values, then write 0 into the row."""
        self.initial.fill_(block, generator)
        block[..., self.row, :] = 0


@dataclass(frozen=True)
class Fill(Initial):
    """One value for all entries: 1 for gains, 0 for biases.

    Args:
        value: the value.

    >>> gain = torch.empty(1, 2)
    >>> Fill(1.0).fill_(gain, torch.Generator())
    >>> gain
    tensor([[1., 1.]])
    """

    value: float

    def describe(self, shape: tuple[int, ...]) -> str:
        """The value, for example "1"."""
        return f"{self.value:g}"

    def fill_(self, block: Tensor, generator: torch.Generator) -> None:
        """Set every entry to the value; draws no random number."""
        block.fill_(self.value)


@dataclass(frozen=True)
class AsBuilt(Initial):
    """The values that the model's constructor wrote.

    >>> AsBuilt().describe((1, 8))
    'as built'
    """

    def describe(self, shape: tuple[int, ...]) -> str:
        """The text "as built"."""
        return "as built"

    def fill_(self, block: Tensor, generator: torch.Generator) -> None:
        """Leave the block unchanged."""


def generator_for(name: str, seed: int) -> torch.Generator:
    """A generator on the CPU for one parameter, seeded by a hash of its name, without wrappers' prefixes, and a seed.

    >>> a, b = (torch.rand(1, generator=generator_for("head.weight", 0)) for _ in range(2))
    >>> bool(a == b)
    True
    """
    digest = hashlib.sha256(f"{seed}:{plain_name(name)}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
