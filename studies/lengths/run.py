"""The best rate and decay at each length of run, searched equally often for every recipe, on documents read once.

    python studies/pretrain/text.py corpus.jsonl --cache packages
    surefoot tokens corpus.jsonl tokens --vocab 4096 --validation-one-in 50 --shard-tokens 20000000
    python studies/lengths/run.py search --data tokens --workers 2        # what is missing; resumes
    python studies/lengths/run.py final --data tokens --workers 2         # fresh seeds at what the searches found
    python studies/lengths/run.py rule --data tokens                      # the default's law beside rates around it
    python studies/lengths/run.py widths --data tokens --workers 2        # the default's best rate at widths 32 to 256

The reference GPT of depth 4, batches of 16 x 128 tokens of a BPE of 4,096, linear warm-up over a tenth of the steps and
linear cool-down to 0. At width 32 there are 20 and 80 tokens for each parameter that is in no table after 481 and 1,926
steps; at width 64 after 1,926 and 7,702; at width 128 there are 20 after 7,680. Each search is `RUNS` runs of one seed
by a Gaussian process (optuna) over log2 of the rate and log2 of the total decay `E = rate * decay * steps / 2`: over a
run with a linear cool-down, decay alone would shrink a weight by about `exp(-E)`. Scion has a radius instead of decay:
its second number is log2 of a factor on its radii. All that is not searched here was found in runs of 150 steps
(`studies/search`), or is as published. `steady_law` is the default as its users have it, without a search: at the rate
and decay that the length of the run gives. `rule` tests that law at 7,700 steps of width 32, on which it was not based;
`widths` is the default at rates around it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import scipy.optimize
import torch

from surefoot import Run, recipes
from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.data.sources import load
from surefoot.experiment.files import Log, read_lines
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train
from surefoot.experiment.training.methods import Method
from surefoot.experiment.training.run import TrainResult

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
from lengths.searched import LAW, RECIPES  # noqa: E402

RUNS, SEED, SEEDS = 16, 800, 810
FIRST = ((0.0, 0.0), (1.0, 0.0), (-1.0, 0.0), (0.0, 2.0), (0.0, -2.0))
"""The runs at which a search starts, octaves from its centre."""
SIDES = "val_loss", "train_loss"
Point = tuple[float, float]
WORST = 9.0  # the loss of a run that diverged, for the search

SEARCHES = tuple(itertools.product((481, 1926), (name for name in RECIPES if name != LAW)))
FINALS = {(64, 1926): 12, (64, 7702): 8, (128, 7680): 3}
"""Width and steps, and how many fresh seeds from `SEEDS` on."""
HELD = 32, 7700
"""Width and steps of runs after which nothing was chosen."""
WIDE, WIDE_STEPS, WIDE_SEEDS = (64, 32, 128, 256), 1600, range(820, 827)
WIDE_RATES = -4.5, -4.0, -3.5, -3.0, -2.5
AROUND = ((0.0, 0.0), (0.5, 0.0), (-0.5, 0.0), (0.0, 1.0), (0.0, -1.0), (0.5, -1.0))
"""Octaves of rate and of total decay around the law there."""


def records(recipe: str, width: int, steps: int) -> list[dict[str, Any]]:
    """The runs of a recipe that there are."""
    path = _path(recipe, width, steps)
    return read_lines(path) if path.exists() else []


def _path(recipe: str, width: int, steps: int) -> Path:
    return HERE / f"{width}_{steps}" / f"{recipe}.jsonl"


def measure(recipe: str, width: int, steps: int, point: Point, seed: int) -> dict[str, Any]:
    """Train one model, and write a line."""
    if not (record := measured(recipe, width, steps, point, seed)):
        config, method = job(recipe, width, steps, point, seed)
        record = write(recipe, width, steps, point, seed, train(config, corpus(), method=method))
    return record


def measured(recipe: str, width: int, steps: int, point: Point, seed: int) -> dict[str, Any] | None:
    """The line of a run that there is."""
    key = {"log2_lr": point[0], "second": point[1], "seed": seed}
    return next((line for line in records(recipe, width, steps) if key.items() <= line.items()), None)


def job(recipe: str, width: int, steps: int, point: Point, seed: int, **more: Any) -> tuple[TrainConfig, Method]:
    """Settings and method of a run."""
    sizes = {"width": width, "depth": 4, "batch_size": 16, "context": 128, "steps": steps}
    return TrainConfig(**sizes, lr=2.0 ** point[0], seed=seed, **more), RECIPES[recipe].at(*point, steps)


def write(recipe: str, width: int, steps: int, point: Point, seed: int, result: TrainResult) -> dict[str, Any]:
    """Append the line of a run."""
    record = {"log2_lr": point[0], "second": point[1], "seed": seed, **{side: getattr(result, side) for side in SIDES}}
    record["seconds"] = round(result.seconds, 1)
    path = _path(recipe, width, steps)
    path.parent.mkdir(exist_ok=True)
    with Log(path) as log:
        log.append(record)
    print(recipe, width, steps, record, flush=True)
    return record


def loss_of(record: Mapping[str, Any]) -> float:
    """What a search minimises: the mean of both losses, of which either alone is twice as noisy."""
    losses = [record[side] for side in SIDES]
    return WORST if None in losses or not all(map(math.isfinite, losses)) else sum(losses) / 2


def search(recipe: str, width: int, steps: int) -> Iterator[tuple[Point, int]]:
    """What is missing of a search, each point by the runs before it."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    centre = RECIPES[recipe].rate, RECIPES[recipe].total
    space = {
        name: optuna.distributions.FloatDistribution(middle - reach, middle + reach)
        for name, middle, reach in (("rate", centre[0], 3.0), ("second", centre[1], 4.0))
    }
    while len(done := [r for r in records(recipe, width, steps) if r["seed"] == SEED]) < RUNS:
        if len(done) < len(FIRST):
            point = tuple(middle + octaves for middle, octaves in zip(centre, FIRST[len(done)], strict=True))
        else:
            sampler = optuna.samplers.GPSampler(seed=len(done), n_startup_trials=0, deterministic_objective=False)
            study = optuna.create_study(sampler=sampler)
            for record in done:
                params = {"rate": record["log2_lr"], "second": record["second"]}
                value = min(loss_of(record), min(map(loss_of, done)) + 1)
                study.add_trial(optuna.trial.create_trial(params=params, distributions=space, value=value))
            asked = study.ask(space).params
            point = tuple(round(4 * asked[name]) / 4 for name in space)
            tried = {(record["log2_lr"], record["second"]) for record in done}
            point = next(p for p in _around(point) if p not in tried)
        yield point, SEED


def _around(point: Point) -> Iterator[Point]:
    """The points of the quarter octaves, nearest first."""
    for rate, second in sorted(itertools.product(range(-8, 9), repeat=2), key=lambda step: (math.hypot(*step), step)):
        yield point[0] + rate / 4, point[1] + second / 4


@functools.cache
def fitted(recipe: str, steps: int) -> Point:
    """Rate and second number at a length, in log2, by one fit to both searches of a recipe; those of its law for `LAW`.

    A paraboloid through the runs within .15 nats of each search's lowest, of one curvature at both lengths, whose
    vertex moves in proportion to log2 of the steps. A search is so flat beside the noise of a run (some .015 nats) that
    the vertices of two fits apart would move by an octave either way: over a factor 4 in steps a movement of half an
    octave of rate, or one of the second number, costs as much as a deviation of one run by its noise.
    """
    if recipe == LAW:
        run, law = Run(steps, 16 * 128), recipes.steady()
        decay = law.over(run).role("linear").stabiliser.rate
        return tuple(round(16 * math.log2(x)) / 16 for x in (law.rate(run), law.rate(run) * decay * steps / 2))
    short, long = 481, 1926
    rows = []
    for part, length in ((0.0, short), (1.0, long)):
        done = [r for r in records(recipe, 32, length) if r["seed"] == SEED]
        lowest = min(map(loss_of, done))
        near = [r for r in done if loss_of(r) < lowest + 0.15]
        rows += [(part, r["log2_lr"], r["second"], loss_of(r) - lowest) for r in near]
    part, rate, second, loss = np.array(rows).T
    start = [RECIPES[recipe].rate, RECIPES[recipe].total]

    def misses(p: np.ndarray) -> np.ndarray:
        at, moves, floors, (first, mixed, last) = p[:2], p[2:4], p[4:6], p[6:]
        x, y = rate - at[0] - part * moves[0], second - at[1] - part * moves[1]
        bowl = (math.exp(first) * x + mixed * y) ** 2 + (math.exp(last) * y) ** 2
        priors = [moves[0] / 0.5, moves[1], (at[0] - start[0]) / 3, (at[1] - start[1]) / 3]
        return np.concatenate([(np.where(part == 0, *floors) + bowl - loss) / 0.015, priors])

    starts = [[start[0] + a, start[1] + b, 0, 0, 0, 0, -1.5, 0, -2.5] for a in (-1, 0, 1) for b in (-2, 0)]
    fit = min((scipy.optimize.least_squares(misses, first) for first in starts), key=lambda found: found.cost)
    part = math.log2(steps / short) / math.log2(long / short)
    return tuple(round(16 * float(fit.x[i] + part * fit.x[i + 2])) / 16 for i in (0, 1))


def final(recipe: str, width: int, steps: int) -> Iterator[tuple[Point, int]]:
    """The fresh seeds that are missing at what the searches found."""
    have = {record["seed"] for record in records(recipe, width, steps)}
    for seed in range(SEEDS, SEEDS + FINALS[width, steps]):
        if seed not in have:
            yield fitted(recipe, steps), seed


def rule(recipe: str, width: int, steps: int) -> Iterator[tuple[Point, int]]:
    """The law, around it, and what the searches found; one seed."""
    rate, total = fitted(LAW, steps)
    for point in (*((rate + x, total + y) for x, y in AROUND), fitted(recipe, steps)):
        yield point, SEEDS


def widths(recipe: str, width: int, steps: int) -> Iterator[tuple[Point, int]]:
    """The rates around the law's, at its decay."""
    decay = recipes.steady().over(Run(steps, 16 * 128)).role("linear").stabiliser.rate
    for seed, rate in itertools.product(WIDE_SEEDS, WIDE_RATES):
        yield (rate, rate + math.log2(decay * steps / 2)), seed


@functools.cache
def corpus() -> Corpus:
    """The tokens, opened once."""
    return load(f"bin:{os.environ['SUREFOOT_LENGTHS_TOKENS']}")


def work(stage: str, names: list[str], steps: list[int]) -> None:
    """Take one search, or one recipe's fresh seeds, after the other that no other process has taken."""
    torch.set_num_threads(1)
    take, jobs = {
        "search": (search, [(32, *each) for each in SEARCHES]),
        "final": (final, [(*size, name) for size in FINALS for name in RECIPES]),
        "rule": (rule, [(*HELD, "steady")]),
        "widths": (widths, [(width, WIDE_STEPS, "steady") for width in WIDE]),
    }[stage]
    for width, length, name in jobs:
        if name in names and length in steps:
            path = _path(name, width, length).with_suffix(".lock")
            path.parent.mkdir(exist_ok=True)
            try:
                with filelock.FileLock(path, timeout=0):
                    for point, seed in take(name, width, length):
                        measure(name, width, length, point, seed)
            except filelock.Timeout:
                continue


def main() -> None:
    """Run what is missing, in as many processes as there are workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("search", "final", "rule", "widths"))
    parser.add_argument("--data", required=True, help="folder of tokens")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--steps", type=int, nargs="+", default=[481, WIDE_STEPS, 1926, 7680, 7700, 7702])
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    # glibc gives large blocks back to the system at every step and takes them again, page by page: a third of the time.
    os.environ |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 33), "OMP_NUM_THREADS": "1"}
    os.environ["SUREFOOT_LENGTHS_TOKENS"] = str(Path(options.data).resolve())
    if os.environ.pop("SUREFOOT_LENGTHS_WORKER", None):
        work(options.stage, options.recipes, options.steps)
        return
    os.environ["SUREFOOT_LENGTHS_WORKER"] = "1"  # settings of malloc are read when a process starts
    workers = [subprocess.Popen([sys.executable, *sys.argv]) for _ in range(options.workers)]
    sys.exit(max(worker.wait() for worker in workers))


if __name__ == "__main__":
    main()
