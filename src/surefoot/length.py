"""The length of a training run, and what follows from it: the learning rate's law, and its schedule. Without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR

WARMUP = 0.1
"""First part of the steps, over which the rate rises."""


@final
@dataclass(frozen=True)
class Run:
    """The length of a training run, from which a recipe with a law has its learning rate and its decay.

    Args:
        steps: optimizer steps of the whole run.
        tokens: tokens (pictures, rows) whose losses a step averages, of all processes and accumulated passes together.

    Raises:
        ValueError: a number that is no positive whole number.

    >>> Run(steps=1000, tokens=32 * 1024)
    Run(steps=1000, tokens=32768)
    """

    steps: int
    tokens: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} of a run is a positive whole number, not {value!r}")

    def factor(self, step: int) -> float:
        """Factor on the peak rate at a step: up linearly over a tenth of the steps, then down linearly to 0.

        Args:
            step: 0 for the first; `steps` and more have the factor 0.

        Returns:
            A number from 0 to 1.

        >>> [round(Run(10, 1).factor(step), 2) for step in (0, 1, 5, 10)]
        [1.0, 1.0, 0.56, 0.0]
        """
        rise = round(WARMUP * self.steps)
        return (step + 1) / rise if step < rise else max(0.0, (self.steps - step) / max(1, self.steps - rise))

    def schedule(self, optimizer: Optimizer) -> LambdaLR:
        """The schedule that the laws were fitted under, see `factor`; call its `step()` after each of the optimizer's.

        Args:
            optimizer: of torch; its rate is the peak.

        Returns:
            torch's scheduler.
        """
        from torch.optim.lr_scheduler import LambdaLR

        return LambdaLR(optimizer, self.factor)


@final
@dataclass(frozen=True)
class RateLaw:
    """The best peak rate of a run: `rate (steps / 150)^by_steps (tokens / 1024)^by_tokens`, at every width and depth.

    Args:
        log2_rate: log2 of the rate for 150 steps of 1024 tokens.
        by_steps: power of the steps.
        by_tokens: power of the tokens of a step.

    Source: fitted to the best rates of studies/sizes, see docs/transfer.md.

    >>> round(RateLaw(-3.0, -0.5, 0.5)(Run(600, 1024)), 4)
    0.0625
    """

    log2_rate: float
    by_steps: float
    by_tokens: float

    def __call__(self, run: Run) -> float:
        """The rate for a run."""
        octaves = self.by_steps * math.log2(run.steps / 150) + self.by_tokens * math.log2(run.tokens / 1024)
        return float(2.0 ** (self.log2_rate + octaves))


_STEADY = RateLaw(-3.2, -0.28, 0.27)
LAWS: Mapping[str, RateLaw] = MappingProxyType({"steady": _STEADY, "steady_bounded": _STEADY})
"""The laws of the recipes that have one, by name."""
