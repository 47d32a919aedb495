"""The default against the strongest rival that we know: curves on fresh seeds, and paired final runs.

    python studies/confirm/run.py             # what is missing; resumes, some two hours on 2 cores
    python studies/confirm/run.py curves      # one of the parts named below
    python studies/confirm/run.py --list      # what is finished and what is not

150 steps of the demo's model and text, as in the transfer study. The parts:

- `curves`: quarter octaves around the optimum of the default and of tuned Muon at widths 32 to 256; `wide`: of the
  default at 512 and 1024; `long`: of the default after 1,600 steps; `sooner`: of today's default at widths 32 to 1024
  (all else was run before decision 31, by which queries and keys forget sooner than others).
- `paired`: both at width 256, at the best rate of their own curve there and at that of width 32, on eight other seeds.
- `bounded`, `paired_bounded`: curves and paired runs again for the default under `PostClip(2)`; `roles`: which matrices
  pay for it.
- `others`: a second text, a tied head, experts, LLaMA's shapes.
- `rivals`: the other families of `studies/search`, with the settings that it found, at widths 64 and 256.

`python studies/report.py` makes the tables in docs/transfer.md.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from surefoot import recipes
from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.data.sources import load
from surefoot.experiment.sweep import fit, sweep
from surefoot.experiment.sweep.config import SweepConfig, Trial, TrialResult
from surefoot.experiment.sweep.search import Grid
from surefoot.experiment.sweep.summary import points
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train
from surefoot.experiment.training.methods import Method, Steepest, method
from surefoot.stabilise import Free, PostClip

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "search"))  # of its own, families and winners

STEPS = 150
WORDNET = "/usr/share/wordnet"  # Debian's package wordnet-base
WIDTHS = (32, 64, 128, 256)
SEEDS: dict[str, dict[int, tuple[int, ...]]] = {
    "steady": dict.fromkeys(WIDTHS, tuple(range(440, 448))),
    "steady_whole": dict.fromkeys(WIDTHS, tuple(range(400, 408))),
    "moonlight_tuned": {width: tuple(range(400, 400 + n)) for width, n in zip(WIDTHS, (8, 8, 5, 3), strict=True)},
}
"""Of the curves. `steady_whole` is the default without a norm for each head, which was read first and then changed."""
PAIRED = tuple(range(460, 468))
CENTRES = {
    "steady": dict.fromkeys(WIDTHS, -3.0),
    "steady_whole": dict.fromkeys(WIDTHS, -3.0),
    "moonlight_tuned": {32: -3.25, 64: -3.75, 128: -4.25, 256: -5.0},
}
"""Around which the quarter octaves lie: where the search, or a narrower width, left the optimum."""
BOUND = "post_clip:2"
QUARTERS = tuple(0.25 * k for k in range(-3, 4))
HIDDEN, TABLES = ("linear", "heads", "conv"), ("embedding", "head")
ROLES: dict[str, dict[str, tuple[str, ...]]] = {
    "steady": {},
    "no_decay": {"free": (*HIDDEN, *TABLES)},
    "clip_all": {"clip": (*HIDDEN, *TABLES, "gain", "bias", "scalar")},
    "clip_hidden": {"clip": HIDDEN},
    "clip_tables": {"clip": TABLES},
    "clip_factors": {"clip": TABLES, "factor": HIDDEN},
}
"""Which roles of the default have another stabiliser: none, `PostClip(2)`, or it in units of the step's factor."""
WIDE = {512: (440, 441, 442), 1024: (440,)}
"""Seeds of the widths beyond the curves, which take a minute and four a run."""
SOONER = dict.fromkeys((32, 64), tuple(range(440, 448))) | dict.fromkeys((128, 256), (440, 441, 442))
SOONER |= {512: (440,), 1024: (440,)}
"""Seeds of the default since decision 31: of those that the curves and the widths beyond them had."""
LONG = 1600
"""Steps of the long curves."""
RIVAL_SEEDS = (400, 401, 402)
RIVALS = ("moga_row", "moga_column", "scion", "adamw", "mup_adamw")
OTHERS: dict[str, tuple[Mapping[str, Any], float, float]] = {
    "wordnet": ({"data": WORDNET}, -4.75, -2.25),
    "tied": ({"model": "tied"}, -4.25, -1.75),
    "experts": ({"model": "moe"}, -4.0, -2.0),
    "llama": ({"model": "llama"}, -4.0, -2.0),
}
"""Conditions, each with its lowest and highest rate; quarter octaves between."""


@dataclass(frozen=True)
class Part:
    """One recipe at one width under one condition; `settings` are fields of `TrainConfig`, and "data"."""

    recipe: str
    width: int
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    label: str = "curve"
    settings: Mapping[str, Any] = field(default_factory=dict)
    steps: int = STEPS

    @property
    def directory(self) -> Path:
        """Directory of its results."""
        return HERE / f"{self.recipe.replace(':', '_')}_{self.label}_{self.width}"

    @property
    def finished(self) -> bool:
        """Whether all of it was run."""
        return (self.directory / "summary.json").exists()

    def measure(self) -> None:
        """Run what is missing."""
        config = SweepConfig((self.recipe,), (self.width,), self.seeds, self.steps, Grid(self.rates), self.settings)
        sweep.run(config, self.directory, run_trial)
        best = self.optimum()
        print(f"{self.directory.name}: {best.status} {best.log2_lr} {best.interval} {best.best_loss}", flush=True)

    def points(self) -> list[fit.Point]:
        """Its finished runs."""
        return points(sweep.load(self.directory)[1], self.recipe, self.width)

    def optimum(self) -> fit.Optimum:
        """The vertex of its curve."""
        return fit.optimum(self.points())


def around(centre: float, shifts: tuple[float, ...] = QUARTERS) -> tuple[float, ...]:
    """Rates around a centre."""
    return tuple(centre + shift for shift in shifts)


def curve(recipe: str, width: int, bound: str | None = None) -> Part:
    """One recipe's curve at one width."""
    settings = {"stabiliser": bound} if bound else {}
    label = "bounded" if bound else "curve"
    return Part(recipe, width, around(CENTRES[recipe][width]), SEEDS[recipe][width], label, settings)


def paired(recipe: str, bound: str | None = None) -> Part:
    """At width 256 the best rate of the curve there and that of width 32, to a sixteenth of an octave."""
    best = [curve(recipe, width, bound).optimum().log2_lr for width in (256, 32)]
    assert None not in best, f"{recipe} has a curve without a vertex"
    settings = {"stabiliser": bound} if bound else {}
    rates = tuple(dict.fromkeys(round(16 * rate) / 16 for rate in best if rate is not None))
    return Part(recipe, 256, rates, PAIRED, "paired_bounded" if bound else "paired", settings)


def others(name: str) -> list[Part]:
    """The default under another condition."""
    settings, lowest, highest = OTHERS[name]
    rates = tuple(lowest + 0.25 * k for k in range(round(4 * (highest - lowest)) + 1))
    return [Part("steady", width, rates, (440, 441, 442), name, settings) for width in (32, 64, 128)]


def roles() -> list[Part]:
    """The default with another stabiliser on some roles, at width 64."""
    return [Part(name, 64, (-3.25, -3.0), tuple(range(440, 448)), "roles") for name in ROLES]


def clipped(name: str) -> Method:
    """The default with the stabilisers of `ROLES`."""
    table = dict(recipes.steady().table)
    for how, kinds in ROLES[name].items():
        scheme = Free() if how == "free" else PostClip(float(BOUND.split(":")[1]))
        for kind in kinds:
            table[kind] = replace(table[kind], stabiliser=scheme)
            if how == "factor":
                table[kind] = replace(table[kind], radius_unit=table[kind].lr_scale)
    return Steepest(recipes.Recipe(name, table))


def rival(name: str) -> list[Part]:
    """A family's winner at the search's width and at the widest: half octaves around its rate, or further down."""
    from winners import winner

    if name == "steady":
        return [Part(name, width, around(-3.0, (-0.5, -0.25, 0.0, 0.25)), RIVAL_SEEDS, "rival") for width in (64, 256)]
    lr = winner(name)["lr"]
    falls = {"adamw": 1.0}.get(name, 0.0)  # octaves a doubling of the width
    return [
        Part(f"search:{name}", width, around(lr - falls * doublings, (-1.0, -0.5, 0.0, 0.5)), RIVAL_SEEDS, "rival")
        for width, doublings in ((64, 0), (256, 2))
    ]


def parts(name: str) -> list[Part]:
    """The parts of a name, those with the most work first."""
    widths = sorted(WIDTHS, reverse=True)
    if name == "curves":
        return [curve(recipe, width) for width in widths for recipe in CENTRES]
    shifts = (-0.5, -0.25, 0.0, 0.25, 0.5)
    if name == "wide":
        return [Part("steady", width, around(-3.0, shifts), seeds) for width, seeds in WIDE.items()]
    if name == "sooner":
        return [Part("steady", width, around(-3.0, shifts), seeds, name) for width, seeds in SOONER.items()]
    if name == "long":
        rates = (-6.0, -5.5, -5.0, -4.5, -4.25, -4.0, -3.5)
        return [Part("steady", width, rates, (440, 441, 442), name, steps=LONG) for width in widths]
    if name == "paired":
        return [paired(recipe) for recipe in ("steady", "moonlight_tuned")]
    if name == "bounded":
        return [curve("steady", width, BOUND) for width in widths]
    if name == "paired_bounded":
        return [paired("steady", BOUND)]
    if name == "roles":
        return roles()
    found = map(rival, ("steady", *RIVALS)) if name == "rivals" else map(others, OTHERS)
    return list(itertools.chain.from_iterable(found))


NAMES = ("curves", "wide", "long", "sooner", "paired", "others", "bounded", "paired_bounded", "roles", "rivals")


def chosen(recipe: str) -> Method:
    """A method by its name, or `search:` and a family: the winner of its search."""
    if recipe == "steady_whole":
        return Steepest(recipes.steady(per_head=False))
    if recipe in ROLES and recipe != "steady":
        return clipped(recipe)
    if not recipe.startswith("search:"):
        return method(recipe)
    from families import FAMILIES
    from winners import winner

    name = recipe.removeprefix("search:")
    return FAMILIES[name].method(winner(name))


def run_trial(trial: Trial) -> TrialResult:
    """Train one model on one thread."""
    torch.set_num_threads(1)
    settings = dict(trial.settings)
    text, bound = corpus(settings.pop("data", None)), settings.pop("stabiliser", None)
    config = TrainConfig(
        data_order="random", width=trial.width, lr=2.0**trial.log2_lr, seed=trial.seed, steps=trial.steps, **settings
    )
    way = method(trial.recipe, bound) if bound else chosen(trial.recipe)
    result = train(config, text, method=way)
    return TrialResult(result.train_loss, result.val_loss, result.seconds, result.diverged)


@functools.cache
def corpus(path: str | None) -> Corpus:
    """Read the text, once per process."""
    return load(path)


def main() -> None:
    """Run what is missing, or list the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*NAMES, []], metavar="part", help=", ".join(NAMES))
    parser.add_argument("--list", action="store_true", help="only say what is finished")
    options = parser.parse_args()
    for name in options.parts or NAMES:
        try:
            found = parts(name)
        except FileNotFoundError:  # the rates of paired runs are those of the curves
            print(f"{name}: after the curves")
            continue
        for part in found:
            if options.list:
                print(f"{part.directory.name}: {'' if part.finished else 'not '}finished")
            else:
                part.measure()


if __name__ == "__main__":
    main()
