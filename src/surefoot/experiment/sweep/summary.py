"""From the finished runs of a sweep to `summary.json`."""

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from surefoot.experiment.sweep import fit

# Transferred rates are multiples of 1/64 octave, 1.1 %.
TRANSFER_GRID = 64


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
    return [
        fit.Point(r["log2_lr"], r["seed"], None if r["diverged"] else r["val_loss"])
        for r in records
        if r["recipe"] == recipe and r["width"] == width
    ]


def summarise(
    config: Mapping[str, Any], records: Iterable[Mapping[str, Any]], environment: Mapping[str, Any]
) -> dict[str, Any]:
    """Compute the content of `summary.json` from the content of `config.json`, the finished runs and the machine."""
    records = list(records)
    recipes = [_recipe(name, config["widths"], records) for name in config["recipes"]]
    return {"recipes": recipes, "config": dict(config), "environment": dict(environment)}


def _recipe(recipe: str, widths: Iterable[int], records: list[Mapping[str, Any]]) -> dict[str, Any]:
    widths, own = list(widths), [record for record in records if record["recipe"] == recipe]
    curves = [points(records, recipe, width) for width in widths]
    optima = [fit.optimum(curve) for curve in curves]
    drift = fit.drift(optima[0], optima[-1]) if len(widths) > 1 else fit.Estimate(None, None, 0)
    return {
        "recipe": recipe,
        "widths": widths,
        **columns(optima, drift),
        **_regret(optima[0].log2_lr if len(widths) > 1 else None, widths[-1], own),
        "seeds": len({point.seed for curve in curves for point in curve}),
        "runs": [len(curve) for curve in curves],
        "diverged": [sum(r["diverged"] for r in own if r["width"] == width) for width in widths],
        "failed": [sum("failed" in r for r in own if r["width"] == width) for width in widths],
    }


def columns(optima: Sequence[fit.Optimum], drift: fit.Estimate) -> dict[str, Any]:
    """Describe optima, a list by key, and the move from the first to the last."""
    return {
        "best_log2_lr": [o.log2_lr for o in optima],
        "best_log2_lr_ci": [pair(o.interval) for o in optima],
        "best_loss": [o.best_loss for o in optima],
        "best_loss_log2_lr": [o.best_rate for o in optima],
        "interior": [o.interior for o in optima],
        "status": [o.status for o in optima],
        "drift_octaves": drift.value,
        "drift_octaves_ci": pair(drift.interval),
    }


def _regret(vertex: float | None, width: int, own: list[Mapping[str, Any]]) -> dict[str, Any]:
    rate = None if vertex is None else transfer_rate(vertex)
    cost = fit.Estimate(None, None, 0) if rate is None else fit.regret(points(own, own[0]["recipe"], width), rate)
    return {
        "regret_nats": cost.value,
        "regret_nats_ci": pair(cost.interval),
        "regret_log2_lr": rate,
        "regret_diverged": any(r["diverged"] for r in own if (r["width"], r["log2_lr"]) == (width, rate)),
    }


def pair(interval: fit.Interval) -> list[float] | None:
    """Return an interval as JSON has it."""
    return None if interval is None else list(interval)


def environment() -> dict[str, Any]:
    """Describe the machine and the versions that runs are made with."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "surefoot": _version("surefoot"),
        "torch": _version("torch"),
        "numpy": _version("numpy"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())
