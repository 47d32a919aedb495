"""Sweeps over an axis in a run directory: one after the other, each in a sub-directory, then the law; resumable."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from surefoot.experiment import configs
from surefoot.experiment.extrapolate.axis import AXES
from surefoot.experiment.extrapolate.config import Extrapolation, folder
from surefoot.experiment.extrapolate.summary import Swept, summarise
from surefoot.experiment.files import claim, dumps, locked, write_atomic
from surefoot.experiment.sweep import sweep
from surefoot.experiment.sweep.executors import Executor
from surefoot.experiment.sweep.progress import Callback
from surefoot.experiment.sweep.search import FINEST_OCTAVES, Bracket
from surefoot.experiment.sweep.summary import environment
from surefoot.experiment.sweep.sweep import CONFIG, RESULTS, SUMMARY, RunTrial


def run(
    config: Extrapolation,
    directory: Path,
    run_trial: RunTrial,
    *,
    target: int | None = None,
    executor: Executor | None = None,
    progress: Callback | None = None,
    begin: Callable[[int], None] = lambda value: None,
) -> dict[str, Any]:
    """Sweep at every value whose sweep is not yet in the directory, and fit the law of the best rates.

    The summary is written after each sweep, of unfinished ones too. Another target needs no other runs.

    Args:
        config: what to measure.
        directory: created if missing; each value's sub-directory in it is a sweep.
        run_trial: as for `sweep.run`.
        target: the value at which the law is read off; None for none.
        executor: where the runs are run; by default one process per usable core, of one thread each.
        progress: called after each run; by default progress is shown on stderr.
        begin: called with each value before its sweep.

    Returns:
        The content of `summary.json`.

    Raises:
        ValueError: the directory belongs to another configuration.
        DirectoryInUse: another process writes to the directory.
        OSError: a file cannot be written.
        SweepError: a run raised, or worker processes cannot start.
    """
    directory.mkdir(parents=True, exist_ok=True)
    axis = AXES[config.axis]
    with locked(directory):
        claim(directory, config.to_json(), f"{folder(axis, config.values[0])}/{RESULTS}")
        summary = _write(config, target, directory)
        centres = config.search.centres if isinstance(config.search, Bracket) else {}
        for place, value in enumerate(config.values):
            begin(value)
            there = directory / folder(axis, value)
            centres = _begun(there) or centres
            sweep.run(config.sweep(value, centres), there, run_trial, executor=executor, progress=progress)
            summary = _write(config, target, directory)
            centres = {entry["recipe"]: _start(entry, place, centres) for entry in summary["recipes"] if centres}
        return summary


def load(directory: Path) -> tuple[dict[str, Any], dict[int, Swept]]:
    """Read the directory of sweeps over an axis, finished or not.

    Args:
        directory: of `run`.

    Returns:
        The summary of all runs that have finished by now, and these by value.

    Raises:
        FileNotFoundError: no such sweeps were started there.
        ValueError: a file is damaged.
    """
    config = configs.read(directory / CONFIG)
    path = directory / SUMMARY
    stored = configs.read(path) if path.exists() else {}
    swept = _swept(config, directory)
    return summarise(config, swept, stored.get("target"), stored.get("environment", {})), swept


def _swept(config: Mapping[str, Any], directory: Path) -> dict[int, Swept]:
    axis = AXES[config["axis"]]
    folders = {value: directory / folder(axis, value) for value in config["values"]}
    return {value: Swept(sweep.results(one), (one / SUMMARY).exists()) for value, one in folders.items()}


def _write(config: Extrapolation, target: int | None, directory: Path) -> dict[str, Any]:
    summary = summarise(config.to_json(), _swept(config.to_json(), directory), target, environment())
    write_atomic(directory / SUMMARY, dumps(summary, indent=2) + "\n")
    return summary


def _begun(directory: Path) -> dict[str, float] | None:
    """Where the search of a sweep was started, which stays when a run of the value before is made again."""
    with contextlib.suppress(OSError, ValueError, KeyError):  # not begun; damaged, which `claim` says
        return configs.read(directory / CONFIG)["search"]["centres"]  # type: ignore[no-any-return]
    return None


def _start(entry: Mapping[str, Any], place: int, centres: Mapping[str, float]) -> float:
    """Where the search of the next value starts: at this one's optimum, else at its best rate, else where it did."""
    found = [entry[key][place] for key in ("best_log2_lr", "best_loss_log2_lr")]
    rate: float = next((one for one in found if one is not None), centres[entry["recipe"]])
    return round(rate / FINEST_OCTAVES) * FINEST_OCTAVES
