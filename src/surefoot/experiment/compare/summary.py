"""From the finished runs of a comparison to `summary.json`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.experiment.compare import paired
from surefoot.experiment.compare.config import Comparison, Question
from surefoot.experiment.files import Record, dumps
from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.summary import pair, points, transfer_rate
from surefoot.experiment.training.names import parse_at


@dataclass(frozen=True)
class Runs:
    """The records of the finished runs of both stages."""

    tuning: Sequence[Record]
    final: Sequence[Record]


def best_rates(comparison: Comparison, tuning: Sequence[Record]) -> dict[str, float]:
    """Return name -> log2 of the rate of the final runs; without a recipe that is not tuned yet or diverged always."""
    found = {name: _settings(comparison, tuning, name)["log2_lr"] for name in comparison.names}
    return {name: rate for name, rate in found.items() if rate is not None}


def summarise(comparison: Comparison, question: Question, runs: Runs, environment: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the content of `summary.json`.

    Args:
        comparison: what was run.
        question: the baseline and the target.
        runs: those that have finished.
        environment: joins the summary.

    Returns:
        JSON values; an entry for each who takes part, in `recipes`.
    """
    entries = [_entry(comparison, runs, name) for name in comparison.names]
    baseline = next(entry for entry in entries if entry["name"] == question.baseline)
    target = question.target
    if target is None and baseline["curve"]:
        target = baseline["curve"]["val_loss"][-1]
    for entry in entries:
        _compare(entry, baseline, target)
    summary = {
        "finished": all(map(_finished, entries)),
        "baseline": question.baseline,
        "target": target,
        "target_asked": question.target,
        "recipes": entries,
        "config": comparison.to_json(),
        "environment": dict(environment),
    }
    return json.loads(dumps(summary))  # type: ignore[no-any-return]  # seeds are keys: as who reads the file has them


def _finished(entry: Mapping[str, Any]) -> bool:
    return entry["tuning_status"] != "unfinished" and (entry["lr"] is None or entry["final_runs"] == entry["seeds"])


def _settings(comparison: Comparison, tuning: Sequence[Record], name: str) -> dict[str, Any]:
    """The rate of the final runs, and how it was found."""
    if name in comparison.published:
        return {
            "settings": "published",
            "tuning_runs": 0,
            "tuning_diverged": 0,
            "tuning_failed": 0,
            "tuning_status": None,
            "tuning": [],
            "rate_from": "published",
            "log2_lr": parse_at(name)[1],
        }
    own = [record for record in tuning if record["recipe"] == name]
    curve = points(own, name, comparison.width)
    optimum = fit.optimum(curve)
    if len(curve) < comparison.tuning_runs:
        status, source, rate = "unfinished", None, None
    elif optimum.log2_lr is not None:
        status, source, rate = optimum.status, "fitted", transfer_rate(optimum.log2_lr)
    else:
        status, rate = optimum.status, optimum.best_rate
        source = None if rate is None else "measured"
    return {
        "settings": "tuned",
        "tuning_runs": len(curve),
        "tuning_diverged": sum(record["diverged"] for record in own),
        "tuning_failed": sum("failed" in record for record in own),
        "tuning_status": status,
        "tuning": [{"log2_lr": rate, "val_loss": loss} for rate, loss in fit.mean_curve(curve).items()],
        "rate_from": source,
        "log2_lr": rate,
    }


def _entry(comparison: Comparison, runs: Runs, name: str) -> dict[str, Any]:
    method, found = comparison.method(name), _settings(comparison, runs.tuning, name)
    rate = found["log2_lr"]
    records = [r for r in runs.final if r["recipe"] == method and r["log2_lr"] == rate]
    records.sort(key=lambda record: record["seed"])
    losses = {record["seed"]: record["val_loss"] for record in records if record["val_loss"] is not None}
    lost = len(losses) < len(records)  # the mean over the seeds that are left would be too optimistic
    loss = fit.Estimate(None, None, 0) if lost else paired.mean(losses)
    return {
        "name": name,
        "method": method,
        **found,
        "lr": None if rate is None else 2.0**rate,
        "seeds": comparison.seeds,
        "final_runs": len(records),
        "diverged": sum(record["diverged"] for record in records),
        "failed": sum("failed" in record for record in records),
        "val_loss": loss.value,
        "val_loss_ci": pair(loss.interval),
        "val_loss_by_seed": losses,
        "curve": paired.mean_curve([r["facts"]["curve"] for r in records]) if records and not lost else None,
    }


def _compare(entry: dict[str, Any], baseline: Mapping[str, Any], target: float | None) -> None:
    """Add the difference to the baseline, and the steps and the time to the target."""
    known = entry is not baseline and entry["val_loss"] is not None and baseline["val_loss"] is not None
    ours, theirs = entry["val_loss_by_seed"], baseline["val_loss_by_seed"]
    difference = fit.difference(ours, theirs) if known else fit.Estimate(None, None, 0)
    entry["difference"], entry["difference_ci"] = difference.value, pair(difference.interval)
    entry["p"] = paired.p_value(ours, theirs) if known else None
    reached, first = (_reached(one["curve"], target) for one in (entry, baseline))
    for i, unit in enumerate(("steps", "seconds")):
        entry[f"{unit}_to_target"] = reached and reached[i]
        entry[f"{unit}_ratio"] = reached[i] / first[i] if reached and first and first[i] > 0 else None


def _reached(curve: Mapping[str, Any] | None, target: float | None) -> tuple[float, float] | None:
    return None if curve is None or target is None else paired.reached(curve, target)
