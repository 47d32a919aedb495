"""Fine-tune a model that AdamW trained, by AdamW, Surefoot, and LoRA with each: the new loss, and the old one kept.

    python studies/finetuning/run.py            # what is missing; resumes, 15 minutes on one core
    python studies/finetuning/run.py --table    # from the committed results, as docs/how-to/fine-tuning.md has it

The reference GPT of width 64 and two blocks, trained by AdamW for 300 steps on Python (the standard library's top-level
files), then for 60 steps on English (Python's own manual, `pydoc_data/topics.py`), both as bytes, 16 sequences of 64 a
step, a tenth of warm-up and linear decay. LoRA has rank 4 on every linear layer of the blocks, all else is frozen.
Every method has the same search: rates in octaves around a first guess until the best is interior, eight at most, by
the mean loss of the three seeds on held-out English.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import statistics
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import surefoot as sf
from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.files import Log, read_lines
from surefoot.experiment.models.decoder import reference
from surefoot.experiment.reports.style import markdown
from surefoot.experiment.sweep.search import next_rates

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
PRETRAINED, STEPS, RANK, BUDGET, EVALUATION, SEEDS = 300, 60, 4, 8, 16, (0, 1, 2)
BETAS, RATE = (0.9, 0.95), 2.0**-6
WAYS = {
    "AdamW": -9.0,
    "Surefoot, the default's decay": -7.0,
    "Surefoot, no decay": -7.0,
    "Surefoot, PostClip(1.2), relative": -7.0,
    "AdamW, LoRA": -7.0,
    "Surefoot, LoRA": -5.0,
}
"""The ways, and log2 of the rate that a search starts at."""


class LoRA(nn.Module):
    """A frozen layer plus a product of low rank, which starts at 0."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(base.in_features, RANK, bias=False), nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The sum."""
        y: Tensor = self.base(x) + self.b(self.a(x))
        return y


@functools.cache
def corpora() -> Mapping[str, Corpus]:
    """Python, and English; the last tenth of each is held out."""
    root, found = Path(sysconfig.get_path("stdlib")), {}
    for name, files in (("Python", sorted(root.glob("*.py"))), ("English", [root / "pydoc_data" / "topics.py"])):
        text = np.frombuffer(b"".join(path.read_bytes() for path in files), dtype=np.uint8)
        cut = len(text) * 9 // 10
        found[name] = Corpus(text[:cut], text[cut:], name, "", len(files))
    return found


def loss_of(model: nn.Module, text: str, split: str, seed: int, step: int) -> Tensor:
    """The loss of a batch."""
    x, y = corpora()[text].batch(split, seed, step, 16, 64)  # type: ignore[arg-type]
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def validate(model: nn.Module) -> dict[str, float]:
    """The loss on both texts."""
    losses = {text: [float(loss_of(model, text, "validation", 0, i)) for i in range(EVALUATION)] for text in corpora()}
    return {text: statistics.mean(own) for text, own in losses.items()}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, text: str, seed: int, steps: int) -> None:
    """Train for these steps, a tenth of warm-up, then linear decay."""
    schedule = LambdaLR(optimizer, lambda i: min((i + 1) / (steps / 10), (steps - i) / (steps * 9 / 10)))
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, text, "train", seed, step).backward()
        optimizer.step()
        schedule.step()


@functools.cache
def pretrained(seed: int) -> Mapping[str, Tensor]:
    """Weights that AdamW has trained on Python."""
    torch.manual_seed(seed)
    model = reference("gpt", width=64, depth=2)
    adamw = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=0.1)
    train(model, adamw, "Python", seed, PRETRAINED)
    return model.state_dict()


def start(seed: int) -> nn.Module:
    """The pretrained model."""
    model = reference("gpt", width=64, depth=2)
    model.load_state_dict(pretrained(seed))
    return model


def with_lora(model: nn.Module, seed: int) -> nn.Module:
    """The model, all of it frozen, with a product of low rank beside every linear layer of its blocks."""
    torch.manual_seed(seed)
    model.requires_grad_(False)
    for name, layer in [*model.named_modules()]:
        if isinstance(layer, nn.Linear) and name.startswith("blocks."):
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, LoRA(layer))
    return model


def optimizer_of(way: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """The optimizer of a way."""
    if way.startswith("AdamW"):
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=lr, betas=BETAS, weight_decay=0.0)
    if "decay" in way and "no decay" not in way:
        return sf.SteepestDescent(model, sf.Plan.of(model), lr=lr)
    plan = sf.Plan.of(model, stabiliser=sf.PostClip(1.2) if "PostClip" in way else sf.Free(), head="head")
    return sf.SteepestDescent(model, plan.relative_to(model) if "PostClip" in way else plan, lr=lr)


def measure(way: str, log2_lr: float, seed: int) -> None:
    """Fine-tune one model, unless that is done."""
    key = {"way": way, "log2_lr": log2_lr, "seed": seed}
    if any(all(record[name] == x for name, x in key.items()) for record in records()):
        return
    model = start(seed)
    model = with_lora(model, seed) if "LoRA" in way else model
    train(model, optimizer_of(way, model, 2.0**log2_lr), "English", seed, STEPS)
    with Log(RESULTS) as log:
        log.append({**key, **validate(model)})


def records() -> list[dict[str, Any]]:
    """All there are."""
    return read_lines(RESULTS) if RESULTS.exists() else []


def means(way: str, text: str = "English") -> dict[float, float | None]:
    """Rate -> mean loss of the seeds, of the rates that all have been run at."""
    found: dict[float, list[float]] = {}
    for record in records():
        if record["way"] == way:
            found.setdefault(record["log2_lr"], []).append(record[text])
    whole = {rate: statistics.mean(losses) for rate, losses in sorted(found.items()) if len(losses) == len(SEEDS)}
    return {rate: mean if math.isfinite(mean) else None for rate, mean in whole.items()}


def run() -> None:
    """Run what is missing."""
    torch.set_num_threads(1)
    for seed in SEEDS:
        if not any(record["way"] == "before" and record["seed"] == seed for record in records()):
            with Log(RESULTS) as log:
                log.append({"way": "before", "log2_lr": 0.0, "seed": seed, **validate(start(seed))})
    for way, centre in WAYS.items():
        while rates := next_rates(means(way), centre, BUDGET):
            for rate, seed in itertools.product(rates, SEEDS):
                measure(way, rate, seed)
        print(way, means(way), flush=True)


def table() -> str:
    """A row for each way at its best rate."""
    rows = []
    for way in ("before", *WAYS):
        found = {rate: mean for rate, mean in means(way).items() if mean is not None}
        if not found:
            continue
        best = min(found, key=found.__getitem__)
        by_text = [[r[text] for r in records() if (r["way"], r["log2_lr"]) == (way, best)] for text in corpora()]
        kept, there = (f"{statistics.mean(x):.3f} ({statistics.stdev(x):.3f})" for x in by_text)
        rows.append([way, "" if way == "before" else f"2^{best:g}", there, kept])
    return markdown(["way", "best rate", "loss on English (deviation of seeds)", "loss on Python"], rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only print the table")
    if not parser.parse_args().table:
        run()
    print(table())


if __name__ == "__main__":
    main()
