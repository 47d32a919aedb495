"""What rounding the search's numbers costs, and history by rows in place of entries, on fresh seeds.

    python studies/search/rounding.py            # what is missing; resumes, 8 minutes on 2 cores
    python studies/search/rounding.py --table    # from the committed results, as docs/other-recipes.md has it

The winners of the searches `steady`, `steady_rows` and `steady_heads`, each beside its numbers as a person would write
them, at rates a quarter of an octave apart.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.data.sources import load
from surefoot.experiment.reports.style import markdown, plus_minus
from surefoot.experiment.sweep import fit, sweep
from surefoot.experiment.sweep.config import SweepConfig, Trial, TrialResult
from surefoot.experiment.sweep.search import Grid
from surefoot.experiment.sweep.summary import points
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train

HERE = Path(__file__).parent
SEEDS = {64: tuple(range(306, 314)), 128: tuple(range(306, 310))}
RATES = {64: (-3.5, -3.25, -3.0, -2.75), 128: (-3.25, -3.0)}


def history(b1: float, b2: float) -> dict[str, float]:
    """Adam's betas as the search writes them."""
    return {"mean": 1 - b1, "history": (1 - b2) / (1 - b1**2)}


def pair(beta: float, lookahead: float) -> dict[str, float]:
    """A momentum pair as the search writes it."""
    return {"short": 1 - beta, "ahead": 1 - lookahead}


LONGER = {"down": "longer"}
ENTRIES = {"by": "entries", **LONGER, **pair(0.8, 0.6), **history(0.9, 0.95)}
ROWS = {"by": "rows", **LONGER, **pair(0.9, 0.5), **history(0.9, 0.98)}
ROUND: dict[str, Mapping[str, Any]] = {
    "entries, rounded": {**ENTRIES, "embedding": 3, "head": 30, "gain": 0.1, "decay": 0.06},
    "rows, rounded": {**ROWS, "embedding": 2, "head": 20, "gain": 0.05, "decay": 0.08},
    "heads, rounded": {**ROWS, "embedding": 2, "head": 20, "gain": 0.05, "decay": 0.08, "queries": 2},
    "rows, rounded, no factor": {**ROWS, "embedding": 2, "head": 20, "gain": 0.05, "decay": 0.08, "down": "one"},
}


def point(name: str) -> Mapping[str, Any]:
    """The settings of a variant."""
    from winners import results

    if name in ROUND:
        return ROUND[name]
    family = {"rows": "steady_rows", "heads": "steady_heads"}.get(name, "steady")
    own = {"by": "rows", **LONGER} if name != "entries" else {}
    return {**next(iter(results(family)))[1], **own}


PARTS = {
    "rounding": ("entries", "rows", "entries, rounded", "rows, rounded", "rows, rounded, no factor"),
    "rounding_heads": ("heads", "heads, rounded"),
}
"""Variants that are compared with the first of them; "heads, rounded" is the default."""


@functools.cache
def corpus() -> Corpus:
    """The text, read once."""
    return load(None)


def run_trial(trial: Trial) -> TrialResult:
    """Train one variant."""
    from families import FAMILIES

    torch.set_num_threads(1)
    config = TrainConfig(
        data_order="random", width=trial.width, lr=2.0**trial.log2_lr, seed=trial.seed, steps=trial.steps
    )
    result = train(config, corpus(), method=FAMILIES["steady"].method(point(trial.recipe)))
    return TrialResult(result.train_loss, result.val_loss, result.seconds, result.diverged)


def table() -> str:
    """Markdown: each variant at its own best rate, and its difference from the first."""
    rows = []
    for part, width in itertools.product(PARTS, SEEDS):
        found, names = sweep.load(HERE / f"{part}_{width}")[1], PARTS[part]
        losses = {name: fit.lowest(points(found, name, width)) for name in names}
        for name, own in losses.items():
            cost = fit.difference(own, losses[names[0]])
            against = "" if name == names[0] else f"{cost.value:+.3f}{plus_minus(cost.interval, 3)}"
            rows.append([str(width), name, str(len(own)), f"{np.mean(list(own.values())):.3f}", against])
    return markdown(["width", "history by", "seeds", "loss", "minus the part's first"], rows)


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only print the table")
    options = parser.parse_args()
    for part, width in itertools.product(PARTS, SEEDS) if not options.table else ():
        config = SweepConfig(PARTS[part], (width,), SEEDS[width], 150, Grid(RATES[width]))
        sweep.run(config, HERE / f"{part}_{width}", run_trial)
    print(table())


if __name__ == "__main__":
    main()
