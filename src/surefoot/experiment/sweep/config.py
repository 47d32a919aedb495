"""Configurations of sweeps: over widths, an axis, a ladder, for a comparison; trials, results. No torch, no numpy."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from surefoot.experiment.sweep.axis import AXES, flag
from surefoot.experiment.sweep.search import Bracket, Exact, Grid, Own, check_list
from surefoot.experiment.training.names import centre, parse_at
from surefoot.scaling import Run


@dataclass(frozen=True)
class Configuration:
    """Base class of the settings that determine the runs of a directory."""

    def to_json(self) -> dict[str, Any]:
        """The content of `config.json` without the kind of run; a search has its own kind in it."""
        values = asdict(self)
        if "search" in values:
            values["search"] = {"kind": type(vars(self)["search"]).__name__.lower(), **values["search"]}
        return json.loads(json.dumps(values, allow_nan=False))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class SweepConfig(Configuration):
    """What a sweep measures; a run directory belongs to one configuration.

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


@dataclass(frozen=True)
class Extrapolation(Configuration):
    """All that determines the runs of sweeps over an axis. A run directory belongs to one.

    Args:
        recipes: names of methods.
        seeds: every rate is run with each of them, at every value.
        search: of the first value's learning rates; at the others a `Bracket` starts where the value before has its
            optimum.
        axis: a name of `AXES`.
        values: of the axis, at least two, in any order.
        width: of all models.
        settings: as in `SweepConfig`, and "steps", but without the setting that the axis gives.

    Raises:
        ValueError: fewer than two values, one twice, or what `SweepConfig` refuses.
    """

    recipes: tuple[str, ...]
    seeds: tuple[int, ...]
    search: Grid | Bracket
    axis: str
    values: tuple[int, ...]
    width: int
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


@dataclass(frozen=True)
class Rung:
    """A size of the ladder, and its run.

    Args:
        width: of the model.
        parameters: of the model.
        steps: optimizer steps.
        log2_lr: log2 of the learning rate.
    """

    width: int
    parameters: int
    steps: int
    log2_lr: float


@dataclass(frozen=True)
class Ladder(Configuration):
    """All that determines the runs of a ladder but its target. A run directory belongs to one.

    Args:
        recipe: name of a method.
        rungs: in any order.
        tokens_per_parameter: from which the steps follow.
        seeds: each rung is run with all of them, the target with the first.
        settings: those of `SweepConfig`.

    Raises:
        ValueError: fewer than three rungs, or one twice.
    """

    recipe: str
    rungs: tuple[Rung, ...]
    tokens_per_parameter: float
    seeds: tuple[int, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rungs", tuple(sorted(self.rungs, key=lambda rung: rung.width)))
        check_list("--widths, for a curve of three numbers,", self.widths, least=3)

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths, ascending."""
        return tuple(rung.width for rung in self.rungs)

    def sweep(self, rung: Rung, seeds: int) -> SweepConfig:
        """The runs of a rung with the first of the seeds, as a sweep of one rate."""
        search = Grid((rung.log2_lr,))
        return SweepConfig((self.recipe,), (rung.width,), self.seeds[:seeds], rung.steps, search, self.settings)


@dataclass(frozen=True)
class Comparison(Configuration):
    """All that determines the runs of a comparison. A run directory belongs to one.

    Args:
        recipes: names of methods, whose rates are tuned.
        published: methods at a rate that is not tuned, `muon@0.02`.
        width: of the model.
        steps: optimizer steps of a run.
        rates_per_recipe: the exact number of learning rates that each recipe is tuned with.
        tuning_seeds: every rate is run with so many, from 0.
        seeds: of the final runs, those after the tuning seeds.
        evaluations: of the validation loss during a final run, at most.
        settings: as `SweepConfig` has them.

    Raises:
        ValueError: a recipe or a published setting twice, one that is unknown, or too few rates or tuning seeds.
    """

    recipes: tuple[str, ...]
    published: tuple[str, ...]
    width: int
    steps: int
    rates_per_recipe: int
    tuning_seeds: int
    seeds: int
    evaluations: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_list("recipes and published settings", self.names)
        for text in self.published:
            parse_at(text)
        self.tuning()  # refuses the rest

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Comparison":
        """The comparison of a `config.json`."""
        recipes, published = tuple(config["recipes"]), tuple(config["published"])
        return cls(**{**config, "recipes": recipes, "published": published})

    @property
    def names(self) -> tuple[str, ...]:
        """The participants: the tuned recipes, then the published settings."""
        return self.recipes + self.published

    @property
    def tuning_runs(self) -> int:
        """How many runs each recipe is tuned with."""
        return self.rates_per_recipe * self.tuning_seeds

    def tuning(self) -> SweepConfig:
        """The sweep of the first stage."""
        # Where a search starts is the same choice for all: the method's own usual rate, or that of its law.
        run = Run(self.steps, self.settings.get("batch_size", 16) * self.settings.get("context", 64))
        search = Exact({recipe: centre(recipe, run) for recipe in self.recipes}, self.rates_per_recipe)
        seeds = tuple(range(self.tuning_seeds))
        return SweepConfig(self.recipes, (self.width,), seeds, self.steps, search, self.settings)

    def final(self, rates: Mapping[str, float]) -> SweepConfig:
        """The sweep of the second stage.

        Args:
            rates: log2 of the learning rate, by the names of participants that have one.

        Returns:
            The sweep; a method that is tuned as well as published has both rates.
        """
        chosen = [(self.method(name), rate) for name, rate in rates.items()]
        own = {method: tuple(sorted({rate for other, rate in chosen if other == method})) for method, _ in chosen}
        seeds = tuple(range(self.tuning_seeds, self.tuning_seeds + self.seeds))  # none of them used in tuning
        settings = {**self.settings, "evaluations": self.evaluations}
        return SweepConfig(tuple(own), (self.width,), seeds, self.steps, Own(own), settings)

    def method(self, name: str) -> str:
        """The method of a participant."""
        return parse_at(name)[0] if name in self.published else name


@dataclass(frozen=True)
class Question:
    """What is asked of a comparison's runs; another question needs no other runs.

    Args:
        baseline: name of the participant that the others are compared with.
        target: the loss in nats to which steps and time are counted; None for the baseline's mean final loss.
    """

    baseline: str
    target: float | None = None

    def check(self, comparison: Comparison) -> None:
        """Raise ValueError if the baseline takes no part."""
        if self.baseline not in comparison.names:
            names = ", ".join(comparison.names)
            raise ValueError(f"baseline {self.baseline} is not compared: add it to --recipes, or choose one of {names}")


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
