"""Remarks of the sources, tested at a size that a CPU can train.

    python studies/sources/run.py             # what is missing; resumes, an hour and a half on a core
    python studies/sources/run.py bounded     # one of the parts named below
    python studies/sources/run.py --list      # what is finished and what is not

150 steps of the demo's model and text, as in the transfer study, every curve with fresh seeds. The parts:

- `bounded`: the default under `PostClip(2)` in units of each role's factor, in place of its decay and beside it, on the
  rates and seeds of the default's own curves (`studies/confirm`), at widths 32 to 256.
- `moonlight`: only hidden matrices under Moonlight's scale, all else at its own rate in natural units, at widths 32 to
  128; `graft`: the same with the length of Adam's step in place of the scale.
- `heads`: the default at width 64 with heads of 8 to 64.
- `wion`: by how much the norms of hidden matrices exceed the radius of `recipes.wion` as the rate rises and falls.

`python studies/report.py` makes the tables in docs/transfer.md and docs/stability.md.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from surefoot import recipes
from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.data.sources import load
from surefoot.experiment.sweep import fit, sweep
from surefoot.experiment.sweep.config import SweepConfig, Trial, TrialResult
from surefoot.experiment.sweep.executors import Pool
from surefoot.experiment.sweep.search import Grid
from surefoot.experiment.sweep.summary import points
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train
from surefoot.experiment.training.methods import Steepest
from surefoot.experiment.training.run import Run

HERE = Path(__file__).parent
sys.path.append(str(HERE))  # of its own variants

STEPS = 150
SEEDS = {32: 8, 64: 8, 128: 5, 256: 8}
"""By width, how many of the seeds 440 to 447, those of the default's curves."""
RATES = (-3.75, -3.25, -3.0, -2.75, -2.25)
HEAD_RATES = (-4.5, -4.0, -3.5, -3.0, -2.5, -2.0)
FRESH = (1500, 1501, 1502)
WION_RADIUS = 2.0
WION_VECTORS = (1, 4)


@dataclass(frozen=True)
class Part:
    """One method at one width; `settings` are fields of `TrainConfig`."""

    recipe: str
    width: int
    rates: tuple[float, ...]
    seeds: tuple[int, ...] = FRESH
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def directory(self) -> Path:
        """Directory of its results."""
        return HERE / "_".join([self.recipe, str(self.width), *(f"{k}_{v}" for k, v in self.settings.items())])

    @property
    def finished(self) -> bool:
        """Whether all of it was run."""
        return (self.directory / "summary.json").exists()

    def measure(self, workers: int | None) -> None:
        """Run what is missing."""
        config = SweepConfig((self.recipe,), (self.width,), self.seeds, STEPS, Grid(self.rates), self.settings)
        sweep.run(config, self.directory, run_trial, executor=Pool(workers))
        best = fit.optimum(self.points())
        print(f"{self.directory.name}: {best.status} {best.log2_lr} {best.interval} {best.best_loss}", flush=True)

    def points(self) -> list[fit.Point]:
        """Its finished runs."""
        return points(sweep.load(self.directory)[1], self.recipe, self.width)


def bounded(recipe: str, width: int) -> Part:
    """The default under a bound at one width."""
    count = 3 if (recipe, width) == ("bounded", 256) else SEEDS[width]
    return Part(recipe, width, RATES, tuple(range(440, 440 + count)))


def graft(width: int) -> Part:
    """The matrix sign at the length of Adam's steps: half octaves, an octave down for four times the width."""
    centre = -4.0 - 0.5 * (width.bit_length() - 6)
    return Part("graft", width, tuple(centre + 0.5 * k for k in range(-3, 4)))


def moonlight(width: int) -> Part:
    """Moonlight's hidden matrices alone: half octaves around `1/sqrt(width)`."""
    centre = -3.25 - 0.5 * (width.bit_length() - 6)
    return Part("moonlight_hidden", width, tuple(centre + 0.5 * k for k in range(-2, 3)))


BOUNDED = ("bounded", "bounded_beside_decay")
PARTS: dict[str, list[Part]] = {
    "bounded": [bounded(recipe, width) for recipe in reversed(BOUNDED) for width in (64, 256, 128, 32)],
    "moonlight": [moonlight(width) for width in (32, 64, 128)],
    "heads": [Part("steady", 64, HEAD_RATES, FRESH, {"head_dim": size}) for size in (8, 16, 32, 64)],
    "graft": [graft(width) for width in (32, 64, 128)],
    "wion": [Part(f"wion_{vectors}", 64, (-3.5, -2.5)) for vectors in WION_VECTORS],
}


def chosen(recipe: str, log2_lr: float) -> recipes.Recipe:
    """A recipe by its name here."""
    import variants

    if recipe.startswith("wion"):
        return recipes.wion(WION_RADIUS, int(recipe.removeprefix("wion_")))
    if recipe in ("moonlight_hidden", "graft"):
        return getattr(variants, recipe)(log2_lr)
    if recipe == "bounded":
        return variants.bounded()
    return recipes.steady_bounded() if recipe in BOUNDED else recipes.steady()


def run_trial(trial: Trial) -> TrialResult:
    """Train one model on one thread; the facts have the largest norm of a hidden matrix every fifth step."""
    torch.set_num_threads(1)
    rate, settings, norms = trial.log2_lr, dict(trial.settings), {}
    config = TrainConfig(
        data_order="random", width=trial.width, lr=2.0**rate, seed=trial.seed, steps=trial.steps, **settings
    )

    def observe(run: Run) -> None:
        matrices = [p for name, p in run.model.named_parameters() if p.ndim == 2 and "blocks" in name]
        natural = [(p.shape[1] / p.shape[0]) ** 0.5 * float(torch.linalg.matrix_norm(p.detach(), 2)) for p in matrices]
        norms[str(run.step)] = round(max(natural), 4)

    watched = observe if trial.recipe.startswith("wion") else None
    result = train(config, corpus(), method=Steepest(chosen(trial.recipe, rate)), observe=watched, log_every=5)
    return TrialResult(
        result.train_loss, result.val_loss, result.seconds, result.diverged, {"norms": norms} if norms else {}
    )


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
