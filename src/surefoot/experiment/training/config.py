"""What determines a training run: each setting is declared once, as a field whose metadata is its option.

The command line makes its options of them (`surefoot.cli.options.add`); a field that is not declared by `setting` has
an option of the command line's own. Nothing here imports torch, so that `--help` is quick.
"""

import dataclasses
import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, get_args

from surefoot.experiment.errors import Respell, with_remedy
from surefoot.experiment.models.sizes import PUBLISHED, published_name, refuse_other
from surefoot.experiment.training.names import AUTO, AVERAGE, COUNT, FRACTION, RATE, SEED, Settings, log2_lr, setting
from surefoot.scaling import Run

Device = Literal["cpu", "cuda", "auto"]
Autocast = Literal["none", "bfloat16"]
DataOrder = Literal["documents", "random"]


_SIZE = {"width": 64, "depth": 2, "head_dim": 16}


def _size(name: str, what: str) -> Any:
    """Declare a size; None becomes a published model's, else that of `_SIZE`."""
    return setting(None, f"{what} (default: {_SIZE[name]}, or the published model's)", COUNT)


@dataclass(frozen=True)
class Architecture(Settings):
    """The model: a reference or a published model and its size, or `module:function`, called with the width.

    Raises:
        ValueError: a number below 1, or a depth or a head dimension that is not the published model's.
    """

    model: str = setting("gpt", "name of a model, or module:function that takes a width")
    width: int = _size("width", "model width")
    depth: int = _size("depth", "blocks of a reference model")
    head_dim: int = _size("head_dim", "dimension of an attention head")

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", published_name(self.model))
        if self.model in PUBLISHED:
            refuse_other(self.model, depth=self.depth, head_dim=self.head_dim)
        sizes = vars(PUBLISHED[self.model]) if self.model in PUBLISHED else _SIZE
        for name in _SIZE:
            if getattr(self, name) is None:
                object.__setattr__(self, name, sizes[name])
        super().__post_init__()


@dataclass(frozen=True)
class Optimisation(Settings):
    """The optimizer, its bound on the weights (`name:value` of `methods.STABILISERS`), its peak learning rate.

    And an average of the weights, by its decay or as "last:PART" of the steps, which does not change the training.
    """

    method: str = "steady"
    stabiliser: str | None = setting(
        None,
        "bound on the weights of every role, post_clip:2 or pre_decay:0.5 for example (default: the recipe's own)",
        metavar="NAME:VALUE",
    )
    lr: float = setting(AUTO, "peak learning rate, or auto: by the length of the run, or the method's own", RATE)
    average: float | str = setting(
        0.0,
        "also average the weights, with this decay (0.99, 0.999) or over the last part of the steps (last:0.2), "
        "and evaluate the average; 0: no average",
        AVERAGE,
        metavar="DECAY|last:PART",
    )


@dataclass(frozen=True)
class Schedule(Settings):
    """The steps of a run, the learning rate's warm-up and cool-down as fractions of them, and the cool-down's shape.

    Raises:
        ValueError: a number out of range, or an unknown shape.
    """

    steps: int = setting(120, "optimizer steps of a run", COUNT)
    warmup: float = setting(0.1, "first fraction of the steps, over which the rate rises linearly", FRACTION)
    decay: float = setting(
        1.0,
        "last fraction of the steps, over which the rate falls to 0; 1: all after the warm-up",
        FRACTION,
        flag="--cooldown",
        metavar="COOLDOWN",
    )
    cooldown_shape: str = setting(
        "linear", "how the rate falls: linear, sqrt (1 - sqrt(x)) or power:P ((1 - x)^P)", metavar="SHAPE"
    )

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
        """The factor on the learning rate where this part of the cool-down is still to come."""
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


@dataclass(frozen=True)
class TrainConfig(Schedule, Optimisation, Architecture):
    """Everything that determines a run: its bases' settings, a batch's shape, the order of the training data, the
    device ("auto": a GPU where there is one), the dtype of the forward pass, and the seed.

    Raises:
        ValueError: a number out of range or an unknown choice.

    >>> TrainConfig(width=128, steps=10).replace(seed=1).width
    128
    """

    batch_size: int = setting(16, "sequences a step", COUNT)
    context: int = setting(64, "tokens a sequence", COUNT)
    data_order: DataOrder = setting(
        "documents",
        "documents: each is read once before one is read again, in a random order; random: windows are drawn anew at "
        "every step",
        choices=get_args(DataOrder),
    )
    device: Device = setting("cpu", "where to train", choices=get_args(Device))
    autocast: Autocast = setting(
        "none",
        "dtype of products in the forward pass (CPU: large layers'); weights and loss stay float32",
        choices=get_args(Autocast),
    )
    seed: int = setting(0, "seed of initial weights and data order", SEED)

    def __post_init__(self) -> None:
        super().__post_init__()
        if vars(self)["lr"] == AUTO:  # which its type does not have
            object.__setattr__(self, "lr", 2.0 ** log2_lr(self.method, self.run))

    @property
    def run(self) -> Run:
        """The length of the run."""
        return Run(self.steps, self.batch_size * self.context)

    def replace(self, **settings: Any) -> Self:
        """The same configuration with other values of some settings.

        Args:
            **settings: values by the settings' names.

        Returns:
            The new configuration.

        Raises:
            TypeError: a name that is not a setting's.
            ValueError: a number out of range or an unknown choice.
        """
        return dataclasses.replace(self, **settings)

    def to_json(self) -> dict[str, Any]:
        """The settings by their names, as `config.json` and checkpoints have them."""
        return asdict(self)
