"""A comparison in a run directory: a sweep that tunes, one of final runs, paired differences; resumable."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtr

from surefoot.experiment import configs
from surefoot.experiment.files import Record, finite_or_none, write_json
from surefoot.experiment.sweep import fit, sweep
from surefoot.experiment.sweep.config import Comparison, Question
from surefoot.experiment.sweep.summary import UNFINISHED, as_json, environment, points, train_loss, transfer_rate
from surefoot.experiment.sweep.sweep import RESULTS, SUMMARY, RunTrial
from surefoot.experiment.training.names import parse_at

Runs = Sequence[Sequence[Record]]
"""The records of the finished runs of each stage, `[tuning, final]`."""

TUNING, FINAL = "tuning", "final"


def run(
    comparison: Comparison, question: Question, directory: Path, run_trial: RunTrial, **sweeping: Any
) -> dict[str, Any]:
    """Run what is not yet in the directory, and write the summary: after each stage, unfinished ones too.

    Args:
        comparison: what to run.
        question: the baseline and the target.
        directory: created if missing; `tuning` and `final` in it are sweeps.
        run_trial: as for `sweep.run`.
        **sweeping: other arguments of `sweep.run`.

    Returns:
        The content of `summary.json`.

    Raises:
        ValueError: the directory belongs to another comparison, or the baseline takes no part.
        DirectoryInUse: another process writes to the directory.
        OSError: a file cannot be written.
        SweepError: a run raised, or worker processes cannot start.
    """
    question.check(comparison)
    with configs.claimed(directory, "compare", comparison.to_json(), f"{TUNING}/{RESULTS}"):
        _write(comparison, question, directory)
        sweep.run(comparison.tuning(), directory / TUNING, run_trial, **sweeping)
        tuned = _write(comparison, question, directory)["recipes"]
        runs = {entry["name"]: entry["tuning_runs"] for entry in tuned if entry["settings"] == "tuned"}
        assert runs == dict.fromkeys(comparison.recipes, comparison.tuning_runs), f"unequal tuning: {runs}"
        if rates := {entry["name"]: entry["log2_lr"] for entry in tuned if entry["log2_lr"] is not None}:
            sweep.run(comparison.final(rates), directory / FINAL, run_trial, **sweeping)
        return _write(comparison, question, directory)


def load(directory: Path) -> dict[str, Any]:
    """Summarise the directory of a comparison, finished or not.

    Args:
        directory: of `run`.

    Returns:
        The summary, of all runs that have finished by now.

    Raises:
        FileNotFoundError: no comparison was started there.
        ValueError: a file is damaged.
    """
    stored = configs.read(directory / SUMMARY)
    question = Question(stored["baseline"], stored["target_asked"])
    return summarise(Comparison.of(stored["config"]), question, _runs(directory), stored["environment"])


def _runs(directory: Path) -> Runs:
    return [sweep.results(directory / stage) for stage in (TUNING, FINAL)]


def _write(comparison: Comparison, question: Question, directory: Path) -> dict[str, Any]:
    return write_json(directory / SUMMARY, summarise(comparison, question, _runs(directory), environment()))


def summarise(comparison: Comparison, question: Question, runs: Runs, environment: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the content of `summary.json`.

    Args:
        comparison: what was run.
        question: the baseline and the target.
        runs: those that have finished.
        environment: joins the summary.

    Returns:
        JSON values; an entry for each participant, in `recipes`.
    """
    entries = [_entry(comparison, runs, name) for name in comparison.names]
    baseline = next(entry for entry in entries if entry["name"] == question.baseline)
    target = question.target
    if target is None and baseline["curve"]:
        target = baseline["curve"]["val_loss"][-1]
    for entry in entries:
        _compare(entry, baseline, target)
    return as_json({
        "finished": all(map(_finished, entries)),
        "baseline": question.baseline,
        "target": target,
        "target_asked": question.target,
        "recipes": entries,
        "config": comparison.to_json(),
        "environment": environment,
    })  # fmt: skip


def _finished(entry: Mapping[str, Any]) -> bool:
    return entry["tuning_status"] != UNFINISHED and (entry["lr"] is None or entry["final_runs"] == entry["seeds"])


def _rate(comparison: Comparison, curve: Sequence[fit.Point], name: str) -> tuple[str | None, str | None, float | None]:
    """The status of the tuning, how the rate of the final runs was found, and its log2."""
    if name in comparison.published:
        return None, "published", parse_at(name)[1]
    if len(curve) < comparison.tuning_runs:
        return UNFINISHED, None, None
    best = fit.optimum(curve)
    if best.log2_lr is not None:
        return best.status, "fitted", transfer_rate(best.log2_lr)
    return best.status, None if best.best_rate is None else "measured", best.best_rate


def _settings(comparison: Comparison, tuning: Sequence[Record], name: str) -> dict[str, Any]:
    """The rate of the final runs, and how it was found."""
    own = [record for record in tuning if record["recipe"] == name]
    curve = points(own, name, comparison.width)
    status, source, rate = _rate(comparison, curve, name)
    return {
        "settings": "published" if name in comparison.published else "tuned",
        "tuning_runs": len(curve),
        "tuning_diverged": sum(record["diverged"] for record in own),
        "tuning_failed": sum("failed" in record for record in own),
        "tuning_status": status,
        "tuning": [{"log2_lr": rate, "val_loss": loss} for rate, loss in fit.mean_curve(curve).items()],
        "rate_from": source,
        "log2_lr": rate,
    }


def _entry(comparison: Comparison, runs: Runs, name: str) -> dict[str, Any]:
    method, found = comparison.method(name), _settings(comparison, runs[0], name)
    rate = found["log2_lr"]
    records = [r for r in runs[1] if r["recipe"] == method and r["log2_lr"] == rate]
    records.sort(key=lambda record: record["seed"])
    losses = {record["seed"]: record["val_loss"] for record in records if record["val_loss"] is not None}
    lost = len(losses) < len(records)  # the mean over the seeds that are left would be too optimistic
    return {
        "name": name,
        "method": method,
        **found,
        "lr": None if rate is None else 2.0**rate,
        "seeds": comparison.seeds,
        "final_runs": len(records),
        "diverged": sum(record["diverged"] for record in records),
        "failed": sum("failed" in record for record in records),
        **(fit.UNKNOWN if lost else fit.mean(losses)).named("val_loss"),
        "val_loss_by_seed": losses,
        "train_loss": None if lost else train_loss(records),
        "curve": mean_curve([r["facts"]["curve"] for r in records]) if records and not lost else None,
    }


def _compare(entry: dict[str, Any], baseline: Mapping[str, Any], target: float | None) -> None:
    """Add the difference to the baseline, and the steps and the time to the target."""
    known = entry is not baseline and entry["val_loss"] is not None and baseline["val_loss"] is not None
    ours, theirs = entry["val_loss_by_seed"], baseline["val_loss_by_seed"]
    difference = fit.difference(ours, theirs) if known else fit.UNKNOWN
    entry |= {**difference.named("difference"), "p": p_value(difference)}
    here, there = (one["curve"] and reached(one["curve"], target) for one in (entry, baseline))
    for i, unit in enumerate(("steps", "seconds")):
        entry[f"{unit}_to_target"] = here and here[i]
        entry[f"{unit}_ratio"] = here[i] / there[i] if here and there and there[i] > 0 else None


def p_value(difference: fit.Estimate) -> float | None:
    """Compute the two-sided p value of Student's t test of a paired difference, from its interval.

    Args:
        difference: of `fit.difference`.

    Returns:
        The p value; None where there is no interval.

    >>> round(p_value(fit.difference({1: 2.0, 2: 2.2, 3: 2.1}, {1: 1.5, 2: 1.9, 3: 1.7})), 4)
    0.0202
    """
    if difference.interval is None or difference.value is None:
        return None
    low, high = difference.interval
    if low == high:
        return 1.0 if difference.value == 0.0 else 0.0
    t = fit.student(difference.seeds - 1) * abs(difference.value) / ((high - low) / 2)
    return 2 * float(stdtr(difference.seeds - 1, -t))


def mean_curve(curves: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Average the curves of several seeds, all evaluated after the same steps.

    Args:
        curves: each with the lists "step", "val_loss" (None where it was not finite) and "seconds".

    Returns:
        "step"; "val_loss", its mean, with the "lowest" and the "highest" seed's, None where one is; mean "seconds".
    """
    losses = np.array([curve["val_loss"] for curve in curves], dtype=float)  # NaN for None, and for what comes of one
    seconds = np.mean([curve["seconds"] for curve in curves], axis=0)
    over_seeds = {"val_loss": losses.mean(0), "lowest": losses.min(0), "highest": losses.max(0), "seconds": seconds}
    means = {name: [finite_or_none(value) for value in values.tolist()] for name, values in over_seeds.items()}
    return {"step": list(curves[0]["step"]), **means}


def reached(curve: Mapping[str, Sequence[Any]], target: float | None) -> tuple[float, float] | None:
    """Find when a curve first is at a target loss, linear between evaluations.

    Args:
        curve: of `mean_curve`.
        target: a loss in nats; None for none.

    Returns:
        `(steps, seconds)`; None where it is above the target throughout.

    >>> reached({"step": [0, 10, 20], "val_loss": [4.0, 3.0, 2.0], "seconds": [0.0, 1.0, 3.0]}, 2.5)
    (15.0, 2.0)
    """
    losses = curve["val_loss"]
    below = (i for i, loss in enumerate(losses) if loss is not None and target is not None and loss <= target)
    if target is None or (place := next(below, None)) is None:
        return None
    before, here = losses[place - 1] if place else None, losses[place]
    at = place if before is None else place - 1 + (before - target) / (before - here)
    places = range(len(losses))
    return float(np.interp(at, places, curve["step"])), float(np.interp(at, places, curve["seconds"]))
