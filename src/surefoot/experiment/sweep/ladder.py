"""A ladder of sizes in a run directory: runs at the law's rate, the curve through their losses, a larger model's."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from surefoot.experiment import configs
from surefoot.experiment.files import Record, write_json
from surefoot.experiment.sweep import fit, sweep
from surefoot.experiment.sweep.config import Ladder, Rung
from surefoot.experiment.sweep.law import Between, between
from surefoot.experiment.sweep.summary import as_json, environment, line, points, train_loss
from surefoot.experiment.sweep.sweep import RESULTS, SUMMARY, RunTrial


def run(
    ladder: Ladder, target: Rung, directory: Path, run_trial: RunTrial, train_target: bool = False, **sweeping: Any
) -> dict[str, Any]:
    """Run the rungs that are not yet in the directory, the smallest first, and predict the loss of the target.

    The summary is written after each rung. Another target needs no other rungs.

    Args:
        ladder: what to run.
        target: wider than the rungs.
        directory: created if missing; `width_N` in it is the sweep of a rung.
        run_trial: as for `sweep.run`.
        train_target: whether the target is run, too, after the rungs.
        **sweeping: other arguments of `sweep.run`.

    Returns:
        The content of `summary.json`.

    Raises:
        ValueError: the target is not wider than the rungs, or the directory belongs to another ladder.
        DirectoryInUse: another process writes to the directory.
        OSError: a file cannot be written.
        SweepError: a run raised, or worker processes cannot start.
    """
    if target.width <= (widest := ladder.widths[-1]):
        raise ValueError(f"--to-width {target.width} is no wider than the ladder's widest model, {widest}")
    config, goal = ladder.to_json(), asdict(target)
    with configs.claimed(directory, "ladder", config, f"width_{ladder.rungs[0].width}/{RESULTS}"):
        summary = _write(config, goal, directory)
        runs = [*((rung, len(ladder.seeds)) for rung in ladder.rungs), *([(target, 1)] if train_target else [])]
        for rung, seeds in runs:
            sweep.run(ladder.sweep(rung, seeds), directory / f"width_{rung.width}", run_trial, **sweeping)
            summary = _write(config, goal, directory)
        return summary


def load(directory: Path) -> dict[str, Any]:
    """Summarise the directory of a ladder, finished or not.

    Args:
        directory: of `run`.

    Returns:
        The summary of all runs that have finished by now.

    Raises:
        FileNotFoundError: no ladder was started there.
        ValueError: a file is damaged.
    """
    stored = configs.read(directory / SUMMARY)
    return _summary(stored["config"], stored["target"], directory, stored["environment"])


def records(summary: Mapping[str, Any], directory: Path) -> list[Record]:
    """The records of the finished runs, the target's last."""
    return [record for rung in (*summary["rungs"], summary["target"]) for record in _records(directory, rung["width"])]


def _records(directory: Path, width: int) -> list[Record]:
    return sweep.results(directory / f"width_{width}")


def _write(config: Record, target: Record, directory: Path) -> dict[str, Any]:
    return write_json(directory / SUMMARY, _summary(config, target, directory, environment()))


def _summary(config: Record, target: Record, directory: Path, environment: Record) -> dict[str, Any]:
    """The content of `summary.json`: the rungs, the curve, and the target with what was predicted and measured."""
    rungs = [_measured(config["recipe"], rung, directory) for rung in config["rungs"]]
    goal = _measured(config["recipe"], target, directory)
    curve = _curve(rungs, len(config["seeds"]))
    found = curve if isinstance(curve, Between) else None
    predicted = found.at(goal["parameters"]) if found else fit.UNKNOWN
    off = None if None in (predicted.value, goal["val_loss"]) else predicted.value - goal["val_loss"]
    return as_json({
        "recipe": config["recipe"],
        "rungs": rungs,
        **{name: found and getattr(found.floored, name) for name in ("floor", "power", "freedom")},
        "free_power": found and found.free.power,
        "no_curve": None if found else curve,
        "target": {**goal, **predicted.named("predicted"), "off": off},
        "line": found and line("loss", found.at, [*(rung["parameters"] for rung in rungs), goal["parameters"]]),
        "config": config,
        "environment": environment,
    })  # fmt: skip


def _measured(recipe: str, rung: Record, directory: Path) -> Record:
    """A rung with the losses of its finished runs, and their means; no mean where a run diverged."""
    own = _records(directory, rung["width"])
    losses = dict(sorted((point.seed, point.loss) for point in points(own, recipe, rung["width"])))
    finite = {seed: loss for seed, loss in losses.items() if loss is not None}
    mean = fit.mean(finite) if len(finite) == len(losses) else fit.UNKNOWN
    return {**rung, **mean.named("val_loss"), "train_loss": train_loss(own), "losses": losses}


def _curve(rungs: list[Record], seeds: int) -> Between | str:
    """The curves through all losses, or why there is none."""
    for rung in rungs:
        if len(rung["losses"]) < seeds:
            return f"width {rung['width']} is unfinished"
        if None in rung["losses"].values():
            return f"a run of width {rung['width']} diverged or failed"
    runs = [(rung["parameters"], loss) for rung in rungs for loss in rung["losses"].values()]
    return between(*zip(*runs, strict=True)) or "the loss does not fall with the size"
