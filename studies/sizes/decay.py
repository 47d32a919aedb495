"""In which unit does the default's decay stay the same over horizons and batches?

    python studies/sizes/decay.py            # what is missing; resumes, half an hour on 2 cores
    python studies/sizes/decay.py --list     # what is finished and what is not

The demo's model and text at width 64, as in `run.py`. A step multiplies a matrix by `1 - lr f rate`, where the
default's f is 1 up to 400 steps. At each horizon and each batch size f is a quarter to four, at the rate of the
default's optimum there. The best f is constant if decay is right in units of lr, falls as `1/(steps lr)` if its time
scale is a part of the run, and rises as `1/lr` if it is right per step, whatever the rate.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from surefoot.experiment.data.sources import load
from surefoot.experiment.sweep import fit, sweep
from surefoot.experiment.sweep.config import SweepConfig, Trial, TrialResult
from surefoot.experiment.sweep.search import Own
from surefoot.experiment.sweep.summary import points
from surefoot.experiment.training.methods import Steepest
from surefoot.recipes import Recipe, steady
from surefoot.recipes.rules import with_decay

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))  # the studies, by their folders' names

from sizes.run import trial_of  # noqa: E402

WIDTH, SEEDS = 64, (820, 821, 822)
SETTINGS = {"model": "gpt", "depth": 2, "head_dim": 16, "context": 64}
FACTORS = {f"decay_2^{power:+d}": float(power) for power in range(-2, 3)}
"""Recipes by name, and the log2 of their factor on the default's decay."""


@dataclass(frozen=True)
class Size:
    """Steps and batch of a run, and the log2 rate of the default's optimum there."""

    steps: int
    batch: int
    log2_lr: float

    @property
    def directory(self) -> Path:
        """Directory of its runs."""
        return HERE / f"decay_{self.steps}_{self.batch}"

    def config(self) -> SweepConfig:
        """What is run."""
        rates = Own(dict.fromkeys(FACTORS, (self.log2_lr,)))
        settings: dict[str, Any] = {**SETTINGS, "batch_size": self.batch, "corpus": load().sha256}
        return SweepConfig(tuple(FACTORS), (WIDTH,), SEEDS, self.steps, rates, settings)

    def points(self) -> list[fit.Point]:
        """Its runs, with log2 of the factor where a sweep has that of the rate."""
        records = sweep.load(self.directory)[1]
        return [replace(p, log2_lr=x) for name, x in FACTORS.items() for p in points(records, name, WIDTH)]

    def best(self) -> fit.Optimum:
        """The best factor: the vertex over its log2, fitted as that of a rate is."""
        return fit.optimum(self.points())

    def losses(self) -> dict[float, float | None]:
        """The mean loss by log2 of the factor."""
        return fit.mean_curve(self.points())

    def finished(self) -> bool:
        """Whether all of it was run."""
        return (self.directory / sweep.SUMMARY).exists()


HORIZONS = (Size(100, 16, -3.0), Size(400, 16, -3.5), Size(1600, 16, -4.25))
BATCHES = (Size(150, 4, -3.75), Size(150, 64, -2.75))


def decayed(factor: float) -> Recipe:
    """The default with its decay times a factor, whatever the length of the run."""
    table = {kind: with_decay(role, factor) for kind, role in steady().table.items()}
    return replace(steady(), table=table, horizon=None)


def run_trial(trial: Trial) -> TrialResult:
    """Train one model on one thread."""
    return trial_of(Steepest(decayed(2.0 ** FACTORS[trial.recipe])), trial)


def main() -> None:
    """Run what is missing, or list it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--list", action="store_true", help="only say what is finished")
    options = parser.parse_args()
    for size in (*HORIZONS, *BATCHES):
        if not options.list:
            sweep.run(size.config(), size.directory, run_trial, workers=options.workers)
        print(f"{size.directory.name}: {'' if size.finished() else 'not '}finished")


if __name__ == "__main__":
    main()
