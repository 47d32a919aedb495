"""Models as people wire them: families of `transformers` trained from scratch, by the default plan and by AdamW.

    python studies/wiring/run.py                 # what is missing of all families; resumes, 40 minutes on 2 cores
    python studies/wiring/run.py gpt2 bert       # only these families
    python studies/wiring/run.py bert --steps 400    # longer, in a part of its own
    python studies/wiring/run.py --table         # from the committed results, as docs/transfer.md has it

Two blocks, four heads, 64 positions, 16 sequences of bytes of the standard library's top-level files in name order (the
last tenth for validation), 100 steps, a tenth of warm-up, then linear decay. `steady` is `SteepestDescent(model, lr)`
after `plan.initialise_`; `steady_whole` is the same with one norm for all heads of queries or keys; `beyond_mup` is the
earlier default, also with a head of its own (`untied`); `adamw` is torch's with the model's own initial values. Each
has at most seven rates, chosen by the same search.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import surefoot as sf
from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.reports.style import markdown, plus_minus
from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.config import SweepConfig, Trial, TrialResult
from surefoot.experiment.sweep.search import Bracket
from surefoot.experiment.sweep.summary import points
from surefoot.experiment.sweep.sweep import load, run

HERE = Path(__file__).parent
STEPS, SEEDS, BATCH, RATES = 100, 3, 16, 7
MORE_SEEDS = {"gpt2": 8, "bert": 8, "whisper": 8}
"""Families whose curves are so flat that three seeds show neither a drift nor a difference."""
FAMILIES = ("gpt2", "opt", "bert", "whisper", "llama", "qwen3", "gemma", "mixtral")
PARTS = (*((family, STEPS) for family in FAMILIES), ("bert", 400))
"""What the page shows: families and steps."""
WIDTHS = {"gpt2": (32, 64, 128)}
EARLIER, UNTIED = "beyond_mup", "beyond_mup, untied"
CENTRES = {EARLIER: -3.5, "adamw": -6.0, UNTIED: -3.5}
DEFAULTS = {"steady_whole": -3.5, "steady": -3.0}
"""Runs of the default, and of it without a norm for each head, are in directories of their own, on the same seeds."""
BETAS, DECAY = (0.7, 0.9), 0.1
VALIDATION_BATCHES = 16


@functools.cache
def corpus() -> Corpus:
    """The bytes of the standard library's top-level files, in name order."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(path.read_bytes() for path in files), dtype=np.uint8)
    cut = len(text) * 9 // 10
    return Corpus(text[:cut], text[cut:], "top-level files", hashlib.sha256(text.tobytes()).hexdigest(), len(files))


def optimizer(
    way: str, model: nn.Module, lr: float, seed: int, inputs: torch.Tensor | None = None
) -> torch.optim.Optimizer:
    """AdamW, or a recipe's initial values and steps, of a plan by a forward pass if inputs are given."""
    if way == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=DECAY)
    recipe = sf.recipes.steady(per_head=way == "steady") if way in DEFAULTS else sf.recipes.beyond_mup()
    plan = sf.Plan.of(model, recipe, inputs=inputs)
    plan.initialise_(model, seed)
    return sf.SteepestDescent(model, plan, lr=lr)


def run_trial(trial: Trial, family: str) -> TrialResult:
    """Train one model of a family."""
    from families import FAMILIES as kinds

    return train(trial, kinds[family])


def train(trial: Trial, kind: Any, inputs: torch.Tensor | None = None) -> TrialResult:
    """Train one model on one thread."""
    torch.set_num_threads(1)
    model = kind.build(trial.width, trial.seed, tied=kind.tied and trial.recipe != UNTIED)
    steps = optimizer(trial.recipe, model, 2.0**trial.log2_lr, trial.seed, inputs)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        steps, lambda i: min((i + 1) / (trial.steps / 10), (trial.steps - i) / (trial.steps * 9 / 10))
    )
    start, losses = time.perf_counter(), []
    for step in range(trial.steps):
        steps.zero_grad()
        loss = batch_loss(kind, model, "train", trial.seed, step)
        loss.backward()
        steps.step()
        schedule.step()
        losses.append(float(loss.detach()))
    seconds = time.perf_counter() - start
    with torch.no_grad():
        found = [float(batch_loss(kind, model, "validation", 0, i)) for i in range(VALIDATION_BATCHES)]
    return TrialResult(float(np.mean(losses[-10:])), float(np.mean(found)), seconds)


def batch_loss(kind: Any, model: nn.Module, split: str, seed: int, step: int) -> torch.Tensor:
    """The loss of one batch, a function of split, seed and step."""
    tokens, targets = corpus().batch(split, seed, step, BATCH, 64)  # type: ignore[arg-type]
    return kind.loss(model, tokens, targets, torch.Generator().manual_seed(seed * 10**6 + step + (split == "train")))


def part(family: str, steps: int, of: str = "") -> Path:
    """The directory of a family's results, or of the default's alone."""
    return HERE / "_".join(filter(None, (family, "" if steps == STEPS else str(steps), of)))


def measure(family: str, steps: int) -> None:
    """Run what is missing of a family."""
    from families import FAMILIES as kinds

    seeds = tuple(range(MORE_SEEDS.get(family, SEEDS) if steps == STEPS else SEEDS))
    earlier = (EARLIER, "adamw", UNTIED) if kinds[family].tied else (EARLIER, "adamw")
    for of, ways, centres in (("", earlier, CENTRES), *((way, (way,), {way: at}) for way, at in DEFAULTS.items())):
        sweep = SweepConfig(ways, WIDTHS.get(family, (32, 128)), seeds, steps, Bracket(centres, budget=RATES))
        cell = functools.partial(run_trial, family=family)
        run(sweep, part(family, steps, of), cell, environment={"corpus_sha256": corpus().sha256})


def table(parts: Iterable[tuple[str, int]] = PARTS) -> str:
    """Markdown: losses at the best rates, their differences from the first way's on the same seeds, drifts, regrets."""
    rows = []
    for family, steps in parts:
        ways = (*reversed(DEFAULTS), "")
        found = [load(path) for of in ways if ((path := part(family, steps, of)) / "summary.json").exists()]
        if not found:
            continue
        records = [record for _, part_records in found for record in part_records]
        ways = [way for summary, _ in found for way in summary["config"]["recipes"]]
        widths = found[0][0]["config"]["widths"]
        best = {}
        for way in ways:
            optima = [fit.optimum(points(records, way, width)) for width in widths]
            drift = fit.drift(optima[0], optima[-1])
            cells = []
            for width, optimum in zip(widths, optima, strict=True):
                best[way, width] = fit.lowest(points(records, way, width))
                against = fit.difference(best[way, width], best[ways[0], width])
                rate = "?" if optimum.best_rate is None else f"2^{optimum.best_rate:g}"
                value = "" if way == ways[0] else f" ({against.value:+.2f}{plus_minus(against.interval, 2)})"
                cells.append(f"{width}: {np.mean(list(best[way, width].values())):.2f} at {rate}{value}")
            reused = fit.regret(points(records, way, widths[-1]), optima[0].best_rate) if optima[0].best_rate else None
            lost = (
                "?" if reused is None or reused.value is None else f"{reused.value:.2f}{plus_minus(reused.interval, 2)}"
            )
            moved = "not known" if drift.value is None else f"{drift.value:+.2f}{plus_minus(drift.interval, 2)}"
            rows.append([family if steps == STEPS else f"{family}, {steps} steps", way, "; ".join(cells), moved, lost])
    head = ["family", "way", "width: loss at best rate (against the first way)", "drift in octaves", "regret"]
    return markdown(head, rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="family", help=f"of {', '.join(FAMILIES)}; default: all")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--table", action="store_true", help="only print the table")
    options = parser.parse_args()
    if unknown := [name for name in options.families if name not in FAMILIES]:
        parser.error(f"unknown family {unknown[0]!r}; choose of {', '.join(FAMILIES)}")
    parts = tuple((family, options.steps) for family in options.families) or PARTS
    for family, steps in () if options.table else parts:
        measure(family, steps)
    print(table(parts))


if __name__ == "__main__":
    main()
