"""Which settings should be the defaults? Each variant gets its own best learning rate; the losses are compared.

    python studies/defaults/run.py adamw         # AdamW's initialisation, betas, decay, clipping: all of a fixed grid
    python studies/defaults/run.py adamw_128     # its best ones again at width 128, where the demo compares
    python studies/defaults/run.py beyond_mup    # momentum pair and learning-rate scale per role: one at a time

Width 64 but where another is named, 120 steps, the demo's model and text, seeds that no transfer study uses. Resumes;
the results lie beside this file, in `<study>/results.jsonl`, and the table is printed from them.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from pathlib import Path

import torch

from surefoot import recipes
from surefoot.experiment.baselines import gpt2_, torch_
from surefoot.experiment.cells import Cell, CellResult, SweepConfig
from surefoot.experiment.data import load
from surefoot.experiment.methods import AdamW, Method, Steepest
from surefoot.experiment.search import Bracket
from surefoot.experiment.sweep import run
from surefoot.experiment.train import TrainConfig, train
from surefoot.momentum import Momentum
from surefoot.scaling import Constant

HERE = Path(__file__).parent


def _adamw() -> dict[str, Method]:
    betas = ((0.9, 0.999), (0.9, 0.95), (0.8, 0.9))
    grid = [*itertools.product((torch_, gpt2_), betas, (0.0, 0.1), (None, 1.0))]
    grid += itertools.product((torch_,), ((0.8, 0.95), (0.7, 0.9), (0.7, 0.8), (0.6, 0.8)), (0.1,), (None, 1.0))
    return {
        f"{start.__name__.rstrip('_')} init, betas {betas}, decay {decay}, clip {clip}": AdamW(
            start, betas, decay, clip
        )
        for start, betas, decay, clip in grid
    }


def _adamw_finalists() -> dict[str, Method]:
    return {
        name: m for name, m in _adamw().items() if "torch init" in name and "(0.9" not in name and "decay 0.1" in name
    }


BASE_MOMENTUM, BASE_HEAD = Momentum(0.9, 0.8), 16.0


def _steepest(momentum: Momentum = BASE_MOMENTUM, **scales: float) -> Method:
    table = {kind: replace(role, momentum=momentum) for kind, role in recipes.beyond_mup().table.items()}
    for kind, scale in {"head": BASE_HEAD, **scales}.items():
        table[kind] = replace(table[kind], lr_scale=Constant(scale))
    return Steepest(recipes.Recipe("variant", table))


def _beyond_mup() -> dict[str, Method]:
    pairs = ((0.95, 0.95), (0.95, 0.9025), (0.95, 0.9), (0.9, 0.9), (0.9, 0.81), (0.9, 0.7), (0.8, 0.6))
    variants = {"base: momentum (0.9, 0.8), head 16, others 1": _steepest()}
    variants |= {f"momentum {pair}": _steepest(Momentum(*pair)) for pair in pairs}
    for kind, scales in {"head": (1, 4, 8, 32), "embedding": (0.5, 2, 4), "gain": (0.25, 4)}.items():
        variants |= {f"{kind} {scale}": _steepest(**{kind: float(scale)}) for scale in scales}
    return variants


STUDIES = {
    "adamw": (_adamw, -6.0, 64),
    "adamw_128": (_adamw_finalists, -7.0, 128),
    "beyond_mup": (_beyond_mup, -4.0, 64),
}


def run_cell(cell: Cell) -> CellResult:
    torch.set_num_threads(1)
    make, _, _ = STUDIES[cell.settings["study"]]
    config = TrainConfig(width=cell.width, lr=2.0**cell.log2_lr, seed=cell.seed, steps=cell.steps)
    result = train(config, load(None), method=make()[cell.recipe])
    return CellResult(result.train_loss, result.val_loss, result.seconds, result.diverged)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[100])
    options = parser.parse_args()
    make, centre, width = STUDIES[options.study]
    names = tuple(make())
    search = Bracket(dict.fromkeys(names, centre), budget=7)
    config = SweepConfig(names, (width,), tuple(options.seeds), 120, search, {"study": options.study})
    summary = run(config, HERE / options.study, run_cell)
    rows = sorted(summary["recipes"], key=lambda row: row["best_loss"][0])
    print("| variant | log2 lr* | best loss |\n|---|---|---|")
    for row in rows:
        best = row["best_log2_lr"][0]
        print(f"| {row['recipe']} | {'edge' if best is None else f'{best:.2f}'} | {row['best_loss'][0]:.3f} |")


if __name__ == "__main__":
    main()
