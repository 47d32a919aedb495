"""What does it cost in loss to keep momentum, or the weights themselves, in bfloat16?

    python studies/storage/run.py            # what is missing; resumes, 20 minutes on 2 cores
    python studies/storage/run.py --table    # from the committed results, as docs/performance.md has it

The demo's model under the default recipe at lr 2^-4, 300 steps, five seeds; differences are paired over seeds.
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import surefoot as sf
from surefoot.experiment import fit, report
from surefoot.experiment.cells import Cell, CellResult, SweepConfig
from surefoot.experiment.data import Corpus
from surefoot.experiment.data import load as load_text
from surefoot.experiment.methods import Method
from surefoot.experiment.run import CHECK_EVERY, Run, TrainConfig
from surefoot.experiment.search import Grid
from surefoot.experiment.sweep import load, run

HERE = Path(__file__).parent / "bfloat16"
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Stored(Method):
    """The default recipe, its weights in `dtype` (forward and backward then, too), storage as given."""

    dtype: torch.dtype
    storage: sf.Storage
    bytes: int
    clip: float | None = None

    def initialise_(self, model: nn.Module, seed: int) -> None:
        """As the plan has it, then rounded once."""
        sf.Plan.of(model).initialise_(model, seed)
        model.to(self.dtype)

    def optimizer(self, model: nn.Module, lr: float) -> sf.SteepestDescent:
        """With its storage."""
        return sf.SteepestDescent(model, lr=lr, storage=self.storage)


METHODS = {
    "float32": Stored(torch.float32, sf.Storage(), 8),
    "bfloat16 momentum": Stored(torch.float32, sf.Storage(BF16), 6),
    "bfloat16 weights, master copy": Stored(BF16, sf.Storage(weights=sf.Master()), 10),
    "bfloat16 weights, stochastic": Stored(BF16, sf.Storage(weights=sf.Stochastic()), 6),
    "bfloat16 weights, to nearest": Stored(BF16, sf.Storage(), 6),
    "both, stochastic": Stored(BF16, sf.Storage(BF16, sf.Stochastic()), 4),
}
"""`bytes` are those of weight and optimizer state, per parameter."""

WIDTHS = (64, 128)
SWEEP = SweepConfig(tuple(METHODS), WIDTHS, (0, 1, 2, 3, 4), 300, Grid((-4.0,)))


def run_cell(cell: Cell) -> CellResult:
    """Train one model on one thread."""
    torch.set_num_threads(1)
    config = TrainConfig(width=cell.width, lr=2.0**cell.log2_lr, seed=cell.seed, steps=cell.steps)
    training = Run(config, corpus(), METHODS[cell.recipe])
    while training.step < cell.steps and not (training.step % CHECK_EVERY == 0 and training.diverged()):
        training.advance()
    result = training.result()
    return CellResult(result.train_loss, result.val_loss, training.seconds, result.diverged)


@functools.cache
def corpus() -> Corpus:
    """Read once per process."""
    return load_text(None)


def table() -> str:
    """Markdown: each way's loss, and against float32 on the same seeds."""
    records = load(HERE)[1]
    columns = (*(f"loss at {width}" for width in WIDTHS), *(f"against float32 at {width}" for width in WIDTHS))
    head = ["kept", "bytes a parameter", *columns]
    lines = [head, ["---"] * len(head)]
    losses = {(r["recipe"], r["width"]): {} for r in records}
    for r in records:
        losses[r["recipe"], r["width"]][r["seed"]] = r["val_loss"]
    for name, method in METHODS.items():
        mine = [losses[name, width] for width in WIDTHS]
        line = [name, str(method.bytes), *(f"{sum(each.values()) / len(each):.3f}" for each in mine)]
        for width, each in zip(WIDTHS, mine, strict=True):
            against = fit.difference(each, losses["float32", width])
            line.append("" if name == "float32" else f"{against.value:+.4f}{report.plus_minus(against.interval, 4)}")
        lines.append(line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only print the table")
    if not parser.parse_args().table:
        run(SWEEP, HERE, run_cell, environment={"corpus_sha256": corpus().sha256})
    print(table())


if __name__ == "__main__":
    main()
