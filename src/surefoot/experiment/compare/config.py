"""What a comparison consists of: who takes part, the runs of both stages, the question that is asked of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from surefoot.experiment.sweep.config import Configuration, SweepConfig
from surefoot.experiment.sweep.search import Exact, Own, check_list
from surefoot.experiment.training.names import centre, parse_at
from surefoot.scaling import Run


@dataclass(frozen=True)
class Comparison(Configuration):
    """All that determines the runs of a comparison. A run directory belongs to one.

    Args:
        recipes: names of methods, whose rates are tuned.
        published: methods at a rate that is not tuned, `muon@0.02`.
        width: of the model.
        steps: optimizer steps of a run.
        rates_per_recipe: how many learning rates each recipe is tuned with: exactly so many.
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
        """Those who take part: the tuned recipes, then the published settings."""
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
            rates: log2 of the learning rate, by the names of those who have one.

        Returns:
            The sweep; a method that is tuned as well as published has both rates.
        """
        chosen = [(self.method(name), rate) for name, rate in rates.items()]
        own = {method: tuple(sorted({rate for other, rate in chosen if other == method})) for method, _ in chosen}
        seeds = tuple(range(self.tuning_seeds, self.tuning_seeds + self.seeds))  # none of them used in tuning
        settings = {**self.settings, "evaluations": self.evaluations}
        return SweepConfig(tuple(own), (self.width,), seeds, self.steps, Own(own), settings)

    def method(self, name: str) -> str:
        """The method of one who takes part."""
        return parse_at(name)[0] if name in self.published else name


@dataclass(frozen=True)
class Question:
    """What is asked of a comparison's runs; another one needs no other runs.

    Args:
        baseline: name of the one that the others are compared with.
        target: the loss in nats to which steps and time are counted; None for the baseline's mean final loss.
    """

    baseline: str
    target: float | None = None

    def check(self, comparison: Comparison) -> None:
        """Raise ValueError if the baseline takes no part."""
        if self.baseline not in comparison.names:
            names = ", ".join(comparison.names)
            raise ValueError(f"baseline {self.baseline} takes no part: add it to --recipes, or choose one of {names}")
