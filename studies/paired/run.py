"""What does one choice cost in loss? The demo's model and text, one rate, and differences over the same seeds.

    python studies/paired/run.py storage       # momentum, or the weights themselves, in bfloat16; 20 minutes on 2 cores
    python studies/paired/run.py directions    # how accurate a matrix sign has to be; 15 minutes
    python studies/paired/run.py storage --table    # from the committed results, as docs/performance.md has it

The default recipe at lr 2^-4. Resumes; the results lie beside this file.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

import surefoot as sf
from surefoot import recipes
from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.data.corpus import load as load_text
from surefoot.experiment.reports import transfer as transfer_report
from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.config import SweepConfig, Trial, TrialResult
from surefoot.experiment.sweep.search import Grid
from surefoot.experiment.sweep.sweep import load, run
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.methods import Method, Steepest
from surefoot.experiment.training.run import CHECK_EVERY, Run

HERE = Path(__file__).parent
BF16 = torch.bfloat16
WIDTHS = (64, 128)


@dataclass(frozen=True)
class Stored(Method):
    """The default recipe, its weights in `dtype` (forward and backward then, too), storage as given."""

    dtype: torch.dtype
    storage: sf.Precision
    clip: float | None = None

    def initialise_(self, model: nn.Module, seed: int) -> None:
        """As the plan has it, then rounded once."""
        sf.Plan.of(model).initialise_(model, seed)
        model.to(self.dtype)

    def optimizer(self, model: nn.Module, lr: float) -> sf.SteepestDescent:
        """With its storage."""
        return sf.SteepestDescent(model, lr=lr, precision=self.storage)


def signed(method: str) -> Steepest:
    """The default recipe, the hidden matrices' directions by this method of `msign`."""
    table = recipes.beyond_mup().table
    linear = replace(table["linear"], geometry=sf.Spectral(method))
    return Steepest(recipes.Recipe(f"msign by {method}", {**table, "linear": linear}))


@dataclass(frozen=True)
class Study:
    """Ways of training, the first of which the others are compared with; `more` is a further column, its head first."""

    ways: Mapping[str, Method]
    seeds: int
    steps: int
    more: tuple[str, ...] = ()


STUDIES = {
    "storage": Study(
        {
            "float32": Stored(torch.float32, sf.Precision()),
            "bfloat16 momentum": Stored(torch.float32, sf.Precision(BF16)),
            "bfloat16 weights, master copy": Stored(BF16, sf.Precision(weights=sf.MasterWeights())),
            "bfloat16 weights, stochastic": Stored(BF16, sf.Precision(weights=sf.StochasticRounding())),
            "bfloat16 weights, to nearest": Stored(BF16, sf.Precision()),
            "both, stochastic": Stored(BF16, sf.Precision(BF16, sf.StochasticRounding())),
        },
        seeds=5,
        steps=300,
        more=("bytes a parameter, weight and state", "8", "6", "10", "6", "6", "4"),
    ),
    "directions": Study(
        {name: signed(name) for name in ("qdwh", "qdwh2", "auto", "halley", "zolotarev", "newton_schulz")},
        seeds=8,
        steps=150,
    ),
}


def run_trial(cell: Trial, study: str) -> TrialResult:
    """Train one model on one thread."""
    torch.set_num_threads(1)
    config = TrainConfig.of(width=cell.width, lr=2.0**cell.log2_lr, seed=cell.seed, steps=cell.steps)
    training = Run(config, corpus(), STUDIES[study].ways[cell.recipe])
    while training.step < cell.steps and not (training.step % CHECK_EVERY == 0 and training.diverged()):
        training.advance()
    result = training.result()
    return TrialResult(result.train_loss, result.val_loss, training.seconds, result.diverged)


@functools.cache
def corpus() -> Corpus:
    """Read once per process."""
    return load_text(None)


def table(name: str) -> str:
    """Markdown: each way's loss, and against the first on the same seeds."""
    study, records = STUDIES[name], load(HERE / name)[1]
    first, *_ = study.ways
    columns = (*(f"loss at {width}" for width in WIDTHS), *(f"against {first} at {width}" for width in WIDTHS))
    head = [name, *study.more[:1], *columns]
    lines = [head, ["---"] * len(head)]
    losses: dict[tuple[str, int], dict[int, float]] = {}
    for r in records:
        losses.setdefault((r["recipe"], r["width"]), {})[r["seed"]] = r["val_loss"]
    for i, way in enumerate(study.ways, 1):
        mine = [losses[way, width] for width in WIDTHS]
        line = [way, *study.more[i : i + 1], *(f"{sum(each.values()) / len(each):.3f}" for each in mine)]
        for width, each in zip(WIDTHS, mine, strict=True):
            against = fit.difference(each, losses[first, width])
            line.append(
                "" if way == first else f"{against.value:+.4f}{transfer_report.plus_minus(against.interval, 4)}"
            )
        lines.append(line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--table", action="store_true", help="only print the table")
    options = parser.parse_args()
    if not options.table:
        study = STUDIES[options.study]
        sweep = SweepConfig(tuple(study.ways), WIDTHS, tuple(range(study.seeds)), study.steps, Grid((-4.0,)))
        cell = functools.partial(run_trial, study=options.study)
        run(sweep, HERE / options.study, cell, environment={"corpus_sha256": corpus().sha256})
    print(table(options.study))


if __name__ == "__main__":
    main()
