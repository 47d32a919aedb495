"""The transfer study: every recipe's best learning rate at widths 32 to 256, over seeds, horizons, models and texts.

    python studies/transfer/run.py                     # what is missing of all parts; resumes, hours on 2 cores
    python studies/transfer/run.py beyond_mup adamw    # only the parts of these recipes
    python studies/transfer/run.py --time              # seconds a step of what is not timed yet; on an idle machine
    python studies/transfer/run.py --list              # what is finished and what is not

Every part has a directory of its own, in the format of `surefoot transfer`; `surefoot report` shows one, and
`python studies/report.py` writes tables and figures of docs/transfer.md and docs/other-recipes.md from all of them. The
second text is Debian's package wordnet-base.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from surefoot import recipes
from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.data.sources import load
from surefoot.experiment.files import dumps, write_atomic
from surefoot.experiment.reports import transfer as transfer_report
from surefoot.experiment.sweep.config import SweepConfig, Trial, TrialResult
from surefoot.experiment.sweep.search import Bracket, Grid
from surefoot.experiment.sweep.summary import transfer_rate
from surefoot.experiment.sweep.sweep import run
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train
from surefoot.experiment.training.methods import AdamW, Method, MupAdamW, Steepest
from surefoot.experiment.training.run import Run
from surefoot.momentum import Momentum
from surefoot.scaling import Constant, Keller, Moonlight, Natural

HERE = Path(__file__).parent
WIDTHS = (32, 64, 128, 256)
WORDNET = "/usr/share/wordnet"
STEP_SECONDS = HERE / "step_seconds.json"


def moonlight_tuned_first() -> recipes.Recipe:
    """Muon with the settings of studies/defaults, one at a time; those of studies/search came later."""
    table = dict(recipes.muon(Moonlight()).table)
    table["linear"] = replace(table["linear"], momentum=Momentum(0.8, 0.6))
    table["embedding"] = replace(table["embedding"], lr_scale=Constant(4.0))
    return recipes.Recipe("moonlight tuned", table)


METHODS: dict[str, tuple[Method, float]] = {
    "beyond_mup": (Steepest(recipes.beyond_mup()), -4.0),
    "adamw": (AdamW(), -6.5),
    "muon_keller": (Steepest(recipes.muon(Keller())), -3.0),
    "muon_moonlight": (Steepest(recipes.muon(Moonlight())), -6.0),
    "muon_moonlight_tuned": (Steepest(moonlight_tuned_first()), -5.0),
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
"""Name -> method, and the log2 rate around which its search starts."""


@dataclass(frozen=True)
class Part:
    """One recipe under one condition; `settings` are the fields of `TrainConfig` that differ, and "data"."""

    name: str
    recipe: str
    steps: int = 150
    seeds: int = 3
    widths: tuple[int, ...] = WIDTHS
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def directory(self) -> Path:
        """Directory of its results."""
        return HERE / self.name

    @property
    def config(self) -> SweepConfig:
        """The sweep that it runs."""
        search = Bracket({self.recipe: METHODS[self.recipe][1]}, budget=8)
        return SweepConfig((self.recipe,), self.widths, tuple(range(self.seeds)), self.steps, search, self.settings)

    def measure(self) -> None:
        """Run what is missing."""
        facts = {"corpus_sha256": corpus(self.settings.get("data")).sha256}
        summary = run(self.config, self.directory, run_trial, environment=facts)
        print(f"{self.name}\n{transfer_report.table(summary)}\n", flush=True)


@dataclass(frozen=True)
class EqualTime:
    """A recipe at the widest model for as many steps as fit into the time of 150 steps of AdamW, at its best rate."""

    recipe: str

    @property
    def directory(self) -> Path:
        """Directory of its results."""
        return HERE / f"{self.recipe}_equal_time"

    def measure(self) -> None:
        """Run what is missing; the rate is the best one of the 150-step part, the time per step that of --time."""
        seconds = json.loads(STEP_SECONDS.read_text())["seconds"]
        steps = round(150 * seconds["adamw"] / seconds[self.recipe])
        summary = json.loads((HERE / f"{self.recipe}_150" / "summary.json").read_text())["recipes"][0]
        grid = Grid((summary["best_loss_log2_lr"][-1],))
        run(SweepConfig((self.recipe,), WIDTHS[-1:], (0, 1, 2), steps, grid), self.directory, run_trial)


@dataclass(frozen=True)
class Regret:
    """The narrowest and the widest optimum of the 150-step part, both at the widest model on ten new seeds.

    Within a part the transferred rate is compared with the lowest of several noisy means, which is biased downwards;
    here both rates are fixed in advance.
    """

    recipe: str

    @property
    def directory(self) -> Path:
        """Directory of its results."""
        return HERE / f"{self.recipe}_regret"

    def rates(self) -> tuple[float, float]:
        """Return log2 of the transferred rate and of the best one."""
        summary = json.loads((HERE / f"{self.recipe}_150" / "summary.json").read_text())["recipes"][0]
        return transfer_rate(summary["best_log2_lr"][0]), transfer_rate(summary["best_log2_lr"][-1])

    def measure(self) -> None:
        """Run what is missing."""
        run(
            SweepConfig((self.recipe,), WIDTHS[-1:], tuple(range(5, 15)), 150, Grid(self.rates())),
            self.directory,
            run_trial,
        )


CLAIMED = ("beyond_mup",)  # recipes that the claims are about: more seeds, and the regret
PARTS = (
    *(Part(f"{recipe}_150", recipe, seeds=5 if recipe in CLAIMED else 3) for recipe in METHODS),
    *(Part(f"{recipe}_75", recipe, 75) for recipe in ("beyond_mup", "adamw")),
    Part("beyond_mup_400", "beyond_mup", 400),
    *(Part(f"beyond_mup_depth_{d}", "beyond_mup", widths=(64,), settings={"depth": d}) for d in (1, 4, 8)),
    *(Part(f"beyond_mup_batch_{b}", "beyond_mup", widths=(64,), settings={"batch_size": b}) for b in (4, 64)),
    *(
        Part(f"beyond_mup_{name}", "beyond_mup", widths=WIDTHS[:3], settings={"data": data})
        for name, data in (("wordnet", WORDNET), ("markov", "markov:64"))
    ),
    *(
        Part(f"beyond_mup_{model}", "beyond_mup", widths=WIDTHS[:3], settings={"model": model})
        for model in ("moe", "tied")
    ),
)
REGRET = tuple(Regret(recipe) for recipe in CLAIMED)
EQUAL_TIME = tuple(EqualTime(recipe) for recipe in METHODS)


def run_trial(trial: Trial) -> TrialResult:
    """Train one model on one thread."""
    torch.set_num_threads(1)
    settings = dict(trial.settings)
    text = corpus(settings.pop("data", None))
    config = TrainConfig(
        data_order="random", width=trial.width, lr=2.0**trial.log2_lr, seed=trial.seed, steps=trial.steps, **settings
    )
    result = train(config, text, method=METHODS[trial.recipe][0])
    return TrialResult(result.train_loss, result.val_loss, result.seconds, result.diverged)


@functools.cache
def corpus(path: str | None) -> Corpus:
    """Read the text, once per process."""
    return load(path)


def time_steps(rounds: int = 20) -> None:
    """Write every method's seconds per step at the widest model: the minimum of many, interleaved on one thread.

    Times of methods that were timed before stay, since the steps at equal time are computed from them; new methods are
    timed beside AdamW, and scaled by AdamW's old time over its new one.
    """
    torch.set_num_threads(1)
    earlier = json.loads(STEP_SECONDS.read_text())["seconds"] if STEP_SECONDS.exists() else {}
    running = {
        name: Run(
            TrainConfig(data_order="random", width=WIDTHS[-1], lr=2.0**centre, steps=10_000), corpus(None), method
        )
        for name, (method, centre) in METHODS.items()
        if name not in earlier or name == "adamw"
    }
    least = dict.fromkeys(running, float("inf"))
    for turn in range(rounds + 2):
        for name, training in running.items():
            start = time.perf_counter()
            training.advance()
            if turn >= 2:  # the first steps allocate memory
                least[name] = min(least[name], time.perf_counter() - start)
    unit = earlier.get("adamw", least["adamw"]) / least["adamw"]
    least = {name: earlier.get(name, seconds * unit) for name, seconds in (least | earlier).items()}
    write_atomic(STEP_SECONDS, dumps({"width": WIDTHS[-1], "threads": 1, "seconds": least}, indent=2) + "\n")
    for name, seconds in least.items():
        print(f"{name}: {1000 * seconds:.1f} ms, {seconds / least['adamw']:.2f} of adamw")


def main() -> None:
    """Run what is missing, or the timing, or list the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", choices=[*METHODS, []], metavar="recipe", help=", ".join(METHODS))
    parser.add_argument("--time", action="store_true", help="measure the seconds a step instead")
    parser.add_argument("--list", action="store_true", help="only say what is finished")
    options = parser.parse_args()
    if options.time:
        time_steps()
        return
    for part in (*PARTS, *REGRET, *EQUAL_TIME):
        if options.recipes and part.recipe not in options.recipes:
            continue
        if options.list:
            print(f"{part.directory.name}: {'' if (part.directory / 'summary.json').exists() else 'not '}finished")
        else:
            part.measure()


if __name__ == "__main__":
    main()
