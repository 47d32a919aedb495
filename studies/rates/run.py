"""Is the rate that a run's length gives the best one? A search around it on settings that its law does not know.

    python studies/rates/run.py                          # what is missing of all settings; resumes
    python studies/rates/run.py --workers 2 --group seen
    python studies/rates/run.py --recipes steady adamw   # the rivals' own search of each setting, too
    python studies/rates/run.py "hf gpt2 96, bpe 1k" --recipes steady_two   # as before decisions 34 and 35
    python studies/rates/run.py "hf gpt2" --recipes steady_small       # and tied tables as before (decision 32)
    python studies/rates/run.py "hf gpt2" --recipes steady_even        # and all matrices with one decay (decision 31)
    python studies/rates/run.py "hf gpt2" --recipes steady_quarter     # and biases at eta / 4 (decision 30)
    python studies/rates/run.py "hf gpt2" --recipes steady_fresh       # 18 other seeds: the given rate and the lowest

Each setting is a model, its data and the length of a run. `steady` is `Plan.of(model, run=Run(steps, tokens))` with its
initial values; the schedule is `run.schedule`. The search starts at the rate that the run gives, so that rate is run,
and goes on in octaves and half octaves until the best rate is interior. Windows are drawn anew at every step. Settings
are `seen` (a recipe may be mended after them) or `held` (named here before any of them was run; nothing was chosen
after them). `python studies/report.py` makes docs/transfer.md's table from the results.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import statistics
import subprocess
import sys
import time
import unittest.mock
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from surefoot.discovery import find, tied
from surefoot.experiment.data.sources import load
from surefoot.experiment.files import Log, read_lines
from surefoot.experiment.models.decoder import Decoder
from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.search import next_rates
from surefoot.experiment.training.methods import METHODS
from surefoot.scaling import Constant

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
from rates.settings import SETTINGS, Setting  # noqa: E402

BUDGET = 8
STEADY = sf.recipes.steady()


def at(kind: str, scale: float, decay: float) -> sf.Role:
    """A role of the default with another factor and decay."""
    by = Constant(scale)
    return replace(STEADY.role(kind), lr_scale=by, stabiliser=sf.DecoupledWeightDecay(decay, by))


TWO = replace(STEADY, table={**STEADY.table, "heads": at("heads", 2.0, 0.2), "conv": at("conv", 1.0, 0.08)})
EVEN = replace(TWO, table={**TWO.table, "heads": at("heads", 2.0, 0.08)})
QUARTER = replace(EVEN, table={**EVEN.table, "bias": replace(EVEN.role("bias"), lr_scale=Constant(0.25))})
BEFORE = {"steady_small": TWO, "steady_even": EVEN, "steady_quarter": QUARTER}
"""The default as it was before decision 32, the latest first."""
OURS = {"steady": STEADY, "steady_fresh": STEADY, "steady_two": TWO, **BEFORE}
FRESH = range(840, 858)
"""Seeds that no search had: the lowest of several noisy means is lower than it deserves."""
CENTRES = {"adamw": -6.0, "moonlight_tuned": -3.5}
EVALUATION = 16  # batches of the validation loss


@functools.cache
def data(name: str | None) -> tuple[Any, Any, int]:
    """Training data, validation data and the number of classes."""
    if (name or "").startswith("digits"):
        from sklearn.datasets import load_digits

        digits = load_digits()
        pictures = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
        labels = torch.tensor(digits.target)
        return (pictures[:1400], labels[:1400]), (pictures[1400:], labels[1400:]), 10
    corpus = load(name)
    return corpus.train, corpus.validation, corpus.vocab


def batches(name: str | None, setting: Setting, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of a step, in a random order, then again."""
    train, _, _ = data(name)
    rng = np.random.default_rng(seed)
    if setting.pictures:
        while True:
            chosen = torch.tensor(rng.integers(len(train[1]), size=setting.batch))
            pictures = train[0][chosen]
            yield _shifted(pictures, rng) if name == "digits, shifted" else pictures, train[1][chosen]
    while True:
        starts = rng.integers(len(train) - setting.context, size=setting.batch)
        yield _windows(train, starts, setting.context)


def _shifted(pictures: Tensor, rng: np.random.Generator) -> Tensor:
    """Each picture `(B, 1, 8, 8)` moved by -1, 0 or 1 pixel in both directions over the background."""
    corners = rng.integers(3, size=(2, len(pictures), 1, 1))
    row, column = (torch.tensor(corners[0]) + torch.arange(8)[:, None], torch.tensor(corners[1]) + torch.arange(8))
    wide = F.pad(pictures, (1, 1, 1, 1), value=-1.0)[:, 0]
    return wide[torch.arange(len(wide))[:, None, None], row, column][:, None]


def _windows(tokens: Any, starts: Any, context: int) -> tuple[Tensor, Tensor]:
    rows = torch.tensor(np.stack([tokens[start : start + context + 1] for start in starts]).astype(np.int64))
    return rows[:, :-1], rows[:, 1:].flatten()


@torch.no_grad()
def validate(model: nn.Module, setting: Setting) -> float:
    """The loss on the same validation data for every seed."""
    _, held, _ = data(setting.data)
    if setting.pictures:
        return float(F.cross_entropy(model(held[0]), held[1]))
    rng = np.random.default_rng(0)
    drawn = [rng.integers(len(held) - setting.context, size=32) for _ in range(EVALUATION)]
    pairs = (_windows(held, starts, setting.context) for starts in drawn)
    return statistics.mean(float(F.cross_entropy(model(x).flatten(0, -2), y)) for x, y in pairs)


def measure(recipe: str, name: str, log2_lr: float, seed: int) -> dict[str, Any]:
    """Train one model, and write a line."""
    for record in records(recipe, name):
        if (record["log2_lr"], record["seed"]) == (log2_lr, seed):
            return record
    setting, start = SETTINGS[name], time.perf_counter()
    torch.manual_seed(seed)
    model = setting.model(data(setting.data)[2])
    if recipe in OURS:
        passes = [each for each in find.OF_PARAMETERS if recipe not in BEFORE or each is not tied.small_rows]
        with unittest.mock.patch.object(find, "OF_PARAMETERS", passes):
            plan = sf.Plan.of(model, OURS[recipe], run=setting.run)
        if setting.initialise:
            plan.initialise_(model, seed)
        optimizer: torch.optim.Optimizer = sf.SteepestDescent(model, plan, lr=2.0**log2_lr)
    else:
        method = METHODS[recipe].over(setting.steps)
        if setting.initialise and (
            recipe != "adamw" or isinstance(model, Decoder)
        ):  # others keep their own under AdamW
            method.initialise_(model, seed)
        optimizer = method.optimizer(model, 2.0**log2_lr)
    schedule, losses = setting.run.schedule(optimizer), []
    for _, (x, y) in zip(range(setting.steps), batches(setting.data, setting, seed), strict=False):
        loss = F.cross_entropy(model(x).flatten(0, -2), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
    last = losses[-max(1, setting.steps // 10) :]
    val_loss = validate(model.eval(), setting) if math.isfinite(losses[-1]) else math.nan
    found = {"val_loss": val_loss, "train_loss": statistics.mean(last)}
    kept = {key: x if math.isfinite(x) else None for key, x in found.items()}
    record = {"log2_lr": log2_lr, "seed": seed, **kept, "seconds": round(time.perf_counter() - start, 1)}
    with Log(_path(recipe, name)) as log:
        log.append(record)
    return record


def _path(recipe: str, name: str) -> Path:
    words = "".join(letter if letter.isalnum() else " " for letter in name).split()
    return HERE / recipe / f"{'_'.join(words)}.jsonl"


def records(recipe: str, name: str) -> list[dict[str, Any]]:
    """The runs of a setting that there are."""
    path = _path(recipe, name)
    return read_lines(path) if path.exists() else []


def given(recipe: str, setting: Setting) -> float:
    """log2 of the rate at which a search starts: what the run gives."""
    if recipe in CENTRES:
        return CENTRES[recipe]
    return round(math.log2(sf.recipes.steady().rate(setting.run)) * 64) / 64


def curve(recipe: str, name: str) -> dict[float, dict[int, float]]:
    """Rate -> seed -> validation loss; a run that diverged has an infinite one."""
    found: dict[float, dict[int, float]] = {}
    for record in records(recipe, name):
        loss = record["val_loss"]
        found.setdefault(record["log2_lr"], {})[record["seed"]] = math.inf if loss is None else loss
    return {rate: found[rate] for rate in sorted(found)}


def means(recipe: str, name: str) -> dict[float, float | None]:
    """Rate -> mean loss of the rates that all seeds have been run at; None where one diverged."""
    found = curve(recipe, name).items()
    whole = {
        rate: statistics.mean(losses.values()) for rate, losses in found if len(losses) == len(SETTINGS[name].seeds)
    }
    return {rate: mean if math.isfinite(mean) else None for rate, mean in whole.items()}


def search(recipe: str, name: str) -> None:
    """Run what is missing of a search, or of its first and its lowest rate on other seeds."""
    start = given(recipe, SETTINGS[name])
    if recipe == "steady_fresh":
        for rate, seed in itertools.product((start, lowest("steady", name)), FRESH):
            measure(recipe, name, rate, seed)
    else:
        while rates := next_rates(means(recipe, name), start, BUDGET):
            for rate, seed in itertools.product(rates, SETTINGS[name].seeds):
                measure(recipe, name, rate, seed)
    print(f"{recipe}, {name}: {regret(recipe, name)}", flush=True)


def lowest(recipe: str, name: str) -> float:
    """The rate whose mean loss is the lowest of a search."""
    found = {rate: mean for rate, mean in means(recipe, name).items() if mean is not None}
    return min(found, key=found.__getitem__)


def regret(recipe: str, name: str) -> fit.Estimate:
    """The loss at the rate that the search started at minus the lowest of the search, paired over seeds."""
    losses = curve(recipe, name)
    return fit.difference(losses[given(recipe, SETTINGS[name])], losses[lowest(recipe.removesuffix("_fresh"), name)])


def work(recipes: list[str], names: list[str]) -> None:
    """Take one search after the other that no other process has taken."""
    torch.set_num_threads(1)
    for recipe, name in itertools.product(recipes, names):
        path = _path(recipe, name).with_suffix(".lock")
        path.parent.mkdir(exist_ok=True)
        try:
            with filelock.FileLock(path, timeout=0):
                search(recipe, name)
        except filelock.Timeout:
            continue


def main() -> None:
    """Run what is missing, in as many processes as there are workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="settings; default: all of the group")
    parser.add_argument("--group", choices=("seen", "held", "all"), default="all")
    parser.add_argument("--recipes", nargs="+", choices=(*OURS, *CENTRES), default=["steady"])
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    groups = {"seen": (False,), "held": (True,), "all": (False, True)}[options.group]
    names = options.names or [name for name, setting in SETTINGS.items() if setting.held in groups]
    os.environ |= {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}
    if os.environ.pop("SUREFOOT_RATES_WORKER", None):
        work(options.recipes, names)
        return
    os.environ["SUREFOOT_RATES_WORKER"] = "1"
    workers = [subprocess.Popen([sys.executable, *sys.argv]) for _ in range(options.workers)]
    sys.exit(max(worker.wait() for worker in workers))


if __name__ == "__main__":
    main()
