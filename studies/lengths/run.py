"""Rate and decay at each length of a run, searched equally often for every recipe, on documents that are read once.

    python studies/pretrain/text.py corpus.jsonl --cache packages
    surefoot tokens corpus.jsonl tokens --vocab 4096 --validation-one-in 50 --shard-tokens 20000000
    python studies/lengths/run.py search --data tokens --workers 2        # what is missing; resumes
    python studies/lengths/run.py final --data tokens --workers 2         # fresh seeds at what the searches found
    python studies/lengths/run.py rule --data tokens                      # the default's law beside rates around it
    python studies/lengths/run.py widths --data tokens --workers 2        # the default's best rate at widths 32 to 128

The reference GPT of depth 4, batches of 16 x 128 tokens of a BPE of 4,096, linear warm-up over a tenth of the steps and
linear cool-down to 0. At width 32 there are 20 and 80 tokens for each parameter that is in no table after 481 and 1,926
steps; at width 64 after 1,926 and 7,702; at width 128 there are 20 after 7,680. Each search is `RUNS` runs of one seed
by a Gaussian process (optuna) over log2 of the rate and log2 of the total decay `E = rate * decay * steps / 2`: over a
run with a linear cool-down, decay alone would shrink a weight by about `exp(-E)`. Scion has no decay but a radius: its
second number is log2 of a factor on its radii. All that is not searched here was found in runs of 150 steps
(`studies/search`), or is as published. `steady_law` is the default as its users have it, without a search: at the rate
and decay that the length of the run gives. `rule` tests that law at 7,700 steps of width 32, which it was not made
of, `widths` is the default at rates around it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
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
from surefoot.experiment.training.methods import Method, Steepest, moonlight_tuned
from surefoot.recipes import Recipe
from surefoot.recipes.rules import with_decay
from surefoot.stabilise import DecoupledWeightDecay

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parent / "search")]
from families import FAMILIES  # noqa: E402
from winners import winner  # noqa: E402

RUNS, SEED, SEEDS, LAW = 16, 800, 810, "steady_law"
FIRST = ((0.0, 0.0), (1.0, 0.0), (-1.0, 0.0), (0.0, 2.0), (0.0, -2.0))
"""The runs at which a search starts, octaves from its centre."""
SIDES = "val_loss", "train_loss"
WORST = 9.0  # the loss of a run that diverged, for the search


def muon_tuned() -> Recipe:
    """`moonlight_tuned` with Keller Jordan's factor on matrices in place of Moonlight's."""
    recipe, scale = moonlight_tuned(), recipes.muon().role("linear").lr_scale
    linear = replace(recipe.role("linear"), lr_scale=scale, stabiliser=DecoupledWeightDecay(0.085, scale))
    return replace(recipe, name="muon_tuned", table={**recipe.table, "linear": linear})


def _with_decay(recipe: Recipe, decay: float) -> Method:
    """A recipe with this decay in the place of that of its hidden matrices, the others' in proportion."""
    factor = decay / recipe.role("linear").stabiliser.rate
    table = {kind: with_decay(role, factor) for kind, role in recipe.table.items()}
    return Steepest(replace(recipe, table=table, horizon=None))


def _adamw(decay: float) -> Method:
    return FAMILIES["adamw"].method({**winner("adamw"), "decay": decay})


def _scion(factor: float) -> Method:
    point = winner("scion")
    radii = {kind: factor * point[kind] for kind in ("radius", "embedding", "head", "gain")}
    return FAMILIES["scion"].method({**point, **radii})


@dataclass(frozen=True)
class Searched:
    """A recipe: its method for a decay (Scion: a factor on radii), and where its search starts.

    Args:
        method: makes it.
        rate: log2 of the rate at the centre.
        total: log2 of the total decay there, of the factor for Scion.
        decays: whether the second number is a total decay.
    """

    method: Callable[[float], Method]
    rate: float
    total: float = 0.0
    decays: bool = True

    def at(self, log2_lr: float, second: float, steps: int) -> Method:
        """The method at a point of the search."""
        return self.method(2.0 ** (second + 1 - log2_lr) / steps if self.decays else 2.0**second)


RECIPES: Mapping[str, Searched] = {
    **dict.fromkeys((LAW, "steady"), Searched(functools.partial(_with_decay, recipes.steady()), -3.5)),
    "moonlight": Searched(functools.partial(_with_decay, recipes.moonlight()), -4.5),
    "moonlight_tuned": Searched(functools.partial(_with_decay, moonlight_tuned()), -4.0),
    "muon_tuned": Searched(functools.partial(_with_decay, muon_tuned()), -4.0),
    "adamw": Searched(_adamw, -7.0),
    "scion": Searched(_scion, -12.0, decays=False),
}
SEARCHES = tuple(itertools.product((481, 1926), (name for name in RECIPES if name != LAW)))
FINALS = {(64, 1926): 12, (64, 7702): 8, (128, 7680): 3}
"""Width and steps, and how many fresh seeds from `SEEDS` on."""
HELD = 32, 7700
"""Width and steps of runs after which nothing was chosen."""
WIDE, WIDE_STEPS, WIDE_SEEDS = {64: 5, 32: 5, 128: 4}, 1600, (820, 821, 822)
"""Widths of `widths`, each with its number of rates from 2^-4.5 on, half octaves apart."""
AROUND = ((0.0, 0.0), (0.5, 0.0), (-0.5, 0.0), (0.0, 1.0), (0.0, -1.0), (0.5, -1.0))
"""Octaves of rate and of total decay around the law there."""


def records(recipe: str, width: int, steps: int) -> list[dict[str, Any]]:
    """The runs of a recipe that there are."""
    path = _path(recipe, width, steps)
    return read_lines(path) if path.exists() else []


def _path(recipe: str, width: int, steps: int) -> Path:
    return HERE / f"{width}_{steps}" / f"{recipe}.jsonl"


def measure(recipe: str, width: int, steps: int, point: tuple[float, float], seed: int) -> dict[str, Any]:
    """Train one model, and write a line."""
    log2_lr, second = point
    for record in records(recipe, width, steps):
        if (record["log2_lr"], record["second"], record["seed"]) == (log2_lr, second, seed):
            return record
    config = TrainConfig.of(width=width, depth=4, batch_size=16, context=128, steps=steps, lr=2.0**log2_lr, seed=seed)
    result = train(config, corpus(), method=RECIPES[recipe].at(log2_lr, second, steps))
    losses = {"val_loss": result.val_loss, "train_loss": result.train_loss, "seconds": round(result.seconds, 1)}
    record = {"log2_lr": log2_lr, "second": second, "seed": seed, **losses}
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


def search(recipe: str, width: int, steps: int) -> None:
    """Run what is missing of a search."""
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
        measure(recipe, width, steps, point, SEED)


def _around(point: tuple[float, float]) -> Iterator[tuple[float, float]]:
    """The points of the quarter octaves, nearest first."""
    for rate, second in sorted(itertools.product(range(-8, 9), repeat=2), key=lambda step: (math.hypot(*step), step)):
        yield point[0] + rate / 4, point[1] + second / 4


@functools.cache
def fitted(recipe: str, steps: int) -> tuple[float, float]:
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


def final(recipe: str, width: int, steps: int) -> None:
    """Run what is missing of the fresh seeds."""
    have = {record["seed"] for record in records(recipe, width, steps)}
    for seed in range(SEEDS, SEEDS + FINALS[width, steps]):
        if seed not in have:
            measure(recipe, width, steps, fitted(recipe, steps), seed)


def rule(recipe: str, width: int, steps: int) -> None:
    """Run what is missing at the law, around it and at what the searches found, one seed."""
    rate, total = fitted(LAW, steps)
    for point in (*((rate + x, total + y) for x, y in AROUND), fitted(recipe, steps)):
        measure(recipe, width, steps, point, SEEDS)


def widths(recipe: str, width: int, steps: int) -> None:
    """Run what is missing at a width's rates."""
    decay = recipes.steady().over(Run(steps, 16 * 128)).role("linear").stabiliser.rate
    for seed, halves in itertools.product(WIDE_SEEDS, range(WIDE[width])):
        rate = -4.5 + halves / 2
        measure(recipe, width, steps, (rate, rate + math.log2(decay * steps / 2)), seed)


@functools.cache
def corpus() -> Corpus:
    """The tokens, opened once."""
    return load(f"bin:{os.environ['SUREFOOT_LENGTHS_TOKENS']}")


def work(stage: str, names: list[str], steps: list[int]) -> None:
    """Take one search, or one recipe's fresh seeds, after the other that no other process has taken."""
    torch.set_num_threads(1)
    take, jobs = {
        "search": (search, [(32, *job) for job in SEARCHES]),
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
                    take(name, width, length)
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
