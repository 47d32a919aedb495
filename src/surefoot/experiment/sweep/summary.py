"""From the finished runs of sweeps, over widths or over an axis, to `summary.json`."""

import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

import surefoot
from surefoot.experiment.files import Record, dumps
from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.axis import AXES
from surefoot.experiment.sweep.law import power_law

# Transferred rates are multiples of 1/64 octave, 1.1 %.
TRANSFER_GRID = 64
UNFINISHED = "unfinished"
LINE_POINTS = 17  # at which the law is drawn: its interval is curved on logarithmic axes, and widest at the ends


@dataclass(frozen=True)
class Swept:
    """The sweep at one value, as far as it has come.

    Args:
        records: of the runs that have finished.
        finished: whether these are all.
    """

    records: Sequence[Record] = ()
    finished: bool = False


def transfer_rate(vertex: float) -> float:
    """Round the log2 rate of a fitted optimum to 1/64 octave, to be run at another width.

    Args:
        vertex: log2 of a fitted learning rate.

    Returns:
        The nearest multiple of 1/64.

    >>> transfer_rate(-4.0801)
    -4.078125
    """
    return round(vertex * TRANSFER_GRID) / TRANSFER_GRID


def points(records: Iterable[Mapping[str, Any]], recipe: str, width: int) -> list[fit.Point]:
    """Return the measured curve of one recipe at one width, from the records of `results.jsonl`."""
    own = (record for record in records if (record["recipe"], record["width"]) == (recipe, width))
    return [fit.Point(r["log2_lr"], r["seed"], None if r["diverged"] else r["val_loss"]) for r in own]


def summarise(config: Mapping[str, Any], records: Sequence[Record], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the content of a sweep's `summary.json`.

    Args:
        config: the content of `config.json`.
        records: of the finished runs.
        environment: joins the summary.

    Returns:
        JSON values; an entry for each recipe, in `recipes`.
    """
    recipes = [_over_widths(name, config["widths"], records) for name in config["recipes"]]
    return as_json({"recipes": recipes, "config": config, "environment": environment})


def as_json(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A summary as its file reads back: lists in place of tuples, strings for keys."""
    return json.loads(dumps(summary))  # type: ignore[no-any-return]


def _over_widths(recipe: str, widths: Sequence[int], records: Iterable[Record]) -> dict[str, Any]:
    own = [record for record in records if record["recipe"] == recipe]
    optima = {width: fit.optimum(points(own, recipe, width)) for width in widths}
    vertex = optima[widths[0]].log2_lr if len(widths) > 1 else None
    rate, widest = None if vertex is None else transfer_rate(vertex), widths[-1]
    regret = {
        **(fit.UNKNOWN if rate is None else fit.regret(points(own, recipe, widest), rate)).named("regret_nats"),
        "regret_log2_lr": rate,
        "regret_diverged": any(r["diverged"] for r in own if (r["width"], r["log2_lr"]) == (widest, rate)),
    }
    return _entry(recipe, "widths", optima, regret, [[r for r in own if r["width"] == width] for width in widths])


def _entry(recipe: str, sizes: str, optima: Mapping[int, fit.Optimum], more: Record, records: Sequence[Any]) -> Record:
    """A recipe's entry in a summary; where there are several sizes, each key has a list."""
    best, runs = list(optima.values()), [[r for r in each if r["recipe"] == recipe] for each in records]
    pairs = zip(best, runs, strict=True)
    return {
        "recipe": recipe,
        sizes: list(optima),
        "best_log2_lr": [o.log2_lr for o in best],
        "best_log2_lr_ci": [o.interval for o in best],
        "best_loss": [o.best_loss for o in best],
        "best_loss_log2_lr": [o.best_rate for o in best],
        "train_loss": [train_loss(r for r in each if r["log2_lr"] == o.best_rate) for o, each in pairs],
        "interior": [o.interior for o in best],
        "status": [o.status for o in best],
        **(fit.drift(best[0], best[-1]) if len(best) > 1 else fit.UNKNOWN).named("drift_octaves"),
        **more,
        "seeds": len({record["seed"] for each in runs for record in each}),
        "runs": [len(each) for each in runs],
        "diverged": [sum(record["diverged"] for record in each) for each in runs],
        "failed": [sum("failed" in record for record in each) for each in runs],
    }


def train_loss(records: Iterable[Record]) -> float | None:
    """The mean training loss, of the last tenth of the steps, of runs of one rate; None where one has none."""
    losses = [record["train_loss"] for record in records]
    return fmean(losses) if losses and None not in losses else None


def optima(width: int, swept: Mapping[int, Swept], recipe: str) -> dict[int, fit.Optimum]:
    """Fit a recipe's optimum at each value; there is none where the sweep is unfinished.

    Args:
        width: of the models.
        swept: by value.
        recipe: name of a method.

    Returns:
        The optima, by value.
    """
    found = {value: fit.optimum(points(one.records, recipe, width)) for value, one in swept.items()}
    # Runs still to come may move an unfinished optimum.
    vague: dict[str, Any] = {"status": UNFINISHED, "log2_lr": None, "interval": None, "by_seed": {}}
    return {value: best if swept[value].finished else replace(best, **vague) for value, best in found.items()}


def extrapolated(config: Record, swept: Mapping[int, Swept], target: int | None, environment: Record) -> Record:
    """Compute the content of the `summary.json` of sweeps over an axis.

    Args:
        config: the content of `config.json`.
        swept: by value, in the order of `config["values"]`.
        target: the value at which each recipe's law is read off; None for none.
        environment: joins the summary.

    Returns:
        JSON values; an entry for each recipe, in `recipes`.
    """
    return as_json({
        "axis": config["axis"],
        "values": list(swept),
        "width": config["width"],
        "target": target,
        "finished": all(one.finished for one in swept.values()),
        "recipes": [_over_axis(config, swept, target, recipe) for recipe in config["recipes"]],
        "config": config,
        "environment": environment,
    })  # fmt: skip


def _over_axis(config: Record, swept: Mapping[int, Swept], target: int | None, recipe: str) -> Record:
    best, text = optima(config["width"], swept, recipe), AXES[config["axis"]].text
    law = power_law(best)
    found = {
        **(law.power if law else fit.UNKNOWN).named("power"),
        "rms_octaves": law.rms_octaves if law else None,
        "no_law": "; ".join(f"{text.format(x)}: {one.status}" for x, one in best.items() if not one.interior) or None,
        **(law.at(target) if law and target else fit.UNKNOWN).named("target_log2_lr"),
        "line": line("log2_lr", law.at, [*best, *([target] if target else [])]) if law else None,
    }
    return _entry(recipe, "values", best, found, [one.records for one in swept.values()])


def line(name: str, at: Callable[[float], fit.Estimate], sizes: Sequence[int]) -> dict[str, list[Any]]:
    """A curve of `name` from the lowest of these sizes to the highest, with its interval, by column."""
    drawn = np.geomspace(min(sizes), max(sizes), LINE_POINTS).tolist()
    values = [at(size) for size in drawn]
    return {"size": drawn, name: [one.value for one in values], f"{name}_ci": [one.interval for one in values]}


def environment() -> dict[str, Any]:
    """Describe the machine and the versions that runs are made with."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "surefoot": surefoot.__version__,
        **{package: metadata.version(package) for package in ("torch", "numpy")},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
    }


def _cpu_model() -> str:
    with suppress(OSError):
        if found := re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1]
    return platform.processor() or platform.machine()
