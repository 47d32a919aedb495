"""The learning rate's course over the steps of a run: warm-up, a constant rate, cool-down. Without torch."""

import math
from dataclasses import dataclass, field

from surefoot.experiment.errors import Respell, with_remedy
from surefoot.experiment.training.names import COUNT, FRACTION, Settings

_WARMUP = {"help": "first part of the steps, over which the rate rises linearly", "number": FRACTION}
_COOLDOWN = {
    "help": "last part of the steps, over which the rate falls to 0; 1: all after the warm-up",
    "number": FRACTION,
    "flag": "--cooldown",
    "metavar": "COOLDOWN",
}
_SHAPE = {"help": "how the rate falls: linear, sqrt (1 - sqrt(x)) or power:P ((1 - x)^P)", "metavar": "SHAPE"}


@dataclass(frozen=True)
class Schedule(Settings):
    """The steps of a run, the learning rate's warm-up and cool-down as fractions of them, and the cool-down's shape.

    Raises:
        ValueError: a number out of range, or a shape that is none.
    """

    steps: int = field(default=120, metadata={"help": "optimizer steps of a run", "number": COUNT})
    warmup: float = field(default=0.1, metadata=_WARMUP)
    decay: float = field(default=1.0, metadata=_COOLDOWN)
    cooldown_shape: str = field(default="linear", metadata=_SHAPE)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._fallen(1.0)

    def factor(self, step: int) -> float:
        """Factor on the learning rate at a step: it rises linearly to 1, and in the end falls to 0.

        With x, the part of the cool-down that is over, the factor there is `1 - x` (linear), `1 - sqrt(x)` (sqrt) or
        `(1 - x)^P` (power:P).

        Args:
            step: 0 for the first; `steps` is allowed, and has the factor 0.

        Returns:
            A number from 0 to 1.

        >>> [Schedule(4, warmup=0.5).factor(step) for step in range(5)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
        >>> [Schedule(5, warmup=0.0, decay=0.4).factor(step) for step in range(6)]
        [1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
        >>> [Schedule(5, 0.0, 0.8, "sqrt").factor(step) for step in range(6)]
        [1.0, 1.0, 0.5, 0.2928932188134524, 0.1339745962155614, 0.0]
        >>> [Schedule(5, 0.0, 0.8, "power:2").factor(step) for step in range(6)]
        [1.0, 1.0, 0.5625, 0.25, 0.0625, 0.0]

        Source: A. Hägele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations" (2024),
        section 3: a constant rate, then a cool-down, best by `1 - sqrt(x)`.
        """
        rise = round(self.warmup * self.steps)
        fall = min(self.steps - rise, round(self.decay * self.steps))
        if step < rise:
            return (step + 1) / rise
        return self._fallen(min(1.0, max(0.0, (self.steps - step) / max(1, fall))))

    def _fallen(self, rest: float) -> float:
        """The factor where this part of the cool-down is still to come."""
        name, _, power = self.cooldown_shape.partition(":")
        if self.cooldown_shape == "linear":
            return rest
        if self.cooldown_shape == "sqrt":
            return 1 - math.sqrt(1 - rest)
        try:
            if name == "power" and 0 < float(power) < math.inf:
                return float(rest ** float(power))
        except ValueError:
            pass  # no number
        message = f"cooldown_shape={self.cooldown_shape!r} is unknown; choose linear, sqrt or power:P with P above 0"
        raise with_remedy(ValueError(message), Respell(name, ("linear", "sqrt", "power")))
