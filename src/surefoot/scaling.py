"""How learning rates scale: with a block's shape (as radii do), and with the length of a training run.

The direction of a linear layer is `sqrt(d_out/d_in) msign(G)`; other conventions multiply it by a factor.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsIndex, final

if TYPE_CHECKING:
    from torch.optim import Optimizer, lr_scheduler


class Scale(ABC):
    """A positive factor that depends on a block's shape only.

    >>> class RootFanIn(Scale):
    ...     def __call__(self, shape):
    ...         return shape[-1] ** 0.5
    >>> RootFanIn()((4, 16))
    4.0
    """

    @abstractmethod
    def __call__(self, shape: tuple[int, ...]) -> float:
        """Evaluate the factor.

        Args:
            shape: shape of a block, `(..., d_out, d_in)`.

        Returns:
            A positive number.
        """


@dataclass(frozen=True)
class Constant(Scale):
    """The same factor at every shape.

    Args:
        value: the factor.

    Raises:
        ValueError: a factor that is not positive and finite.

    >>> Constant(16.0)((50257, 768))
    16.0
    """

    value: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.value < math.inf:
            raise ValueError(f"a scale must be positive and finite, not {self.value}")

    def __call__(self, shape: tuple[int, ...]) -> float:
        """The value, at every shape."""
        return self.value


@dataclass(frozen=True)
class Natural(Scale):
    """1: one learning rate for every layer and width (muP's, MOGA's convention).

    >>> Natural()((128, 512))
    1.0
    """

    def __call__(self, shape: tuple[int, ...]) -> float:
        """1 at every shape."""
        return 1.0


@dataclass(frozen=True)
class Keller(Scale):
    """`sqrt(max(1, d_in/d_out))`, so that the step is `lr sqrt(max(1, d_out/d_in)) msign`.

    Source: K. Jordan, "Muon", 2024.

    >>> Keller()((128, 512)), Keller()((512, 128))
    (2.0, 1.0)
    """

    def __call__(self, shape: tuple[int, ...]) -> float:
        """`sqrt(max(1, d_in/d_out))`."""
        d_out, d_in = shape[-2:]
        return math.sqrt(max(1.0, d_in / max(1, d_out)))


@dataclass(frozen=True)
class Moonlight(Scale):
    """`0.2 sqrt(max(d_out, d_in) d_in / d_out)`, so that the step is `0.2 lr sqrt(max(d_out, d_in)) msign`.

    The step's entries have RMS about 0.2 lr, as AdamW's have, so a rate tuned for AdamW can be reused.

    Source: J. Liu et al., "Muon is scalable for LLM training", 2025.

    >>> round(Moonlight()((100, 100)), 6)
    2.0
    """

    def __call__(self, shape: tuple[int, ...]) -> float:
        """`0.2 sqrt(max(d_out, d_in) d_in / d_out)`."""
        d_out, d_in = shape[-2:]
        return 0.2 * math.sqrt(max(1, d_out, d_in) * max(1, d_in) / max(1, d_out))


@dataclass(frozen=True)
class FanIn(Scale):
    """`d_in`: cancels the width factor of `MeanOperator(1, inf)`, for sign methods as published.

    >>> FanIn()((10, 64))
    64.0
    """

    def __call__(self, shape: tuple[int, ...]) -> float:
        """`d_in`."""
        return float(max(1, shape[-1]))


@dataclass(frozen=True)
class FanRatio(Scale):
    """`max(1, d_in/d_out)`, at most `most`: the factor of matrices that narrow, such as an MLP's projection down.

    Entries of a spectral step then have RMS `1/sqrt(min(d_in, d_out))`, the same up and down. The limit is for matrices
    with a side of constant size (classes, a low rank): beyond it their factor is constant.

    Args:
        most: the limit.

    Raises:
        ValueError: a limit below 1.

    >>> FanRatio()((128, 512)), FanRatio()((512, 128)), FanRatio()((10, 4096))
    (4.0, 1.0, 4.0)
    """

    most: float = 4.0

    def __post_init__(self) -> None:
        if not self.most >= 1:
            raise ValueError(f"FanRatio's limit must be at least 1, not {self.most}")

    def __call__(self, shape: tuple[int, ...]) -> float:
        """`min(most, max(1, d_in/d_out))`."""
        return min(self.most, max(1.0, shape[-1] / max(1, shape[-2])))


@dataclass(frozen=True)
class Times(Scale):
    """Another scale times a factor that depends on the model, such as its depth.

    Args:
        factor: on the scale.
        scale: by the shape.

    >>> Times(0.25, FanRatio())((128, 512))
    1.0
    """

    factor: float
    scale: Scale

    def __call__(self, shape: tuple[int, ...]) -> float:
        """`factor * scale(shape)`."""
        return self.factor * self.scale(shape)


@dataclass(frozen=True)
class HeadSize(Scale):
    """`(16 / d_head)^(1/4)`, of heads of queries and keys: how far steps move logits is the same for every `d_head`.

    Steps of norm s in both, together, move `<q, k> / sqrt(d_head)` by up to `s^2 sqrt(d_head)`. Blocks are heads: a
    whole matrix of queries counts as one large head.

    >>> HeadSize()((4, 16, 64)), HeadSize()((2, 256, 512))
    (1.0, 0.5)
    """

    def __call__(self, shape: tuple[int, ...]) -> float:
        """`(16 / d_head)^(1/4)`."""
        return math.sqrt(4 / math.sqrt(max(1, shape[-2])))


@dataclass(frozen=True)
class RootFanIn(Scale):
    """`sqrt(d_in)`: the step under `Frobenius()` then is `lr` times a matrix of RMS 1.

    >>> RootFanIn()((10, 64))
    8.0
    """

    def __call__(self, shape: tuple[int, ...]) -> float:
        """`sqrt(d_in)`."""
        return math.sqrt(max(1, shape[-1]))


@dataclass(frozen=True)
class LongerSide(Scale):
    """`sqrt(max(d_out, d_in))`: the step under `MeanOperator(2, inf)` then has rows of length `max(1, d_out/d_in)**.5`.

    >>> LongerSide()((64, 16))
    8.0
    """

    def __call__(self, shape: tuple[int, ...]) -> float:
        """`sqrt(max(d_out, d_in))`."""
        return math.sqrt(max(1, *shape[-2:]))


@dataclass(frozen=True)
class LogRows(Scale):
    """`log V` of a table `(V, d)`, at least log 2: the unit of LM heads' and routers' radii, which bound logits.

    >>> round(LogRows()((50257, 768)), 3)
    10.825
    """

    def __call__(self, shape: tuple[int, ...]) -> float:
        """`log V`, at least log 2."""
        return math.log(max(2, shape[-2]))


@final
@dataclass(frozen=True)
class Run:
    """The length of a training run: sets the decay, and the learning rate of recipes with a rate law.

    Args:
        steps: optimizer steps of the whole run.
        tokens: tokens (pictures, pixels) whose losses a step averages, over all processes and accumulated passes.

    Raises:
        ValueError: a number that is no positive whole number.

    >>> Run(steps=1000, tokens=32 * 1024)
    Run(steps=1000, tokens=32768)
    """

    steps: int
    tokens: int

    def __post_init__(self) -> None:
        for name, x in vars(self).items():
            if not (isinstance(x, SupportsIndex | float) and x is not True and float(x) % 1 == 0 < float(x)):
                raise ValueError(f"{name} of a run must be a positive integer, not {x!r}")
            object.__setattr__(self, name, int(x))

    def factor(self, step: int) -> float:
        """Factor on the peak rate at a step, counted from 0: linearly up over a tenth of the steps, then down to 0.

        >>> [round(Run(10, 1).factor(step), 2) for step in (0, 1, 5, 10)]
        [1.0, 1.0, 0.56, 0.0]
        """
        if step > self.steps:
            warnings.warn(f"the run of {self.steps:,} steps is over: its rate is 0 from there on", stacklevel=2)
        rise = round(0.1 * self.steps)
        return (step + 1) / rise if step < rise else max(0.0, (self.steps - step) / max(1, self.steps - rise))

    def schedule(self, optimizer: Optimizer) -> lr_scheduler.LambdaLR:
        """torch's scheduler of `factor`, under which the laws were fitted: `step()` it after the optimizer's."""
        from torch.optim.lr_scheduler import LambdaLR

        return LambdaLR(optimizer, self.factor)


@final
@dataclass(frozen=True)
class RateLaw:
    """The best peak rate of a run: `2^log2_rate (steps / 150)^by_steps (tokens / 1024)^by_tokens`; 100 steps at least.

    Source: fitted to the best rates of studies/sizes, see docs/transfer.md.

    >>> round(RateLaw(-3.0, -0.5, 0.5)(Run(600, 1024)), 4)
    0.0625
    """

    log2_rate: float
    by_steps: float
    by_tokens: float

    def __call__(self, run: Run) -> float:
        """The rate for a run."""
        octaves = self.by_steps * math.log2(max(100, run.steps) / 150) + self.by_tokens * math.log2(run.tokens / 1024)
        return float(2.0 ** (self.log2_rate + octaves))


LAWS: Mapping[str, RateLaw] = dict.fromkeys(("steady", "steady_bounded"), RateLaw(-3.2, -0.28, 0.27))
"""The rate laws, by recipe name."""
