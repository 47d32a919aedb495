"""The transfer study on a GPU: best learning rates at widths 256 to 2048, of models with 4,096 tokens and depth 4.

    python studies/transfer/gpu.py                   # what is missing; the same command resumes
    python studies/transfer/gpu.py --minutes 9       # stops after that time; unfinished runs start again
    python studies/transfer/gpu.py --smoke           # the same at toy size on a CPU, to test the command

Results are in `gpu/`, in the format of `surefoot transfer`; other seeds need another `--out`.

On an H200 widths 256 to 1024 take five minutes with six workers, which share the device: alone a run of `steady` at
width 1024 takes about 6 s of it, and at 2048 some eight times as long. The committed run left 2048 out:
`--widths 256 512 1024 --workers 6`. The table is in docs/transfer.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from surefoot import recipes
from surefoot.experiment.data.sources import load
from surefoot.experiment.reports import transfer as transfer_report
from surefoot.experiment.reports.report import draw
from surefoot.experiment.reports.style import markdown
from surefoot.experiment.sweep.config import SweepConfig, Trial, TrialResult
from surefoot.experiment.sweep.progress import Callback, Progress, on_stderr
from surefoot.experiment.sweep.search import Bracket
from surefoot.experiment.sweep.sweep import run
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train
from surefoot.experiment.training.methods import AdamW, Method, Steepest, moonlight_tuned

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Size:
    """Size of the study; `settings` are fields of `TrainConfig`."""

    out: Path
    data: str
    widths: tuple[int, ...]
    steps: int
    budget: int
    settings: Mapping[str, Any]

    def config(self, seeds: int, sha256: str) -> SweepConfig:
        """Return the sweep; it includes the corpus' hash, since the text differs between versions of Python."""
        search = Bracket({name: centre for name, (_, centre) in METHODS.items()}, self.budget)
        settings = {**self.settings, "head_dim": 64, "autocast": "bfloat16", "data": self.data, "corpus": sha256}
        return SweepConfig(tuple(METHODS), self.widths, tuple(range(seeds)), self.steps, search, settings)


FULL = Size(
    out=HERE / "gpu",
    data="bpe:4096",
    widths=(256, 512, 1024, 2048),
    steps=300,
    budget=8,
    settings={"depth": 4, "batch_size": 32, "context": 256, "device": "cuda"},
)
SMOKE = Size(
    out=Path("runs/gpu_smoke"),
    data=f"bpe:300:{HERE.parents[1] / 'docs'}",
    widths=(64, 128),
    steps=4,
    budget=3,
    settings={"depth": 1, "batch_size": 2, "context": 32, "device": "cpu"},
)


METHODS: dict[str, tuple[Method, float]] = {
    "steady": (Steepest(recipes.steady()), -3.5),
    "moonlight_tuned": (Steepest(moonlight_tuned()), -6.0),
    "adamw": (AdamW(), -9.5),
}
"""Name -> method, and the log2 rate around which its search starts."""

corpus = functools.cache(load)  # once per process


def run_trial(trial: Trial) -> TrialResult:
    """Train one model."""
    torch.set_num_threads(1)
    settings = dict(trial.settings)
    text = corpus(settings.pop("data"))
    assert text.sha256 == settings.pop("corpus")
    config = TrainConfig(
        data_order="random", width=trial.width, lr=2.0**trial.log2_lr, seed=trial.seed, steps=trial.steps, **settings
    )
    result = train(config, text, method=METHODS[trial.recipe][0])
    return TrialResult(result.train_loss, result.val_loss, result.seconds, result.diverged)


def table() -> str:
    """Best rate of each width, drift and regret, and both losses at the widest model, of the committed run."""
    summary = json.loads((FULL.out / "summary.json").read_text(encoding="utf-8"))
    rows = []
    for found in summary["recipes"]:
        best = [f"2^{rate:.2f}" for rate in found["best_log2_lr"]]
        losses = [f"{found[name][-1]:.3f}" for name in ("best_loss", "train_loss")]
        rows.append([found["recipe"], *best, f"{found['drift_octaves']:+.2f}", f"{found['regret_nats']:.3f}", *losses])
    widths = summary["config"]["widths"]
    head = ["recipe", *(f"best lr at {width}" for width in widths), "drift in octaves", f"regret at {widths[-1]}"]
    on = summary["environment"]
    about = f"{on['gpu']}, torch {on['torch']}, CUDA {on['cuda']}, {on['date'][:10]}; one seed, no intervals."
    return f"{markdown([*head, 'validation loss there', 'training loss'], rows)}\n\n{about}"


class OutOfTime(Exception):
    """The sweep was stopped; the message says how many runs are finished."""


def until(deadline: float, show: Callback) -> Callback:
    """Return a callback that shows progress and stops the sweep after the first run that ends past the deadline."""

    def move(progress: Progress) -> None:
        show(progress)
        if time.monotonic() > deadline:
            raise OutOfTime(f"{progress.finished} of about {progress.expected} runs are finished")

    return move


def main() -> None:
    """Run the study until it is finished or the time is over."""
    deadline = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="run directory, resumed if it exists (default: gpu beside this file)")
    parser.add_argument("--seeds", type=int, default=1, help="seeds per cell; three give intervals")
    parser.add_argument("--widths", type=int, nargs="+", help="widths of the models, ascending (default: all)")
    parser.add_argument("--workers", type=int, default=2, help="processes that share the GPU")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop at the first run that ends later")
    parser.add_argument("--smoke", action="store_true", help="toy size on a CPU, into runs/gpu_smoke")
    options = parser.parse_args()
    if not (options.smoke or torch.cuda.is_available()):
        parser.error("torch finds no GPU here; --smoke runs the same command at toy size on a CPU")
    size = SMOKE if options.smoke else FULL
    size = replace(size, widths=tuple(options.widths or size.widths))
    out = options.out or size.out
    config = size.config(options.seeds, corpus(size.data).sha256)
    facts = {} if options.smoke else {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    deadline += 60 * options.minutes
    try:
        with on_stderr() as show:
            summary = run(
                config, out, run_trial, workers=options.workers, progress=until(deadline, show), environment=facts
            )
    except OutOfTime as stop:
        print(f"{options.minutes:g} minutes are over: {stop}; the same command goes on")
        return
    print(f"{transfer_report.table(summary)}\n\npicture: {draw(out)}")


if __name__ == "__main__":
    main()
