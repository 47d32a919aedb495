"""Sweeps over an axis in a run directory: one after the other, each in a sub-directory, then the law; resumable."""

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from surefoot.experiment import configs
from surefoot.experiment.files import Record, write_json
from surefoot.experiment.sweep import sweep
from surefoot.experiment.sweep.axis import AXES
from surefoot.experiment.sweep.config import Extrapolation
from surefoot.experiment.sweep.search import FINEST_OCTAVES, Bracket
from surefoot.experiment.sweep.summary import Swept, environment, extrapolated
from surefoot.experiment.sweep.sweep import RESULTS, SUMMARY, RunTrial


def run(
    config: Extrapolation, directory: Path, run_trial: RunTrial, *, target: int | None = None, **sweeping: Any
) -> dict[str, Any]:
    """Sweep at every value whose sweep is not yet in the directory, and fit the law of the best rates.

    The summary is written after each sweep, of unfinished ones too. Another target needs no other runs. Each sweep is
    announced on stderr.

    Args:
        config: what to measure.
        directory: created if missing; each value's sub-directory in it is a sweep.
        run_trial: as for `sweep.run`.
        target: the value at which the law is read off; None for none.
        **sweeping: other arguments of `sweep.run`.

    Returns:
        The content of `summary.json`.

    Raises:
        ValueError: the directory belongs to another configuration.
        DirectoryInUse: another process writes to the directory.
        OSError: a file cannot be written.
        SweepError: a run raised, or worker processes cannot start.
    """
    axis, shared = AXES[config.axis], config.to_json()
    with configs.claimed(directory, "extrapolate", shared, f"{axis.folder(config.values[0])}/{RESULTS}"):
        summary = _write(shared, target, directory)
        centres = config.search.centres if isinstance(config.search, Bracket) else {}
        for place, value in enumerate(config.values):
            begun = f"{axis.text.format(value)}, width {config.width} ({place + 1} of {len(config.values)})"
            print(f"surefoot: {begun}", file=sys.stderr)
            there = directory / axis.folder(value)
            with suppress(OSError, ValueError, KeyError):  # not begun; damaged, which `configs.claimed` says
                # A search that has begun keeps its start, even if a run of the value before is made again.
                centres = configs.read(there / configs.CONFIG)["search"]["centres"]
            sweep.run(config.sweep(value, centres), there, run_trial, **sweeping)
            summary = _write(shared, target, directory)
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
    _, config = configs.kind_of(directory)
    stored = configs.read_if_there(directory / SUMMARY)
    swept = _swept(config, directory)
    return extrapolated(config, swept, stored.get("target"), stored.get("environment", {})), swept


def _swept(config: Record, directory: Path) -> dict[int, Swept]:
    folders = {value: directory / AXES[config["axis"]].folder(value) for value in config["values"]}
    begun = {value: sweep.load(one) for value, one in folders.items() if (one / configs.CONFIG).exists()}
    return {
        value: Swept(begun[value][1], begun[value][0]["finished"]) if value in begun else Swept([]) for value in folders
    }


def _write(config: Record, target: int | None, directory: Path) -> Record:
    return write_json(directory / SUMMARY, extrapolated(config, _swept(config, directory), target, environment()))


def _start(entry: Mapping[str, Any], place: int, centres: Mapping[str, float]) -> float:
    """Where the search of the next value starts: at this one's optimum, else at its best rate, else where it did."""
    found = [entry[key][place] for key in ("best_log2_lr", "best_loss_log2_lr")]
    rate: float = next((one for one in found if one is not None), centres[entry["recipe"]])
    return round(rate / FINEST_OCTAVES) * FINEST_OCTAVES
