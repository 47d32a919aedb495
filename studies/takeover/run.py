"""What does a run lose, or gain, if `from_adamw` takes it over halfway?

    python studies/takeover/run.py            # what is missing; resumes, 8 minutes on one core
    python studies/takeover/run.py --table    # from the committed results, as docs/how-to/migrating.md has it

The reference GPT of width 64 and two blocks on the bytes of the standard library, 400 steps of 16 sequences of 64, a
tenth of warm-up, then linear decay. AdamW has torch's initial values, decay .1 and the best of the rates 2^-7 to 2^-5
in half octaves, by the validation loss of a seed that is used for nothing else. On three more seeds AdamW trains the
whole run, and `from_adamw(model, adamw)` takes its state after 200 steps and trains on with the default plan, on the
same batches and under the same schedule. No rate of Surefoot's was searched; how its rates follow from AdamW's was
decided after shorter trials on seeds 0 and 1, not on 2.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import surefoot as sf
from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.data.sources import load
from surefoot.experiment.files import Log, read_lines
from surefoot.experiment.models.decoder import reference
from surefoot.experiment.reports.style import markdown

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
STEPS, SMOOTHED, EVALUATION = 400, 20, 32
BETAS = ((0.9, 0.95),)
RATES, SEARCHED, SEEDS = (-7.0, -6.5, -6.0, -5.5, -5.0), 10, (0, 1, 2)


@functools.cache
def corpus() -> Corpus:
    """The bytes of the standard library."""
    return load()


def loss_of(model: nn.Module, split: str, seed: int, step: int) -> torch.Tensor:
    """The loss of a batch."""
    x, y = corpus().batch(split, seed, step, 16, 64)  # type: ignore[arg-type]
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def validate(model: nn.Module) -> float:
    """The loss on the same batches for every model."""
    return statistics.mean(float(loss_of(model, "validation", 0, i)) for i in range(EVALUATION))


def height(step: int) -> float:
    """The schedule, its peak 1."""
    return min((step + 1) / (STEPS / 10), (STEPS - step) / (STEPS * 9 / 10))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, schedule: LambdaLR, seed: int, steps: Iterable[int]
) -> Any:
    """Take these steps; their losses."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, "train", seed, step)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(round(float(loss.detach()), 4))
    return losses


def begun(betas: tuple[float, float], log2_lr: float, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, LambdaLR]:
    """AdamW before its first step."""
    torch.manual_seed(seed)
    model = reference("gpt", width=64, depth=2)
    adamw = torch.optim.AdamW(model.parameters(), lr=2.0**log2_lr, betas=betas, weight_decay=0.1)
    return model, adamw, LambdaLR(adamw, height)


def search(betas: tuple[float, float], log2_lr: float) -> dict[str, Any]:
    """AdamW's validation loss at a rate."""
    model, adamw, schedule = begun(betas, log2_lr, SEARCHED)
    train(model, adamw, schedule, SEARCHED, range(STEPS))
    return {"loss": validate(model)}


def switched(betas: tuple[float, float], log2_lr: float, seed: int) -> dict[str, Any]:
    """Both second halves of a run."""
    model, adamw, schedule = begun(betas, log2_lr, seed)
    half = STEPS // 2
    train(model, adamw, schedule, seed, range(half))
    other = copy.deepcopy(model)
    theirs = torch.optim.AdamW(other.parameters(), betas=betas)
    theirs.load_state_dict(adamw.state_dict())
    ours = sf.from_adamw(other, theirs)
    taken, rate = LambdaLR(ours, lambda step: height(half + step) / height(half)), rate_of_matrices(ours)
    losses = {
        "adamw": train(model, adamw, schedule, seed, range(half, STEPS)),
        "switched": train(other, ours, taken, seed, range(half, STEPS)),
    }
    return {"rate": rate, "losses": losses, "adamw": validate(model), "switched": validate(other)}


def rate_of_matrices(optimizer: torch.optim.Optimizer) -> float:
    """The rate that hidden matrices have."""
    return next(float(group["lr"]) for group in optimizer.param_groups if group["role"] == "linear")


def measure() -> None:
    """Run what is missing."""
    torch.set_num_threads(1)
    for betas in BETAS:
        for log2_lr in RATES:
            add({"betas": betas, "log2_lr": log2_lr, "seed": SEARCHED}, lambda b=betas, x=log2_lr: search(b, x))
        for seed in SEEDS:
            best = rate_of(betas)
            run = functools.partial(switched, betas, best, seed)
            add({"betas": betas, "log2_lr": best, "seed": seed}, run)


def add(key: dict[str, Any], run: Any) -> None:
    """Append a record, unless it is there."""
    key = json.loads(json.dumps(key))
    if not any(all(record[name] == x for name, x in key.items()) for record in records()):
        with Log(RESULTS) as log:
            log.append({**key, **run()})


def records() -> list[dict[str, Any]]:
    """All there are."""
    return read_lines(RESULTS) if RESULTS.exists() else []


def rate_of(betas: tuple[float, float]) -> float:
    """log2 of AdamW's best rate."""
    found = [r for r in records() if r["seed"] == SEARCHED and r["betas"] == list(betas)]
    return float(min(found, key=lambda record: record["loss"])["log2_lr"])


def smoothed(losses: list[float]) -> Any:
    """Means of so many steps."""
    return np.convolve(losses, np.ones(SMOOTHED) / SMOOTHED, "valid")


def table() -> str:
    """A row for each AdamW: its rate, both losses, and how far the switched run's is above AdamW's at most."""
    rows = []
    for betas in BETAS:
        found = [r for r in records() if r["seed"] != SEARCHED and r["betas"] == list(betas)]
        if not found:
            continue
        above = [smoothed(r["losses"]["switched"]) - smoothed(r["losses"]["adamw"]) for r in found]
        cells = [statistics.mean(r[key] for r in found) for key in ("adamw", "switched")]
        ends = ", ".join(f"{r['switched'] - r['adamw']:+.3f}" for r in found)
        rates = f"2^{found[0]['log2_lr']:g}", f"{statistics.mean(r['rate'] for r in found):.4f}"
        worst = f"{max(x.max() for x in above):+.3f}"
        rows.append([", ".join(f"{b:g}" for b in betas), *rates, *(f"{x:.3f}" for x in cells), ends, worst])
    head = ["AdamW's betas", "its best rate", "rate of matrices after the switch", "loss, AdamW", "loss, switched"]
    return markdown([*head, "difference by seed", "most above AdamW's on the way"], rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only print the table")
    if not parser.parse_args().table:
        measure()
    print(table())


if __name__ == "__main__":
    main()
