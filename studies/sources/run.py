"""What the sources remark, measured at a CPU's size.

    python studies/sources/run.py             # what is missing; resumes, an hour and a half on a core
    python studies/sources/run.py bounded     # one of the parts named below
    python studies/sources/run.py --list      # what is finished and what is not

150 steps of the demo's model and text, as in the transfer study, every curve with fresh seeds. `bounded`: the default
under `PostClip(2)` in units of each role's factor, in place of its decay and beside it, on the rates and seeds of the
default's own curves (`studies/confirm`), at widths 32 to 256.
The tables are in docs/transfer.md and docs/stability.md, made by `python studies/report.py`.
"""

from __future__ import annotations

import argparse
import functools
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from surefoot.experiment.data.corpus import Corpus, load
from surefoot.experiment.sweep import fit, sweep
from surefoot.experiment.sweep.config import SweepConfig, Trial, TrialResult
from surefoot.experiment.sweep.pool import Pool
from surefoot.experiment.sweep.search import Grid
from surefoot.experiment.sweep.summary import points
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train
from surefoot.experiment.training.methods import Steepest

HERE = Path(__file__).parent
sys.path.append(str(HERE))  # of its own variants

STEPS = 150
SEEDS = {32: 8, 64: 8, 128: 5, 256: 3}
"""By width, how many of the seeds 440 to 447, those of the default's curves."""
RATES = (-3.75, -3.25, -3.0, -2.75, -2.25)


@dataclass(frozen=True)
class Part:
    """One method at one width."""

    recipe: str
    width: int
    rates: tuple[float, ...]
    seeds: tuple[int, ...]

    @property
    def directory(self) -> Path:
        """Directory of its results."""
        return HERE / f"{self.recipe}_{self.width}"

    @property
    def finished(self) -> bool:
        """Whether all of it was run."""
        return (self.directory / "summary.json").exists()

    def measure(self, workers: int | None) -> None:
        """Run what is missing."""
        config = SweepConfig((self.recipe,), (self.width,), self.seeds, STEPS, Grid(self.rates))
        sweep.run(config, self.directory, run_trial, executor=Pool(workers))
        best = fit.optimum(self.points())
        print(f"{self.directory.name}: {best.status} {best.log2_lr} {best.interval} {best.best_loss}", flush=True)

    def points(self) -> list[fit.Point]:
        """Its finished runs."""
        return points(sweep.load(self.directory)[1], self.recipe, self.width)


def bounded(recipe: str, width: int) -> Part:
    """The default under a bound at one width."""
    return Part(recipe, width, RATES, tuple(range(440, 440 + SEEDS[width])))


BOUNDED = ("bounded", "bounded_beside_decay")
PARTS: dict[str, list[Part]] = {
    "bounded": [bounded(recipe, width) for recipe in reversed(BOUNDED) for width in (64, 256, 128, 32)],
}


def run_trial(trial: Trial) -> TrialResult:
    """Train one model on one thread."""
    import variants

    torch.set_num_threads(1)
    chosen = Steepest(variants.bounded(decays=trial.recipe == BOUNDED[1]))
    config = TrainConfig.of(width=trial.width, lr=2.0**trial.log2_lr, seed=trial.seed, steps=trial.steps)
    result = train(config, corpus(), method=chosen)
    return TrialResult(result.train_loss, result.val_loss, result.seconds, result.diverged)


@functools.cache
def corpus() -> Corpus:
    """Read the text, once per process."""
    return load(None)


def main() -> None:
    """Run what is missing, or list the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="part", help=", ".join(PARTS))
    parser.add_argument("--workers", type=int)
    parser.add_argument("--list", action="store_true", help="only say what is finished")
    options = parser.parse_args()
    for part in [part for name in options.parts or PARTS for part in PARTS[name]]:
        if options.list:
            print(f"{part.directory.name}: {'' if part.finished else 'not '}finished")
        else:
            part.measure(options.workers)


if __name__ == "__main__":
    main()
