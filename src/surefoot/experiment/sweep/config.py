"""What a sweep is made of: its configuration, over widths or over an axis, its trials, their results."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from surefoot.experiment.files import dumps
from surefoot.experiment.sweep.axis import AXES, flag
from surefoot.experiment.sweep.search import Bracket, Grid, Own, check_list


@dataclass(frozen=True)
class SweepConfig:
    """What a sweep measures. A run directory belongs to one configuration.

    Args:
        recipes: names of methods.
        widths: model widths, in any order.
        seeds: every rate is run with each of them.
        steps: optimizer steps of a trial.
        search: which learning rates are run.
        settings: JSON values that every trial gets: whatever else changes the results (depth, batch size, the corpus'
            hash), and nothing that does not (the number of workers).

    Raises:
        ValueError: an empty list, or a value twice in one.
    """

    recipes: tuple[str, ...]
    widths: tuple[int, ...]
    seeds: tuple[int, ...]
    steps: int
    search: Grid | Own | Bracket
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("recipes", "widths", "seeds"):
            check_list(name, getattr(self, name))
        object.__setattr__(self, "widths", tuple(sorted(self.widths)))

    def to_json(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        search = {"kind": type(self.search).__name__.lower(), **asdict(self.search)}
        return json.loads(dumps({**asdict(self), "search": search}))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Extrapolation:
    """All that determines the runs of sweeps over an axis. A run directory belongs to one.

    Args:
        recipes: names of methods.
        axis: a name of `AXES`.
        values: of the axis, at least two, in any order.
        width: of all models.
        seeds: every rate is run with each of them, at every value.
        search: of the first value's learning rates; at the others a `Bracket` starts where the value before has its
            optimum.
        settings: those of `SweepConfig`, and "steps", without the one that the axis gives.

    Raises:
        ValueError: fewer than two values, one twice, or what `SweepConfig` refuses.
    """

    recipes: tuple[str, ...]
    axis: str
    values: tuple[int, ...]
    width: int
    seeds: tuple[int, ...]
    search: Grid | Bracket
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_list(flag(AXES[self.axis].values), self.values, least=2)
        object.__setattr__(self, "values", tuple(sorted(self.values)))
        self.sweep(self.values[0])  # refuses the rest

    def sweep(self, value: int, centres: Mapping[str, float] | None = None) -> SweepConfig:
        """The sweep of one value.

        Args:
            value: of the axis.
            centres: recipe -> log2 rate at which the search starts; those of `search` by default.

        Returns:
            The configuration of an ordinary sweep of one width.
        """
        settings = {**self.settings, AXES[self.axis].setting: value}
        search = replace(self.search, centres=centres) if centres and isinstance(self.search, Bracket) else self.search
        return SweepConfig(self.recipes, (self.width,), self.seeds, settings.pop("steps"), search, settings)

    def to_json(self) -> dict[str, Any]:
        """The content of `config.json`."""
        shared = self.sweep(self.values[0]).to_json()
        own = {"axis": self.axis, "values": list(self.values), "width": self.width}
        kept = {key: shared[key] for key in ("recipes", "seeds", "search")}
        return {**kept, **own, "settings": dict(self.settings)}


@dataclass(frozen=True)
class Trial:
    """One run of a sweep, as a worker process receives it.

    Args:
        recipe: name of a method.
        width: model width.
        log2_lr: log2 of the learning rate.
        seed: of initial weights and data order.
        steps: optimizer steps.
        settings: those of the sweep.
    """

    recipe: str
    width: int
    log2_lr: float
    seed: int
    steps: int
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False)

    def __str__(self) -> str:
        return f"{self.recipe}, width {self.width}, lr 2^{self.log2_lr:g}, seed {self.seed}"


@dataclass(frozen=True)
class TrialResult:
    """The outcome of a trial.

    Args:
        train_loss: in nats per token; None, NaN or infinite if the trial diverged.
        val_loss: likewise.
        seconds: wall time of the training.
        diverged: whether it diverged; a loss that is not finite says so too.
        facts: JSON values of a study's own.
        not_finite: of a run that diverged, the first parameter with an entry of weight or gradient that is not finite.
    """

    train_loss: float | None
    val_loss: float | None
    seconds: float
    diverged: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    not_finite: str | None = None
