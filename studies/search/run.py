"""The search for the settings of the default recipe and of its rivals: as many training runs for every family.

    python studies/search/run.py steady moonlight    # what is missing of these families; 12 minutes each on one core
    python studies/search/run.py                     # of all
    python studies/search/run.py --table             # the best settings, from the committed results

The demo's model and text, 150 steps. All settings of a family are searched together (`families.py`): `TRIALS` points of
a Gaussian process (Optuna's `GPSampler`) at width 64, the mean over two seeds; then the best `FINALISTS` and the start
on four other seeds at width 64, and at width 32 with rates half an octave around their own. The winner has the lowest
sum of its losses at 64 (on the four seeds) and at 32 (at its best rate). No other study uses these seeds. Resumes.
Needs the extra `search`.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
from statistics import mean
from typing import Any

import torch
from families import FAMILIES, Family, Point
from winners import CHECK_WIDTH, FINAL_SEEDS, HERE, WIDTH, results

from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.data.sources import load
from surefoot.experiment.files import Log, locked
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train

STEPS, SEEDS = 150, (300, 301)
TRIALS, FINALISTS = 60, 5
RATES = (-0.5, 0.0, 0.5)  # octaves around a finalist's own rate, at the check's width
RUNS = TRIALS * len(SEEDS) + (FINALISTS + 1) * (len(FINAL_SEEDS) + len(RATES) * len(SEEDS))
WORST = 2.6  # losses above count as this: a run that failed says nothing about its neighbourhood

Key = tuple[int, int, float, int]


@functools.cache
def text() -> Corpus:
    """The text, read once."""
    return load(None)


class Search:
    """One family's runs: `point` is the number of a trial, `shift` the octaves from its own rate."""

    def __init__(self, name: str, log: Log) -> None:
        self.family, self.log = FAMILIES[name], log
        self.done: dict[Key, float] = {_key(record): record["val_loss"] for record in log.records}
        self.points: dict[int, Point] = {record["point"]: record["settings"] for record in log.records}

    def loss(self, number: int, point: Point, width: int, shift: float, seed: int) -> float:
        """The validation loss of one training run, from the log if it is there."""
        key = (number, width, shift, seed)
        if key not in self.done:
            config = TrainConfig(
                data_order="random", width=width, lr=2.0 ** (point["lr"] + shift), seed=seed, steps=STEPS
            )
            result = train(config, text(), method=self.family.method(point))
            loss = WORST if result.diverged or not math.isfinite(result.val_loss) else result.val_loss
            record = {"point": number, "width": width, "shift": shift, "seed": seed, "val_loss": loss}
            self.log.append({**record, "seconds": round(result.seconds, 2), "settings": dict(point)})
            self.done[key], self.points[number] = loss, point
        return self.done[key]

    def trial(self, number: int, point: Point) -> float:
        """A point's mean loss over the search's seeds."""
        return min(WORST, mean(self.loss(number, point, WIDTH, 0.0, seed) for seed in SEEDS))

    def finalists(self) -> list[int]:
        """The best points of the search, and the first of all, where it started."""
        first = {number: [self.done[number, WIDTH, 0.0, seed] for seed in SEEDS] for number in range(TRIALS)}
        best = sorted(first, key=lambda number: mean(first[number]))
        return [*[number for number in best if number][:FINALISTS], 0]

    def finals(self, number: int, point: Point) -> tuple[float, dict[float, float]]:
        """The loss at the search's width on other seeds, and at the narrower one for each shift of the rate."""
        wide = mean(self.loss(number, point, WIDTH, 0.0, seed) for seed in FINAL_SEEDS)
        narrow = {shift: mean(self.loss(number, point, CHECK_WIDTH, shift, s) for s in SEEDS) for shift in RATES}
        return wide, narrow


def _key(record: dict[str, Any]) -> Key:
    return record["point"], record["width"], record["shift"], record["seed"]


def distributions(family: Family) -> dict[str, Any]:
    """Optuna's description of a family's ranges."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    found = {"lr": FloatDistribution(*family.rate)}
    for name, values in family.ranges.items():
        choice = isinstance(values[0], str)
        found[name] = CategoricalDistribution(values) if choice else FloatDistribution(*values, log=True)
    return found


def measure(name: str) -> None:
    """Run what is missing of a family."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(1)
    directory = HERE / name
    directory.mkdir(exist_ok=True)
    with locked(directory), Log(directory / "results.jsonl") as log:
        search = Search(name, log)
        space = distributions(search.family)
        for number in range(TRIALS):
            if number in search.points:
                point = search.points[number]
            elif number < len(search.family.starts):
                point = search.family.starts[number]
            else:
                sampler = optuna.samplers.GPSampler(seed=number, n_startup_trials=12, deterministic_objective=False)
                study = optuna.create_study(sampler=sampler)
                for earlier in range(number):
                    value = search.trial(earlier, search.points[earlier])
                    settings = {k: float(v) if isinstance(v, int) else v for k, v in search.points[earlier].items()}
                    study.add_trial(optuna.trial.create_trial(params=settings, distributions=space, value=value))
                point = study.ask(space).params
            print(f"{name} {number} {search.trial(number, point):.4f} {_written(point)}", flush=True)
        for number in search.finalists():
            wide, narrow = search.finals(number, search.points[number])
            print(f"{name} {number} {wide:.4f} {min(narrow.values()):.4f}", flush=True)


def _written(point: Point) -> str:
    return ", ".join(
        f"{name} {value}" if isinstance(value, str) else f"{name} {value:.3g}" for name, value in point.items()
    )


def table(name: str) -> str:
    """The finalists of a family, a line each."""
    lines = [f"{name}: {RUNS} runs", "point  64      32      octaves  settings"]
    for number, point, wide, narrow in results(name):
        shift = min(narrow, key=narrow.__getitem__)
        lines.append(f"{number:5}  {wide:.4f}  {narrow[shift]:.4f}  {shift:+7}  {_written(point)}")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing of the families, or print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", choices=[*FAMILIES, []], metavar="family", help=", ".join(FAMILIES))
    parser.add_argument("--table", action="store_true", help="only print what is there")
    options = parser.parse_args()
    for name in options.families or FAMILIES:
        if options.table:
            print(table(name), end="\n\n")
        else:
            measure(name)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
