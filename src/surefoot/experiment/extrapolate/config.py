"""What is measured of a learning rate's law: one sweep at one width for each value of an axis."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from surefoot.experiment.extrapolate.axis import AXES, Axis, flag
from surefoot.experiment.sweep.config import SweepConfig
from surefoot.experiment.sweep.search import Bracket, Grid, check_list


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
        ValueError: fewer than two values, one twice, a setting that is the axis's, or what `SweepConfig` refuses.
    """

    recipes: tuple[str, ...]
    axis: str
    values: tuple[int, ...]
    width: int
    seeds: tuple[int, ...]
    search: Grid | Bracket
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        axis = AXES[self.axis]
        check_list(axis.values, self.values)
        object.__setattr__(self, "values", tuple(sorted(self.values)))
        if len(self.values) < 2 or self.values[0] < 1:
            raise ValueError(f"{flag(axis.values)}: a power law needs two values above 0, got {list(self.values)}")
        if axis.setting in self.settings:
            raise ValueError(f"settings must not have {axis.setting}, which {flag(axis.values)} gives")
        for value in self.values:
            self.sweep(value)  # refuses the rest

    def sweep(self, value: int, centres: Mapping[str, float] | None = None) -> SweepConfig:
        """The sweep of one value.

        Args:
            value: of the axis.
            centres: recipe -> log2 rate at which the search starts; those of `search` by default.

        Returns:
            The configuration of an ordinary sweep of one width.
        """
        settings = {**self.settings, AXES[self.axis].setting: value}
        steps = settings.pop("steps")
        search = replace(self.search, centres=centres) if centres and isinstance(self.search, Bracket) else self.search
        return SweepConfig(self.recipes, (self.width,), self.seeds, steps, search, settings)

    def to_json(self) -> dict[str, Any]:
        """The content of `config.json`."""
        shared = self.sweep(self.values[0]).to_json()
        own = {"axis": self.axis, "values": list(self.values), "width": self.width}
        kept = {key: shared[key] for key in ("recipes", "seeds", "search")}
        return {**kept, **own, "settings": dict(self.settings)}


def folder(axis: Axis, value: int) -> str:
    """The name of a value's sub-directory.

    >>> folder(AXES["horizon"], 100)
    'horizon_100'
    """
    return f"{axis.name}_{value}"
