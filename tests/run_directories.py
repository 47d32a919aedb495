"""Run directories as the commands write them, with known numbers and without training."""

import json
from pathlib import Path
from typing import Any

from surefoot.experiment.sweep.summary import Swept, extrapolated, summarise

MACHINE = {"cpu": "test <b>machine</b>", "torch": "0"}


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def sweep_run(recipe: str, width: int, log2_lr: float, seed: int, best: float) -> dict[str, Any]:
    """A parabola of curvature 0.1 around `best`, lower for `falling`; the highest rate of all diverges."""
    diverged = log2_lr >= best + 3
    loss = (
        None if diverged else 2.0 + 8 / width + 0.1 * (log2_lr - best) ** 2 + 0.001 * seed - 0.1 * (recipe == "falling")
    )
    return {
        "recipe": recipe, "width": width, "log2_lr": log2_lr, "seed": seed, "steps": 100, "train_loss": loss,
        "val_loss": loss, "diverged": diverged, "seconds": 1.0,
    }  # fmt: skip


def sweep(
    path: Path, recipes: tuple[str, ...] = ("falling", "level"), seeds: int = 3, finished: bool = True,
    widths: tuple[int, ...] = (32, 64, 128),
) -> Path:  # fmt: skip
    """A sweep whose best rate is 2^-2.9 at every width, or falls by an octave with each, from there."""
    records = []
    for recipe in recipes:
        for place, width in enumerate(widths):
            best = -2.9 - place * recipe.startswith("falling")
            rates = [best + octaves for octaves in (-2.0, -1.0, 0.0, 1.0, 2.0, 3.0)]
            records += [sweep_run(recipe, width, rate, seed, best) for rate in rates for seed in range(seeds)]
    shape = {"recipes": [*recipes], "widths": [*widths], "seeds": [*range(seeds)], "steps": 100}
    config = {**shape, "settings": {"model": "gpt", "batch_size": 16, "context": 64}}
    write(path / "config.json", config)
    lines(path / "results.jsonl", records)
    if finished:
        write(path / "summary.json", summarise(config, records, MACHINE))
    return path


def horizons(path: Path, seeds: int = 3, finished: bool = True, target: int | None = 1600) -> Path:
    """Sweeps at 100, 200 and 400 steps; the best rate falls by an octave each time, or stays, from 2^-2.9.

    Where it is unfinished, the last value has begun.
    """
    values = (100, 200, 400)
    search = {"kind": "grid", "rates": [-3.0]}
    shape = {"recipes": ["falling", "level"], "seeds": [*range(seeds)], "search": search, "axis": "horizon"}
    settings = {"model": "gpt", "batch_size": 16, "context": 64}
    config = {**shape, "values": [*values], "width": 64, "settings": settings}
    swept = {}
    for place, value in enumerate(values):
        done = finished or value != values[-1]
        octaves = (-2.0, -1.0, 0.0, 1.0, 2.0, 3.0) if done else (-1.0, 0.0, 1.0)
        bests = {recipe: -2.9 - place * (recipe == "falling") for recipe in shape["recipes"]}
        records = [
            {**sweep_run(recipe, 64, best + octave, seed, best), "steps": value}
            for recipe, best in bests.items() for octave in octaves for seed in range(seeds)
        ]  # fmt: skip
        there = path / f"horizon_{value}"
        own = {
            "recipes": shape["recipes"],
            "widths": [64],
            "seeds": shape["seeds"],
            "steps": value,
            "settings": settings,
        }
        write(there / "config.json", own)
        lines(there / "results.jsonl", records)
        if done:
            write(there / "summary.json", summarise(own, records, MACHINE))
        swept[value] = Swept(records, done)
    write(path / "config.json", config)
    write(path / "summary.json", extrapolated(config, swept, target, MACHINE))
    return path


def training(path: Path, layers: int = 3, steps: int = 6, finished: bool = True) -> Path:
    """A training run; the first layer has norm 1, the next 1.1, the bound is 2; the last has an alarm at the end."""
    names = {f"blocks.{i}.weight": "linear" for i in range(layers)} | {"table.weight": "embedding"}
    bands = {"unit": 2.0, "bound": 4.0, "limit": 4.04}
    write(path / "config.json", {"model": "gpt", "width": 64, "steps": 10 * steps, "seed": 0})
    write(path / "layers.json", {name: {"role": role, **bands} for name, role in names.items()})
    alarm = {"layer": "table.weight", "norm": 9.0, "limit": 4.04, "reason": "limit"}
    measured = []
    for step in range(steps + 1):
        norms = {name: [2.0 * (1 + i / 10), 2.5] for i, name in enumerate(names)}
        line = {"step": 10 * step, "lr": 0.1, "norms": norms, "moved": dict.fromkeys(names, 0.01 * step)}
        line["updates"] = {name: 0.02 for name in names if name != "table.weight"}
        measured.append({**line, **({"alarms": [alarm]} if step == steps else {})})
    lines(path / "norms.jsonl", measured)
    log = [
        {"step": 10 * step, "loss": 5.0 - 0.1 * step, "lr": 0.1, "tokens": 10 * step, "tokens_per_second": 1234.0,
         "optimizer_share": 0.25, "utilisation": None, **({"val_loss": 4.75} if step == 2 else {})}
        for step in range(1, steps + 1)
    ]  # fmt: skip
    lines(path / "log.jsonl", log)
    if finished:
        write(path / "result.json", {"val_loss": 4.5, "diverged": False, "steps": 10 * steps})
    return path


def check(path: Path, finished: bool = True) -> Path:
    """A coordinate check of one layer that keeps its scale and one whose change grows with the width."""
    config = {"model": "gpt", "method": "adamw", "lr": 0.5, "steps": 10}
    write(path / "config.json", config)
    lines(path / "results.jsonl", [{"width": 32, "seed": 0}])
    if finished:
        inside = {"status": "inside", "slope": 0.01, "ci": [-0.02, 0.04], "log2_rms": [0.0, 0.01]}
        outside = {"status": "outside", "slope": 1.0, "ci": [0.9, 1.1], "log2_rms": [-3.0, -2.0]}
        layers = [
            {"layer": "up", "start": inside, "change": outside}, {"layer": "down", "start": inside, "change": inside}
        ]  # fmt: skip
        summary = {"passes": False, "band": 0.1, "widths": [32, 64], "seeds": [0, 1, 2], "layers": layers}
        write(path / "coordcheck.json", {**summary, "config": config, "environment": MACHINE})
    return path


def comparison(path: Path) -> Path:
    """A comparison of two, each tuned with as many rates; `steady` ends 0.2 nats below `adamw`, each at 2^-4."""
    shape = {"recipes": ["adamw", "steady"], "published": [], "width": 64, "steps": 100, "evaluations": 2}
    config = {**shape, "rates_per_recipe": 3, "tuning_seeds": 1, "seeds": 3, "settings": {"model": "gpt"}}
    tuning, final = [], []
    for name, end in (("adamw", 2.5), ("steady", 2.3)):
        run = {"recipe": name, "width": 64, "steps": 100, "diverged": False, "seconds": 1.0}
        for rate in (-5.0, -4.0, -3.0):
            loss = end + 0.1 * (rate + 4) ** 2
            tuning.append({**run, "log2_lr": rate, "seed": 0, "train_loss": loss, "val_loss": loss})
        for seed in (1, 2, 3):
            loss = end + 0.01 * (seed - 2)
            curve = {"step": [0, 50, 100], "val_loss": [5.0, loss + 0.3, loss], "seconds": [0.0, 1.0, 2.0]}
            done = {"seed": seed, "train_loss": loss, "val_loss": loss, "facts": {"curve": curve}}
            final.append({**run, "log2_lr": -4.0, **done})
    write(path / "config.json", config)
    lines(path / "tuning" / "results.jsonl", tuning)
    lines(path / "final" / "results.jsonl", final)
    question = {"baseline": "adamw", "target_asked": None}
    write(path / "summary.json", {**question, "config": config, "environment": MACHINE})
    return path
