"""The search for the default settings: every variant at its own best learning rate, compared by loss.

    python studies/defaults/run.py beyond_mup    # one setting at a time around beyond_mup, the default at that time
    python studies/defaults/run.py adamw         # as many settings of AdamW
    python studies/defaults/run.py moonlight     # and of Muon under Moonlight's scale; moonlight_2: its second round
    python studies/defaults/run.py --table       # every variant's gain, from the committed results

Widths 32 and 64 (64 and 128 in `beyond_mup_3`), 120 steps, the demo's model and text, three seeds that no transfer
study uses. Resumes; the results are beside this file, in `<study>/results.jsonl`. `adamw_grid` and `adamw_grid_128` are
the coarse search, at one seed, that gave AdamW's starting point.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
import variants
from gains import HERE, table
from variants import Variants

from surefoot.experiment.data.sources import load
from surefoot.experiment.sweep.config import SweepConfig, Trial, TrialResult
from surefoot.experiment.sweep.search import Bracket
from surefoot.experiment.sweep.sweep import run
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train

SEEDS = (100, 101, 102)


@dataclass(frozen=True)
class Study:
    """Variants, the log2 rate around which the searches start, widths and seeds."""

    variants: Callable[[], Variants]
    centre: float
    widths: tuple[int, ...] = (32, 64)
    seeds: tuple[int, ...] = SEEDS


STUDIES = {
    "beyond_mup": Study(variants.beyond_mup, -4.0),
    "beyond_mup_2": Study(variants.beyond_mup_2, -3.5),
    "beyond_mup_3": Study(variants.beyond_mup_3, -3.5, (64, 128)),
    "adamw": Study(variants.adamw, -6.0),
    "moonlight": Study(variants.moonlight, -4.0),
    "moonlight_2": Study(variants.moonlight_2, -4.0),
    "adamw_grid": Study(variants.adamw_grid, -6.0, (64,), SEEDS[:1]),
    "adamw_grid_128": Study(variants.adamw_finalists, -7.0, (128,), SEEDS[:1]),
}


def run_trial(trial: Trial) -> TrialResult:
    """Train one variant."""
    torch.set_num_threads(1)
    variant = STUDIES[trial.settings["study"]].variants()[trial.recipe]
    config = TrainConfig(
        data_order="random",
        width=trial.width,
        lr=2.0**trial.log2_lr,
        seed=trial.seed,
        steps=trial.steps,
        **dict(variant.training),
    )
    result = train(config, load(None), method=variant.method)
    return TrialResult(result.train_loss, result.val_loss, result.seconds, result.diverged)


def measure(name: str) -> None:
    """Run what is missing of a study."""
    study = STUDIES[name]
    names = tuple(study.variants())
    search = Bracket(dict.fromkeys(names, study.centre), budget=7)
    run(SweepConfig(names, study.widths, study.seeds, 120, search, {"study": name}), HERE / name, run_trial)


def main() -> None:
    """Run what is missing of the studies, and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", choices=[*STUDIES, []], metavar="study", help=", ".join(STUDIES))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    for name in options.studies or ("beyond_mup", "beyond_mup_2", "beyond_mup_3", "adamw", "moonlight", "moonlight_2"):
        if not options.table:
            measure(name)
        print(f"\n{name}\n{table(name)}", flush=True)


if __name__ == "__main__":
    main()
