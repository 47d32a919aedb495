"""Does the power law predict best rates? Several depths, horizons and batches, and four times the largest.

    python studies/sizes/run.py                             # what is missing of all parts; resumes, hours on 2 cores
    python studies/sizes/run.py horizon --recipes steady    # one of the parts named below, of some recipes
    python studies/sizes/run.py --list                      # what is finished and what is not
    python studies/sizes/run.py --toy DIR                   # the same at toy size into DIR, to test the command

The demo's model and text, 150 steps of 16 x 64 tokens where the part does not vary them, three seeds that no other
study uses, eight for the horizon, whose curves are flat. `depth`: 2 to 16 blocks at width 64, 2 to 8 at width 128; the
law alone. `flat` (of `steady_flat`): 8 and 16 blocks of the default without its rule for depth. `horizon`: 100 to 400
steps, and `batch`: 4 to 16 sequences a step, at width 64. A search with the same seeds then tests the law's rate at
1600 steps and at 64 sequences. It starts at the predicted rate, so that rate is run: its loss minus the lowest is the
regret. Where there is no law there is no prediction, and no such search. `same_decay`: the horizon's test again, with
the decay of short runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from surefoot.experiment.configs import CONFIG
from surefoot.experiment.data.sources import load
from surefoot.experiment.sweep import extrapolate, sweep
from surefoot.experiment.sweep.axis import AXES
from surefoot.experiment.sweep.config import Extrapolation, Trial, TrialResult
from surefoot.experiment.sweep.executors import Executor, Pool
from surefoot.experiment.sweep.search import Bracket
from surefoot.experiment.sweep.summary import transfer_rate
from surefoot.experiment.sweep.worker import run_trial as named_trial
from surefoot.experiment.sweep.worker import unchanged
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train
from surefoot.experiment.training.methods import Method, Steepest, method
from surefoot.experiment.training.names import LOG2_LR, METHODS
from surefoot.recipes import steady

HERE = Path(__file__).parent
RECIPES = ("steady", "moonlight_tuned", "adamw")
SEEDS, MORE_SEEDS = (800, 801, 802), tuple(range(800, 808))
BUDGET = 8  # rates a search may take, as many as `surefoot transfer`'s
SETTINGS = {"model": "gpt", "depth": 2, "head_dim": 16, "steps": 150, "batch_size": 16, "context": 64}
TOY = {"model": "gpt", "depth": 1, "head_dim": 16, "steps": 4, "batch_size": 2, "context": 16}
FLAT = "steady_flat"
"""The default without its rule for depth."""


def run_trial(trial: Trial) -> TrialResult:
    """One run, of a method by its name or of `FLAT`."""
    return named_trial(trial) if trial.recipe != FLAT else trial_of(Steepest(replace(steady(), depth=None)), trial)


def same_decay(trial: Trial) -> TrialResult:
    """One run of a method with the decay of short runs."""
    chosen = method(trial.recipe)
    if isinstance(chosen, Steepest):
        chosen = replace(chosen, recipe=replace(chosen.recipe, horizon=None))
    return trial_of(chosen, trial)


def trial_of(method: Method, trial: Trial) -> TrialResult:
    """One run, on one thread."""
    torch.set_num_threads(1)
    settings = dict(trial.settings)
    corpus = unchanged(None, settings.pop("corpus"))
    config = TrainConfig(
        data_order="random", width=trial.width, lr=2.0**trial.log2_lr, seed=trial.seed, steps=trial.steps, **settings
    )
    result = train(config, corpus, method=method)
    return TrialResult(result.train_loss, result.val_loss, result.seconds, result.diverged)


TRUTH, SAME_DECAY = "truth", "truth_same_decay"
TRUTHS: dict[str, sweep.RunTrial] = {TRUTH: run_trial, SAME_DECAY: same_decay}
"""The searches at a part's target, by their sub-directories."""


@dataclass(frozen=True)
class Part:
    """Sweeps over an axis at one width, and the value at which their law is put to the test."""

    axis: str
    values: tuple[int, ...]
    width: int
    target: int | None = None
    seeds: tuple[int, ...] = SEEDS
    truth: str = TRUTH

    def directory(self, recipe: str, out: Path) -> Path:
        """Directory of a recipe's runs."""
        return out / f"{self.axis}_{recipe.replace(':', '_')}_{self.width}"

    def config(self, recipe: str, settings: dict[str, Any]) -> Extrapolation:
        """The sweeps of a recipe."""
        shared = {name: value for name, value in settings.items() if name != AXES[self.axis].setting}
        search = Bracket({recipe: LOG2_LR["steady"]}, BUDGET)
        return Extrapolation((recipe,), self.seeds, search, self.axis, self.values, self.width, shared)

    def measure(self, recipe: str, settings: dict[str, Any], out: Path, executor: Executor) -> None:
        """Run what is missing: the sweeps, then the search at the target, from the predicted rate."""
        config, directory = self.config(recipe, settings), self.directory(recipe, out)
        summary = extrapolate.run(config, directory, run_trial, target=self.target, executor=executor)
        (entry,) = summary["recipes"]
        print(f"{directory.name}: power {entry['power']} {entry['power_ci']} {entry['no_law'] or ''}", flush=True)
        if self.target is not None and entry["target_log2_lr"] is not None:
            there = config.sweep(self.target, {recipe: transfer_rate(entry["target_log2_lr"])})
            sweep.run(there, directory / self.truth, TRUTHS[self.truth], executor=executor)

    def finished(self, recipe: str, out: Path) -> bool:
        """Whether all of it was run."""
        directory = self.directory(recipe, out)
        if not (directory / CONFIG).exists():
            return False
        summary, _ = extrapolate.load(directory)
        predicts = summary["recipes"][0]["target_log2_lr"] is not None
        return summary["finished"] and (not predicts or (directory / self.truth / sweep.SUMMARY).exists())


PARTS = {
    "depth": (Part("depth", (2, 4, 8, 16), 64), Part("depth", (2, 4, 8), 128)),
    "flat": (Part("depth", (8, 16), 64),),
    "horizon": (Part("horizon", (100, 200, 400), 64, target=1600, seeds=MORE_SEEDS),),
    "same_decay": (Part("horizon", (100, 200, 400), 64, target=1600, seeds=MORE_SEEDS, truth=SAME_DECAY),),
    "batch": (Part("batch", (4, 8, 16), 64, target=64),),
}
TOY_PARTS = {
    "depth": (Part("depth", (1, 2), 16),),
    "horizon": (Part("horizon", (4, 8), 16, target=32),),
    "batch": (Part("batch", (2, 4), 16, target=8),),
}


def chosen(names: list[str], recipes: list[str], toy: bool) -> Iterator[tuple[Part, str]]:
    """The parts of these names, for each recipe."""
    for name in names or PARTS:
        for part in (TOY_PARTS if toy else PARTS)[name]:
            yield from ((part, recipe) for recipe in recipes)


def main() -> None:
    """Run what is missing, or list the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="part", help=", ".join(PARTS))
    parser.add_argument("--recipes", nargs="+", choices=[*METHODS, FLAT], default=RECIPES, metavar="NAME")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--list", action="store_true", help="only say what is finished")
    parser.add_argument("--toy", type=Path, metavar="DIR", help="toy size, into DIR")
    options = parser.parse_args()
    out = options.toy or HERE
    for part, recipe in chosen(options.parts, options.recipes, toy=options.toy is not None):
        if options.list:
            print(f"{part.directory(recipe, out).name}: {'' if part.finished(recipe, out) else 'not '}finished")
        else:
            settings = {**(TOY if options.toy else SETTINGS), "corpus": load().sha256}
            part.measure(recipe, settings, out, Pool(options.workers))


if __name__ == "__main__":
    main()
