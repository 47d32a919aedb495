"""The transfer study: every recipe's best learning rate at widths 32 to 256, over seeds and horizons.

    python studies/transfer/run.py                     # what is missing of all parts; resumes, hours on 2 cores
    python studies/transfer/run.py beyond_mup adamw    # these recipes only
    python studies/transfer/run.py --table             # what the finished parts say, from the committed results

Each part lies in `<recipe>_<steps>/`, in the format of `surefoot transfer`; `surefoot report` shows one.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from surefoot import recipes
from surefoot.experiment import report
from surefoot.experiment.cells import Cell, CellResult, SweepConfig
from surefoot.experiment.data import load
from surefoot.experiment.methods import AdamW, Method, MupAdamW, Steepest
from surefoot.experiment.search import Bracket
from surefoot.experiment.sweep import run
from surefoot.experiment.train import TrainConfig, train
from surefoot.scaling import Keller, Moonlight, Natural

HERE = Path(__file__).parent
WIDTHS = (32, 64, 128, 256)

METHODS: dict[str, tuple[Method, float]] = {
    "beyond_mup": (Steepest(recipes.beyond_mup()), -4.0),
    "adamw": (AdamW(), -6.5),
    "muon_keller": (Steepest(recipes.muon(Keller())), -3.0),
    "muon_moonlight": (Steepest(recipes.muon(Moonlight())), -6.0),
    "muon_natural": (Steepest(recipes.muon(Natural())), -3.0),
    "moga_row_2": (Steepest(recipes.moga_row(2.0)), -4.0),
    "scion": (Steepest(recipes.scion()), -10.0),
    "mup_adamw": (MupAdamW(), -6.0),
    "lion": (Steepest(recipes.lion()), -8.0),
    "moga_column_2": (Steepest(recipes.moga_column(2.0)), -4.0),
    "moga_row_1.5": (Steepest(recipes.moga_row(1.5)), -4.0),
    "moga_row_1": (Steepest(recipes.moga_row(1.0)), -4.0),
    "moga_row_3": (Steepest(recipes.moga_row(3.0)), -4.0),
}
"""Each method and the log2 rate around which its search starts."""


@dataclass(frozen=True)
class Part:
    """One recipe at one horizon."""

    recipe: str
    steps: int
    seeds: int

    @property
    def directory(self) -> Path:
        return HERE / f"{self.recipe}_{self.steps}"

    @property
    def config(self) -> SweepConfig:
        search = Bracket({self.recipe: METHODS[self.recipe][1]}, budget=8)
        return SweepConfig((self.recipe,), WIDTHS, tuple(range(self.seeds)), self.steps, search)


PARTS = (
    *(Part(recipe, 150, 3) for recipe in METHODS),
    *(Part(recipe, 75, 3) for recipe in ("beyond_mup", "adamw")),
    *(Part(recipe, 400, 3) for recipe in ("beyond_mup", "adamw")),
)


def run_cell(cell: Cell) -> CellResult:
    torch.set_num_threads(1)
    config = TrainConfig(width=cell.width, lr=2.0**cell.log2_lr, seed=cell.seed, steps=cell.steps)
    result = train(config, load(None), method=METHODS[cell.recipe][0])
    return CellResult(result.train_loss, result.val_loss, result.seconds, result.diverged)


def finished(parts: list[Part]) -> str:
    """One table of all finished parts; the rest by name."""
    done = [part for part in parts if (part.directory / "summary.json").exists()]
    entries = []
    for part in done:
        summary = json.loads((part.directory / "summary.json").read_text())
        entries.append({**summary["recipes"][0], "recipe": f"{part.recipe}, {part.steps} steps"})
    missing = ", ".join(part.directory.name for part in parts if part not in done)
    table = report.table({"recipes": entries}) if entries else "nothing is finished"
    return f"{table}\n\nnot finished: {missing or 'none'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", choices=[*METHODS, []], metavar="recipe")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    parts = [part for part in PARTS if not options.recipes or part.recipe in options.recipes]
    if options.table:
        print(finished(parts))
        return
    for part in parts:
        summary = run(part.config, part.directory, run_cell, environment={"corpus_sha256": load(None).sha256})
        print(f"{part.directory.name}\n{report.table(summary)}\n", flush=True)


if __name__ == "__main__":
    main()
