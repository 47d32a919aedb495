"""Long runs: every recipe, published and tuned, at 20 and 80 tokens for each parameter that is not in a table.

    python studies/pretrain/text.py corpus.jsonl --cache packages
    surefoot tokens corpus.jsonl tokens --vocab 4096 --validation-one-in 50 --shard-tokens 20000000
    python studies/pretrain/run.py --data tokens                # what is missing; resumes; eight hours on 2 cores
    python studies/pretrain/run.py --data tokens --list         # what is finished and what is not
    python studies/pretrain/run.py --data tokens --ratios 80 --same-decay       # the default without its rule for decay
    python studies/pretrain/run.py --data tokens --model llama --width 128      # the same on another model or width
    python studies/pretrain/run.py --data tokens --device cuda                  # on a GPU

The reference GPT of depth 4, batches of 16 x 128 tokens, linear warm-up over a tenth of the steps and linear cool-down
to 0. Every recipe gets the same tuning at 20 tokens a parameter: a search of five rates with one seed, and the vertex
of the parabola around the best, as in `surefoot compare`. Then three fresh seeds run at it, the same for all. At 80 all
rates are half an octave lower, about what studies/sizes found for the default from 400 to 1600 steps: to tell two rates
half an octave apart takes more seeds than long runs can have. What was tuned before, other than the rate, is from
`studies/search`, in runs of 150 steps; its decay falls with the length of the run (`recipes.HorizonRule`). That rule,
and the default's rates for what writes into a residual stream, came after the tuning of the rates.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from surefoot import recipes
from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.data.sources import load
from surefoot.experiment.models.decoder import reference
from surefoot.experiment.sweep import fit, sweep
from surefoot.experiment.sweep.config import SweepConfig, Trial, TrialResult
from surefoot.experiment.sweep.search import Exact, Own
from surefoot.experiment.sweep.summary import points
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train
from surefoot.experiment.training.methods import Method, Steepest, method, moonlight_tuned
from surefoot.stabilise import DecoupledWeightDecay

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parent / "search")]

DEPTH, BATCH, CONTEXT, VOCAB = 4, 16, 128, 4096
RATIOS = (20, 80)
TOKENS = "SUREFOOT_PRETRAIN_TOKENS"  # the environment's variable that tells the worker processes where they are
TUNING_SEED, SEEDS = 700, (710, 711, 712)
BUDGET = 5
POWER = -0.25
"""Of the best rate in the steps, from the shorter horizon to the longer."""
CURVE = 24
"""Validation losses on the way of a run, beside its last."""

CENTRES = {
    "steady": -3.25,
    "moga_row_1.5": -2.0,
    "moga_row_2": -2.0,
    "moga_row_3": -2.0,
    "muon": -4.0,
    "muon_tuned": -4.0,
    "moonlight": -4.5,
    "moonlight_tuned": -4.0,
    "scion": -12.0,
    "adamw": -7.0,
    "mup_adamw": -7.0,
}
"""Where the search for each recipe's rate starts (log2), from the shorter runs of the other studies."""


SAME_DECAY = "steady_same_decay"
"""The default without its rule for the length of the run: decay 0.08, as in short runs."""


def muon_tuned() -> recipes.Recipe:
    """`moonlight_tuned` with Keller Jordan's factor on matrices in place of Moonlight's."""
    table = dict(moonlight_tuned().table)
    scale = recipes.muon().role("linear").lr_scale
    decay = DecoupledWeightDecay(0.085, scale)
    table["linear"] = replace(table["linear"], lr_scale=scale, stabiliser=decay)
    return recipes.Recipe("muon_tuned", table, horizon=recipes.HorizonRule())


def chosen(name: str, steps: int) -> Method:
    """A method of `CENTRES`: published ones by their names, tuned ones from the search.

    What was tuned, in runs of 150 steps, has its decay by the length of the run, as the default has.
    """
    from families import FAMILIES
    from winners import winner

    if name == SAME_DECAY:
        return Steepest(replace(recipes.steady(), horizon=None))
    if name == "muon_tuned":
        return Steepest(muon_tuned())
    if name not in ("scion", "adamw", "mup_adamw") and not name.startswith("moga_row_"):
        return method(name)
    family, _, p = name.partition("_row_")
    point = {**winner("moga_row"), "p": p} if p else winner(family)
    if "decay" in point:  # Scion has a radius instead
        point = {**point, "decay": recipes.HorizonRule().factor(steps) * point["decay"]}
    return FAMILIES["moga_row" if p else family].method(point)


@dataclass(frozen=True)
class Setting:
    """A model, its size, its data and its horizon."""

    model: str
    width: int
    ratio: int
    device: str = "cpu"

    @property
    def steps(self) -> int:
        """Optimizer steps: `ratio` tokens for each parameter that is in no table."""
        with torch.device("meta"):
            model = reference(self.model, self.width, DEPTH, 16, VOCAB)
        tables = sum(p.numel() for m in model.modules() for p in m.parameters(recurse=False) if _is_table(m))
        rest = sum(p.numel() for p in model.parameters()) - tables
        return round(self.ratio * rest / (BATCH * CONTEXT))

    def directory(self, stage: str) -> Path:
        """Directory of a stage's runs."""
        return HERE / f"{self.model}_{self.width}" / f"{self.ratio}_{stage}"

    def tuning(self) -> SweepConfig:
        """One seed: a search for each recipe's rate."""
        return self._config((TUNING_SEED,), Exact(CENTRES, BUDGET))

    def final(self) -> SweepConfig:
        """Fresh seeds at each recipe's rate."""
        return self._config(SEEDS, Own({recipe: (rate,) for recipe, rate in self.rates().items()}))

    def same_decay(self) -> SweepConfig:
        """The default's final runs, without its rule for the length of the run."""
        return replace(self.final(), recipes=(SAME_DECAY,), search=Own({SAME_DECAY: (self.rates()["steady"],)}))

    def rates(self) -> dict[str, float]:
        """The rate of each recipe, to a sixteenth of an octave: the shorter horizon's optimum, and less."""
        records = sweep.load(replace(self, ratio=RATIOS[0]).directory("tuning"))[1]
        found = {recipe: fit.optimum(points(records, recipe, self.width)) for recipe in CENTRES}
        best = {recipe: one.best_rate if one.log2_lr is None else one.log2_lr for recipe, one in found.items()}
        power = math.log2(self.ratio / RATIOS[0]) * POWER
        return {recipe: round(16 * (rate + power)) / 16 for recipe, rate in best.items() if rate is not None}

    @property
    def stages(self) -> tuple[str, ...]:
        """What is run, in order: only the shorter horizon is tuned."""
        return ("tuning", "final") if self.ratio == RATIOS[0] else ("final",)

    def measure(self, workers: int | None) -> None:
        """Tune at the shorter horizon, then run the fresh seeds."""
        for stage in self.stages:
            self.run(stage, workers)

    def run(self, stage: str, workers: int | None) -> None:
        """Run what is missing of one stage."""
        if not self.finished(stage):
            sweep.run(getattr(self, stage)(), self.directory(stage), run_trial, workers=workers)

    def finished(self, stage: str) -> bool:
        """Whether all runs of a stage were run."""
        return (self.directory(stage) / sweep.SUMMARY).exists()

    def _config(self, seeds: tuple[int, ...], search: Exact | Own) -> SweepConfig:
        settings: dict[str, Any] = {
            "model": self.model, "depth": DEPTH, "head_dim": 16, "batch_size": BATCH, "context": CONTEXT,
            "corpus": corpus().sha256, "device": self.device,
        }  # fmt: skip
        return SweepConfig(tuple(CENTRES), (self.width,), seeds, self.steps, search, settings)


def _is_table(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) or (isinstance(module, nn.Linear) and module.out_features == VOCAB)


def run_trial(trial: Trial) -> TrialResult:
    """Train one model on one thread, with validation losses on the way."""
    torch.set_num_threads(1)
    settings = dict(trial.settings)
    text = corpus()
    if settings.pop("corpus") != text.sha256:
        raise ValueError(f"{text.name} is not the text that the study was started with")
    config = TrainConfig(
        data_order="random", width=trial.width, lr=2.0**trial.log2_lr, seed=trial.seed, steps=trial.steps, **settings
    )
    curve: dict[str, float] = {}

    def keep(record: dict[str, Any]) -> None:
        if record.get("val_loss") is not None:
            curve[str(record["step"])] = record["val_loss"]

    every = max(1, trial.steps // CURVE)
    method = chosen(trial.recipe, trial.steps)
    result = train(config, text, method=method, on_step=keep, log_every=every, eval_every=every)
    return TrialResult(result.train_loss, result.val_loss, result.seconds, result.diverged, curve)


@functools.cache
def corpus() -> Corpus:
    """Open the tokens, once per process; their place is no part of the results."""
    return load(f"bin:{os.environ[TOKENS]}")


def main() -> None:
    """Run what is missing, or list it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of tokens")
    parser.add_argument("--model", default="gpt")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--ratios", type=int, nargs="+", default=RATIOS)
    parser.add_argument("--same-decay", action="store_true", help="the default alone, decay whatever the length")
    parser.add_argument("--list", action="store_true", help="only say what is finished")
    options = parser.parse_args()
    # glibc gives large blocks back to the system at every step and takes them again, page by page: a third of the time.
    os.environ |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}
    os.environ[TOKENS] = str(Path(options.data).resolve())
    for ratio in options.ratios:
        setting = Setting(options.model, options.width, ratio, options.device)
        if options.list:
            print(ratio, {stage: setting.finished(stage) for stage in setting.stages})
        elif options.same_decay:
            setting.run("same_decay", options.workers)
        else:
            setting.measure(options.workers)


if __name__ == "__main__":
    main()
