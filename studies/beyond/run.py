"""Parts of the public records beyond Muon, each on tuned Muon and on the default; combinations at twice the width.

    python studies/beyond/run.py screen                          # every part; resumes, 17 minutes on 2 cores
    python studies/beyond/run.py screen steady+rows muon+power   # only these
    python studies/beyond/run.py confirm steady steady+rows      # these against tuned Muon; 8 minutes each, Muon 4
    python studies/beyond/run.py widths steady+rows              # the best rate of these at four widths
    python studies/beyond/run.py --list                          # what is finished and what is not
    python studies/beyond/run.py --table                         # the tables, from the results

The demo's model and text, 400 steps. `screen`: width 64, two paired seeds, everything at its own best rate: three rates
half an octave apart, then a quarter beside the best; a search goes on beyond an edge, and nothing else has more rates.
Parts that are not expected to move the best rate are run at the base's two best. Averages of the weights are evaluated
beside every run; training does not use them.

`confirm`: width 128. The rate is found in the same way on two seeds, then eight fresh ones are run at it: tuned Muon at
400 steps, the others at 280, 320, 360 and 400 (with `--last` only at 400), each with its own whole schedule. The
shorter runs tell at how many steps a recipe ends at tuned Muon's final loss (`tables.ratio`). The loss during a run
says little, because a rate that falls to 0 gains most at the end.

`widths`: 32 to 256, 150 steps, three seeds, the search of `surefoot transfer`.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.data.sources import load
from surefoot.experiment.sweep import fit, sweep
from surefoot.experiment.sweep.config import SweepConfig, Trial, TrialResult
from surefoot.experiment.sweep.search import Bracket, Grid
from surefoot.experiment.sweep.summary import points
from surefoot.experiment.training.average import Average
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.run import CHECK_EVERY, Run

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))  # the studies, by their folders' names

from beyond.variants import SCREEN, Way  # noqa: E402

STEPS, SHORTER = 400, (280, 320, 360)
SCREEN_WIDTH, SCREEN_SEEDS = 64, (500, 501)
WIDTH, TUNING_SEEDS, SEEDS = 128, (502, 503), tuple(range(510, 518))
BUDGET, BEYOND = 4, 3  # rates, and how many more while the best one is at an edge
WIDTHS, WIDTHS_STEPS, WIDTHS_SEEDS, WIDTHS_BUDGET = (32, 64, 128, 256), 150, (504, 505, 506), 8
RIVAL = "muon"
READ: dict[str | float, tuple[float, ...]] = {0.98: (-0.1, 1.0), "last:0.1": (1.0,), "last:0.2": (1.0,)}
"""Averages of the weights that are read beside every run, and at which shares of the way from the weights to them.

An exponential mean lies behind the weights by a multiple of the mean of their last updates: -0.1 is ahead along it."""


@dataclass(frozen=True)
class Halves(Bracket):
    """Three rates half an octave apart, then those of `next_rates`."""

    def next(self, recipe: str, means: Mapping[float, float | None]) -> tuple[float, ...]:
        """The log2 rates to run next."""
        return next_rates(means, self.centres[recipe], self.budget)

    @property
    def expected(self) -> int:
        """Expected number of rates."""
        return self.budget


def next_rates(means: Mapping[float, float | None], centre: float, budget: int) -> tuple[float, ...]:
    """Half an octave beyond the best rate while it is at an edge, then a quarter beside it, towards the better side.

    >>> next_rates({}, -3.0, 4)
    (-3.5, -3.0, -2.5)
    >>> next_rates({-3.5: 2.0, -3.0: 1.8, -2.5: 1.9}, -3.0, 4)
    (-2.75,)
    >>> next_rates({-3.5: 2.0, -3.0: 1.9, -2.5: 1.8, -2.0: None}, -3.0, 5)
    (-2.75,)
    """
    if not means:
        return (centre - 0.5, centre, centre + 0.5)
    finite = {rate: loss for rate, loss in means.items() if loss is not None}
    if not finite:
        return (min(means) - 1.0,) if len(means) < budget + BEYOND else ()
    best = min(finite, key=lambda rate: (finite[rate], rate))
    beyond = [best + side for edge, side in ((min(means), -0.5), (max(means), 0.5)) if best == edge]
    if beyond:
        return tuple(beyond) if len(means) < budget + BEYOND else ()
    side = min((-0.5, 0.5), key=lambda side: finite.get(best + side, float("inf")))
    return (best + side / 2,) if len(means) < budget and best + side in means else ()


@dataclass(frozen=True)
class Search:
    """A way of training at several rates, of which the best is wanted."""

    way: Way
    stage: str
    width: int
    seeds: tuple[int, ...]

    @property
    def directory(self) -> Path:
        """Directory of its results."""
        return HERE / f"{self.stage}_{self.way.name}"

    def config(self) -> SweepConfig:
        """What is run."""
        rates: Halves | Grid = Halves({self.way.name: self.way.centre(self.width)}, BUDGET)
        if self.stage == "screen" and not self.way.moves:
            means = fit.mean_curve(screening(Way(self.way.base)).points())
            finite = {rate: loss for rate, loss in means.items() if loss is not None}
            rates = Grid(tuple(sorted(finite, key=finite.__getitem__)[:2]))
        return SweepConfig((self.way.name,), (self.width,), self.seeds, STEPS, rates, self.way.settings)

    def points(self) -> list[fit.Point]:
        """Its finished runs."""
        return points(sweep.load(self.directory)[1], self.way.name, self.width)

    def rate(self) -> float:
        """The best rate: the vertex of the curve to a sixteenth of an octave, or the best of those run."""
        best = fit.optimum(self.points())
        assert best.best_rate is not None, f"{self.way.name} diverged at every rate"
        return best.best_rate if best.log2_lr is None else round(16 * best.log2_lr) / 16


@dataclass(frozen=True)
class Final:
    """A way of training at its best rate for a number of steps, on seeds that chose nothing."""

    way: Way
    steps: int

    @property
    def directory(self) -> Path:
        """Directory of its results."""
        return HERE / f"final_{self.way.name}_{self.steps}"

    def config(self) -> SweepConfig:
        """What is run."""
        rate = Grid((tuning(self.way).rate(),))
        return SweepConfig((self.way.name,), (WIDTH,), SEEDS, self.steps, rate, self.way.settings)

    def losses(self) -> dict[int, float]:
        """The validation loss of each seed."""
        return fit.lowest(points(sweep.load(self.directory)[1], self.way.name, WIDTH))


@dataclass(frozen=True)
class Widths:
    """A way of training at several widths, each with its own search: does its rate transfer?"""

    way: Way

    @property
    def directory(self) -> Path:
        """Directory of its results."""
        return HERE / f"widths_{self.way.name}"

    def config(self) -> SweepConfig:
        """What is run."""
        rates = Bracket({self.way.name: self.way.centre(SCREEN_WIDTH)}, WIDTHS_BUDGET)
        return SweepConfig((self.way.name,), WIDTHS, WIDTHS_SEEDS, WIDTHS_STEPS, rates, self.way.settings)


Study = Search | Final | Widths


def screening(way: Way) -> Search:
    """Its search of the screen."""
    return Search(way, "screen", SCREEN_WIDTH, SCREEN_SEEDS)


def tuning(way: Way) -> Search:
    """Its search of the confirmation."""
    return Search(way, "tune", WIDTH, TUNING_SEEDS)


def finals(way: Way) -> list[Final]:
    """Its final runs, those of tuned Muon at the full length alone."""
    return [Final(way, steps) for steps in ((STEPS,) if way.name == RIVAL else (STEPS, *SHORTER))]


def finished(part: Study) -> bool:
    """Whether all of it was run."""
    return (part.directory / sweep.SUMMARY).exists()


def run_trial(trial: Trial) -> TrialResult:
    """Train one model on one thread; the facts have the state's bytes a parameter, and the averages' losses."""
    torch.set_num_threads(1)
    way = Way(trial.recipe)
    config = TrainConfig(
        data_order="random",
        width=trial.width,
        lr=2.0**trial.log2_lr,
        seed=trial.seed,
        steps=trial.steps,
        **trial.settings,
    )
    run = Run(config, corpus(), way.method(trial.steps))
    averages = {kind: Average(run.model, kind, trial.steps) for kind in READ}
    while run.step < trial.steps and not (run.step % CHECK_EVERY == 0 and run.diverged()):
        started = time.perf_counter()
        run.advance()
        run.seconds += time.perf_counter() - started
        for average in averages.values():
            average.update(run.step - 1)
    result, facts = run.result(), {"state_bytes": state_bytes(run)}
    if not result.diverged:
        facts |= {"read": {str(kind): read(run, average, READ[kind]) for kind, average in averages.items()}}
    return TrialResult(result.train_loss, result.val_loss, result.seconds, result.diverged, facts)


def state_bytes(run: Run) -> float:
    """Bytes that the optimizer keeps of a parameter, in the mean over all."""
    states = run.optimizer.state.values()
    kept = sum(x.nbytes for state in states for x in state.values() if isinstance(x, torch.Tensor))
    return kept / sum(p.numel() for p in run.model.parameters())


@torch.no_grad()
def read(run: Run, average: Average, shares: tuple[float, ...]) -> dict[str, float | None]:
    """The validation loss of the weights moved by shares of the way to an average."""
    found = {}
    before = [p.clone() for p in run.model.parameters()]
    for share in shares:
        for p, w, a in zip(run.model.parameters(), before, average.weights.values(), strict=True):
            p.copy_(torch.lerp(w, a, share))
        found[f"{share:g}"] = run.validate()
    for p, w in zip(run.model.parameters(), before, strict=True):
        p.copy_(w)
    return found


@functools.cache
def corpus() -> Corpus:
    """The text, read once per process."""
    return load(None)


def measure(part: Study) -> None:
    """Run what is missing."""
    summary = sweep.run(part.config(), part.directory, run_trial)["recipes"][0]
    print(f"{part.directory.name}: {summary['best_loss'][0]} at 2^{summary['best_loss_log2_lr'][0]}", flush=True)


def parts_of(stage: str, names: tuple[str, ...], lengths: int | None = None) -> list[Study]:
    """What a stage runs for these names, in order; of the final runs as many lengths as said, the longest first."""
    ways = [Way(name) for name in names]
    if stage == "screen":  # bases first, whose rates others take
        bases = dict.fromkeys(Way(way.base) for way in ways)
        return [screening(way) for way in dict.fromkeys((*bases, *ways))]
    if stage == "widths":
        return [Widths(way) for way in ways]
    return [part for way in ways for part in (tuning(way), *finals(way)[:lengths])]


def main() -> None:
    """Run what is missing, list it, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", nargs="?", choices=["screen", "confirm", "widths"], default="screen")
    parser.add_argument(
        "names", nargs="*", metavar="name", help=f"as in {SCREEN[1]}; screen: all of {', '.join(SCREEN)}"
    )
    parser.add_argument(
        "--last", action="store_true", help="confirm: leave out the shorter runs, and so the ratio of steps"
    )
    parser.add_argument("--list", action="store_true", help="only say what is finished")
    parser.add_argument("--table", action="store_true", help="only print the tables")
    options = parser.parse_intermixed_args()
    if options.table:
        from beyond import tables

        print("\n\n".join(filter(None, (table() for table in tables.ALL))))
        return
    names = tuple(options.names) or SCREEN
    if options.stage == "confirm":
        names = tuple(dict.fromkeys((RIVAL, *(options.names or ("steady",)))))
    for part in parts_of(options.stage, names, 1 if options.last else None):
        if options.list:
            print(f"{part.directory.name}: {'' if finished(part) else 'not '}finished")
        else:
            measure(part)


if __name__ == "__main__":
    main()
