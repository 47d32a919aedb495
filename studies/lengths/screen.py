"""Eleven settings of the default changed together, on three lengths of a run: what each is worth, and the best of them.

    python studies/lengths/screen.py --data tokens     # what is missing; resumes, two hours of one core
    python studies/lengths/screen.py --table           # from the committed runs, as docs/transfer.md has it

Two runs of one recipe differ by some .02 nats from seed to seed, so that a setting changed alone would need a dozen
pairs of runs to show .01. In a design of Plackett and Burman every run tells of all settings: twelve runs, each with
another half of the changes, and of any two changes all four combinations equally often. An effect is then the mean of
half of the runs minus that of the other half, by one seed. The sum is over 481 and 1,926 steps of width 32 on the
tokens of run.py, and 150 of width 64 on bytes, the mean of both losses each. `together` has the changes whose effect on
the sum is below the noise, on fresh seeds beside the default, at width 64, too; three other shapes of the decay are
there one at a time.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from surefoot import Run as Length
from surefoot import recipes
from surefoot.contrib import CautiousDecay
from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.data.sources import load
from surefoot.experiment.files import Log, read_lines
from surefoot.experiment.reports.style import markdown, plus_minus
from surefoot.experiment.sweep import fit
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.methods import Steepest
from surefoot.experiment.training.run import Run
from surefoot.momentum import Adam
from surefoot.recipes.rules import with_decay
from surefoot.roles import Role
from surefoot.scaling import Times
from surefoot.stabilise import DecoupledWeightDecay, WeightDecay
from surefoot.stabilise.base import Moved

sys.path.append(str(Path(__file__).parents[1]))
from lengths.run import loss_of

RESULTS = Path(__file__).with_name("screen.jsonl")
SEEDS, FRESH = (830,), tuple(range(840, 846))
NOISE = 0.02
"""Standard error of an effect on the sum, in nats."""
LENGTHS: Mapping[str, Mapping[str, Any]] = {
    "481": {"width": 32, "depth": 4, "context": 128, "steps": 481},
    "1,926": {"width": 32, "depth": 4, "context": 128, "steps": 1926},
    "150 of bytes": {"width": 64, "steps": 150, "data_order": "random"},
}
WIDER: Mapping[str, Mapping[str, Any]] = {"1,926, width 64": {"width": 64, "depth": 4, "context": 128, "steps": 1926}}
"""Where `together` is confirmed, too."""
FIRST = (1, 1, 0, 1, 1, 1, 0, 0, 0, 1, 0)
"""The first run of Plackett and Burman's twelve; the next ones turn it, the last is the default."""
DESIGN = [tuple(FIRST[(column - row) % 11] for column in range(11)) for row in range(11)] + [(0,) * 11]
HIDDEN, TABLES = ("linear", "heads", "conv"), ("embedding", "head")


class Falling(DecoupledWeightDecay):
    """Decay that falls over the run, and as much of it in all."""

    now = 1.0

    def natural(self, w: Tensor) -> WeightDecay:
        """The decay of this step."""
        decay = super().natural(w)
        return replace(decay, rate=Falling.now * decay.rate)


class Cautious(DecoupledWeightDecay):
    """Decay of the entries that the step makes smaller, and of no others."""

    def move(self, w: Tensor, *step: Any, **known: Any) -> Moved:
        """By the same rate."""
        return CautiousDecay(self.natural(w).rate).move(w, *step, **known)


Change = Callable[[Role], Role]


def of(kinds: tuple[str, ...], change: Change) -> dict[str, Change]:
    """A change of the roles of these kinds."""
    return dict.fromkeys(kinds, change)


def times(factor: float) -> Change:
    """A change of a role's rate, and not of what it decays by."""

    def change(role: Role) -> Role:
        decay = role.stabiliser
        if isinstance(decay, DecoupledWeightDecay):
            decay = replace(decay, lr_scale=Times(factor, decay.lr_scale))
        return replace(role, lr_scale=Times(factor, role.lr_scale), stabiliser=decay)

    return change


def longer(role: Role) -> Role:
    """A longer history of squares."""
    return replace(role, momentum=replace(role.momentum, beta2={0.98: 0.99, 0.95: 0.98}[role.momentum.beta2]))


def decaying(kind: type[DecoupledWeightDecay], factor: float = 1.0) -> dict[str, Change]:
    """Another decay in every role that has one."""
    return of(
        (*HIDDEN, *TABLES), lambda r: replace(r, stabiliser=kind(factor * r.stabiliser.rate, r.stabiliser.lr_scale))
    )


SHORTER, FINAL, FASTER = "cool-down in the last half", "final rate a tenth", "rate 1.41 times"
FACTORS: Mapping[str, Mapping[str, Change]] = {
    "momentum .95 of hidden matrices": of(HIDDEN, lambda r: replace(r, momentum=replace(r.momentum, beta=0.95))),
    "Adam by entries in tables": of(TABLES, lambda r: replace(r, momentum=Adam(0.9, 0.95))),
    "longer history of squares": of(TABLES, longer),
    "embedding twice": of(("embedding",), times(2.0)),
    "head half": of(("head",), times(0.5)),
    "gains twice": of(("gain",), times(2.0)),
    "decay twice": of((*HIDDEN, *TABLES), lambda r: with_decay(r, 2.0)),
    "decay falls with the rate": decaying(Falling),
    FINAL: {},
    SHORTER: {},
    FASTER: {},
}
COSINE = "decay falls by a cosine"
ALONE: Mapping[str, Mapping[str, Change]] = {
    COSINE: decaying(Falling),
    "decay where the step shrinks an entry": decaying(Cautious),
    "the same, twice": decaying(Cautious, 2.0),
}


def measure(length: str, levels: Sequence[Any], seed: int, text: Corpus) -> dict[str, Any]:
    """Train with the changes whose level is 1, or with the one that is named."""
    changed = levels if levels[0] in ALONE else [n for n, level in zip(FACTORS, levels, strict=True) if level]
    sizes = {**LENGTHS, **WIDER}[length]
    steps, tokens = sizes["steps"], 16 * sizes.get("context", 64)
    recipe = recipes.steady().over(Length(steps, tokens))
    lr = recipe.rate(Length(steps, tokens)) * (2**0.5 if FASTER in changed else 1.0)
    table = dict(recipe.table)
    for name in changed:
        table |= {kind: change(table[kind]) for kind, change in {**FACTORS, **ALONE}[name].items()}
    config = TrainConfig(**sizes, lr=lr, seed=seed, decay=0.5 if SHORTER in changed else 0.9)
    run = Run(config, text, Steepest(replace(recipe, table=table, horizon=None)))
    last = 0.1 if FINAL in changed else 0.0
    rise = round(config.warmup * steps)

    def factor(step: int) -> float:
        now = config.factor(step) if step < rise else last + (1 - last) * config.factor(step)
        Falling.now = cosine[min(step, steps - 1)] if COSINE in changed else 1.5 * now
        return now

    rates = [config.factor(step) for step in range(steps)]
    cosine = [(1 + math.cos(math.pi * step / steps)) / 2 for step in range(steps)]
    much = sum(rates) / sum(x * y for x, y in zip(rates, cosine, strict=True))
    cosine = [much * each for each in cosine]

    run.scheduler = LambdaLR(run.optimizer, factor)
    while run.step < steps:
        run.advance()
    result = run.result()
    return {
        "length": length,
        "levels": levels,
        "seed": seed,
        "val_loss": result.val_loss,
        "train_loss": result.train_loss,
    }


def records() -> list[dict[str, Any]]:
    """The runs that there are."""
    return read_lines(RESULTS) if RESULTS.exists() else []


def lengths(seed: int, levels: Sequence[Any]) -> dict[str, float]:
    """The mean of both losses of each length that was run."""
    return {r["length"]: loss_of(r) for r in records() if (r["seed"], tuple(r["levels"])) == (seed, tuple(levels))}


def run_missing(runs: Iterable[tuple[int, Sequence[Any]]], names: Iterable[str], tokens: Corpus, text: Corpus) -> None:
    """Run what is missing of each at these lengths."""
    for (seed, levels), length in product(runs, names):
        if length not in lengths(seed, levels):
            record = measure(length, levels, seed, text if "bytes" in length else tokens)
            with Log(RESULTS) as log:
                log.append(record)
            print(record, flush=True)


def effects() -> dict[str, dict[str, list[float]]]:
    """Of each setting and length, and of their sum, the effect in each seed's runs."""
    found: dict[str, dict[str, list[float]]] = {name: {length: [] for length in (*LENGTHS, "sum")} for name in FACTORS}
    for seed in SEEDS:
        losses = [lengths(seed, levels) for levels in DESIGN]
        for column, name in enumerate(FACTORS):
            for length in LENGTHS:
                each = [(levels[column], loss[length]) for levels, loss in zip(DESIGN, losses, strict=True)]
                means = [np.mean([loss for level, loss in each if level == side]) for side in (0, 1)]
                found[name][length].append(float(means[1] - means[0]))
            found[name]["sum"].append(sum(found[name][length][-1] for length in LENGTHS))
    return found


def together() -> tuple[int, ...]:
    """The levels of all settings whose effect on the sum is below its noise."""
    return tuple(int(np.mean(each["sum"]) < -NOISE) for each in effects().values())


def table() -> str:
    """Effects, and the chosen changes together, and others alone, beside the default on fresh seeds."""
    rows = [[name, *(f"{np.mean(values):+.3f}" for values in each.values()), ""] for name, each in effects().items()]
    for row, chosen in {"together": together(), **{name: (name,) for name in ALONE}}.items():
        pairs = [[lengths(seed, levels) for levels in (chosen, DESIGN[-1])] for seed in FRESH]
        of = {name: [x[name] - y[name] for x, y in pairs if name in x.keys() & y.keys()] for name in (*LENGTHS, *WIDER)}
        whole = [sum(each) for each in zip(*(of[name] for name in LENGTHS), strict=True)]
        gains = [*(of[name] for name in LENGTHS), whole, *(of[name] for name in WIDER)]
        if any(of.values()):
            rows.append([row, *(f"{np.mean(g):+.3f}{plus_minus(fit.interval(g), 3)}" if g else "" for g in gains)])
    return markdown(["change", *LENGTHS, "sum", *WIDER], rows)


def main() -> None:
    """Run what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of tokens")
    parser.add_argument("--table", action="store_true", help="only print the table")
    options = parser.parse_args()
    if not options.table:
        torch.set_num_threads(1)
        corpora = load(f"bin:{options.data}"), load(None)
        run_missing([*product(SEEDS, DESIGN)], LENGTHS, *corpora)
        for names in (LENGTHS, WIDER):
            run_missing([*product(FRESH, (together(), DESIGN[-1]))], names, *corpora)
        run_missing([*product(FRESH, [(name,) for name in ALONE])], LENGTHS, *corpora)
    print(table())


if __name__ == "__main__":
    main()
