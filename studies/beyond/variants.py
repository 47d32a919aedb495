"""What is measured: a base, tuned Muon or the default, and parts on top of it, as in `steady+rows+power`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import surefoot as sf
from surefoot.experiment.training.methods import Method, Steepest, moonlight_tuned
from surefoot.recipes import Recipe, steady

HIDDEN, TABLES = ("linear", "heads"), ("embedding", "head")

Change = Callable[[sf.Role, int], sf.Role]
"""From a role, and the steps of the run, to another."""


@dataclass(frozen=True)
class Part:
    """One part: what it changes of the roles of these kinds, and settings of the run.

    A part that `moves` the best rate is searched for its own, from `shift` octaves beside the base's centre; others are
    run at the base's two best rates: those that leave the length of a step as it is, or change it late or rarely.
    """

    change: Change | None = None
    kinds: tuple[str, ...] = HIDDEN
    settings: Mapping[str, Any] = field(default_factory=dict)
    moves: bool = True
    shift: float = 0.0


def whitened(role: sf.Role, steps: int) -> sf.Role:
    """Shampoo's two factors around the momentum."""
    momentum = role.momentum
    assert isinstance(momentum, sf.Momentum)
    return replace(role, momentum=sf.contrib.Whitened(momentum.beta, momentum.lookahead))


def soap(every: int, sides: Literal["both", "shorter"] = "both") -> Change:
    """SOAP's division around the momentum."""
    return lambda role, steps: replace(role, momentum=sf.SOAP(role.momentum, every=every, sides=sides))


def followed(ends: float, middle: float) -> Change:
    """Momentum whose `1 - beta` is that of the base times `ends`, from 10 to 92 % of the steps times `middle`.

    The look-ahead stays the same part of beta.
    """

    def change(role: sf.Role, steps: int) -> sf.Role:
        momentum = role.momentum
        assert isinstance(momentum, sf.Momentum)
        beta, ahead = momentum.beta, momentum.beta if momentum.lookahead is None else momentum.lookahead

        def pair(factor: float) -> sf.Momentum:
            other = 1 - factor * (1 - beta)
            return sf.Momentum(other, ahead * other / beta)

        times = (0, round(0.1 * steps), round(0.92 * steps), steps)
        pairs = (pair(ends), pair(middle), pair(middle), pair(ends))
        return replace(role, momentum=sf.contrib.ScheduledMomentum(tuple(zip(times, pairs, strict=True))))

    return change


def turned(make: Callable[[sf.Geometry], sf.Geometry]) -> Change:
    """Another direction under the same norm."""
    return lambda role, steps: replace(role, geometry=make(role.geometry), weight_norm=role.weight_geometry)


def smoothed(momentum: sf.Momentum | sf.RowAdam | sf.Adam, louder: float = 1.0) -> Change:
    """Another momentum of tables, and a factor on the rate of those whose norm is a head's."""

    def change(role: sf.Role, steps: int) -> sf.Role:
        scale = sf.Constant(role.lr_scale((1, 1, 1)) * (louder if role.name == "head" else 1.0))
        decay = role.stabiliser
        assert isinstance(decay, sf.DecoupledWeightDecay)
        return replace(role, momentum=momentum, lr_scale=scale, stabiliser=replace(decay, lr_scale=scale))

    return change


def kept(stabiliser: sf.Stabiliser, factor: float = 1.0) -> Change:
    """A stabiliser in place of the decay, and a factor on the rate in place of the role's own."""
    return lambda role, steps: replace(role, stabiliser=stabiliser, lr_scale=sf.Constant(factor))


def cautious(role: sf.Role, steps: int) -> sf.Role:
    """Twice the base's decay, of those entries alone that the step makes smaller: about half of them."""
    decay = role.stabiliser
    assert isinstance(decay, sf.DecoupledWeightDecay)
    return replace(
        role, stabiliser=sf.contrib.CautiousDecay(2 * decay.rate), radius_unit=decay.lr_scale
    )  # rate / lr_scale


PARTS = {
    "whitened": Part(whitened),
    "soap": Part(soap(1)),
    "soap5": Part(soap(5)),
    "soap10": Part(soap(10)),
    "soap10_linear": Part(soap(10), ("linear",)),
    "soap10_short": Part(soap(10, "shorter")),
    "soap_short": Part(soap(1, "shorter")),
    "rows": Part(turned(sf.NormalisedRows)),
    "brake": Part(turned(sf.contrib.RadialBrake), moves=False),
    "floor": Part(turned(lambda norm: sf.contrib.UpdateFloor(norm, 0.15)), moves=False),
    "hyperball": Part(kept(sf.Hyperball())),
    "frobenius": Part(kept(sf.Normalise(norm=sf.Frobenius()))),
    "sphere": Part(kept(sf.SpectralSphere(2.0))),
    "ahead": Part(turned(sf.contrib.MeanLookahead)),
    "ahead_all": Part(turned(sf.contrib.MeanLookahead), (*HIDDEN, *TABLES)),
    "warm": Part(followed(2.0, 1.0), moves=False),
    "heavy": Part(followed(1.0, 0.5)),
    "cautious": Part(cautious, moves=False),
    "entries": Part(smoothed(sf.Adam(0.9, 0.98)), TABLES),
    "entries_louder": Part(smoothed(sf.Adam(0.9, 0.98), 2.0), TABLES),
    "long": Part(smoothed(sf.RowAdam(0.9, 0.995)), TABLES),
    "power": Part(settings={"decay": 0.8, "cooldown_shape": "power:1.2"}, moves=False),
}
"""Every part by its name."""

BASES: dict[str, tuple[Callable[[], Recipe], dict[int, float]]] = {
    "muon": (moonlight_tuned, {64: -3.75, 128: -4.25}),
    "steady": (steady, {64: -3.25, 128: -3.25}),
}
"""Recipes, and by width the log2 rates around which searches start: near the optima that studies/confirm found."""

MORE = (
    "soap5",
    "soap10",
    "soap10_linear",
    "soap10_short",
    "frobenius",
    "heavy",
    "ahead_all",
    "entries",
    "entries_louder",
    "long",
)
"""Parts that are another form of one: screened by name alone."""
SCREEN = tuple("+".join(filter(None, (base, part))) for base in BASES for part in ("", *PARTS) if part not in MORE)


@dataclass(frozen=True)
class Way:
    """A base with parts: how it trains, and where its best rate is looked for."""

    name: str

    def __post_init__(self) -> None:
        if self.base not in BASES or any(part not in PARTS for part in self.parts):
            choices = f"a base is one of {', '.join(BASES)}, a part one of {', '.join(PARTS)}"
            raise ValueError(f"{self.name!r} is no base with parts, as in steady+rows+power: {choices}")

    @property
    def base(self) -> str:
        """The name of the base."""
        return self.name.split("+")[0]

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts, in the order in which they change the roles."""
        return tuple(self.name.split("+")[1:])

    def method(self, steps: int) -> Method:
        """Initial values and optimizer of a run of so many steps."""
        recipe = BASES[self.base][0]()
        table = dict(recipe.table)
        for part in (PARTS[name] for name in self.parts):
            for kind in part.kinds if part.change else ():
                if kind in table:
                    table[kind] = part.change(table[kind], steps)
        return Steepest(Recipe(self.name, table))

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the run."""
        return {key: value for name in self.parts for key, value in PARTS[name].settings.items()}

    @property
    def moves(self) -> bool:
        """Whether it has a search of its own."""
        return not self.parts or any(PARTS[part].moves for part in self.parts)

    def centre(self, width: int) -> float:
        """The log2 rate where the search starts."""
        return BASES[self.base][1][width] + sum(PARTS[name].shift for name in self.parts)
