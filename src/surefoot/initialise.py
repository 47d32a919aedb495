"""Initial values in natural units: the norm is about 1 at every width, whatever the recipe of the increment."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class Initial(ABC):
    """How a role's weights start."""

    @abstractmethod
    def describe(self, shape: tuple[int, ...]) -> str:
        """In a word or two, for the plan's table."""

    @abstractmethod
    def fill_(self, block: Tensor, generator: torch.Generator) -> None:
        """Write the values into a block `(n, out, in)` or `(n, size)`."""


class NormalInitial(Initial):
    """Normal values with mean 0 and a standard deviation that depends on the block's shape."""

    @abstractmethod
    def std(self, shape: tuple[int, ...]) -> float:
        """The standard deviation for blocks `(n, out, in)`."""

    def describe(self, shape: tuple[int, ...]) -> str:
        """The standard deviation."""
        return f"std {self.std(shape):.3g}"

    def fill_(self, block: Tensor, generator: torch.Generator) -> None:
        """Drawn in float32 on the CPU, so that a seed gives the same weights on every device."""
        block.copy_(
            torch.empty(block.shape, dtype=torch.float32, device="cpu").normal_(
                0, self.std(tuple(block.shape)), generator=generator
            )
        )


@dataclass(frozen=True)
class LinearNormal(NormalInitial):
    """Std `sqrt(d_out/d_in) / (sqrt(d_in) + sqrt(d_out))`: a normal matrix of that std has spectral norm about 1.

    Source: "Beyond MuP 2", initialisation.

    >>> LinearNormal().std((1, 4, 4))
    0.25
    """

    def std(self, shape: tuple[int, ...]) -> float:
        """See above."""
        d_out, d_in = max(1, shape[-2]), max(1, shape[-1])
        return math.sqrt(d_out / d_in) / (math.sqrt(d_in) + math.sqrt(d_out))


@dataclass(frozen=True)
class TransposedConvNormal(LinearNormal):
    """`LinearNormal` for a fan-in of `d_in / stride`, see `TransposedConvSpectral`: its norm is about 1.

    >>> TransposedConvNormal(4).std((1, 4, 4))
    0.5
    """

    stride: int = 1

    def std(self, shape: tuple[int, ...]) -> float:
        """`sqrt(stride)` times the linear one."""
        return super().std(shape) * math.sqrt(self.stride)


@dataclass(frozen=True)
class UnitNormal(NormalInitial):
    """Std 1: the rows of an embedding have RMS 1."""

    def std(self, shape: tuple[int, ...]) -> float:
        """1."""
        return 1.0


@dataclass(frozen=True)
class HeadNormal(NormalInitial):
    """Std `1/d`: the LM head's norm is about 1, its initial logits shrink as `1/sqrt(d)`.

    Source: "Beyond MuP 3", LM head (its table gives the variance).
    """

    def std(self, shape: tuple[int, ...]) -> float:
        """`1/d`."""
        return 1 / max(1, shape[-1])


@dataclass(frozen=True)
class Fill(Initial):
    """One value: 1 for gains, 0 for biases."""

    value: float

    def describe(self, shape: tuple[int, ...]) -> str:
        """The value."""
        return f"{self.value:g}"

    def fill_(self, block: Tensor, generator: torch.Generator) -> None:
        """The value everywhere."""
        block.fill_(self.value)


@dataclass(frozen=True)
class AsBuilt(Initial):
    """The value that the model's constructor gave it."""

    def describe(self, shape: tuple[int, ...]) -> str:
        """As built."""
        return "as built"

    def fill_(self, block: Tensor, generator: torch.Generator) -> None:
        """Nothing."""


def generator_for(name: str, seed: int) -> torch.Generator:
    """A CPU generator that depends on the parameter's name and the seed only, not on the order of parameters."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
