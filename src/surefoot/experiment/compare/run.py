"""A comparison in a run directory: the sweep that tunes, the sweep of the final runs, the summary; resumable."""

from pathlib import Path
from typing import Any

from surefoot.experiment import configs
from surefoot.experiment.compare.config import Comparison, Question
from surefoot.experiment.compare.summary import best_rates, summarise
from surefoot.experiment.files import Record, write_json
from surefoot.experiment.sweep import sweep
from surefoot.experiment.sweep.executors import Executor
from surefoot.experiment.sweep.progress import Callback
from surefoot.experiment.sweep.summary import environment
from surefoot.experiment.sweep.sweep import RESULTS, SUMMARY, RunTrial

TUNING, FINAL = "tuning", "final"


def run(
    comparison: Comparison,
    question: Question,
    directory: Path,
    run_trial: RunTrial,
    *,
    executor: Executor | None = None,
    progress: Callback | None = None,
) -> dict[str, Any]:
    """Run what is not yet in the directory, and write the summary: after each stage, unfinished ones too.

    Args:
        comparison: what to run.
        question: the baseline and the target.
        directory: created if missing; `tuning` and `final` in it are sweeps.
        run_trial: as for `sweep.run`.
        executor: where the runs are run; by default one process per usable core, of one thread each.
        progress: called after each run; by default progress is shown on stderr.

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
        sweep.run(comparison.tuning(), directory / TUNING, run_trial, executor=executor, progress=progress)
        tuned = _write(comparison, question, directory)
        runs = {entry["name"]: entry["tuning_runs"] for entry in tuned["recipes"] if entry["settings"] == "tuned"}
        assert runs == dict.fromkeys(comparison.recipes, comparison.tuning_runs), f"unequal tuning: {runs}"
        if rates := best_rates(comparison, sweep.results(directory / TUNING)):
            sweep.run(comparison.final(rates), directory / FINAL, run_trial, executor=executor, progress=progress)
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


def _runs(directory: Path) -> list[list[Record]]:
    return [sweep.results(directory / stage) for stage in (TUNING, FINAL)]


def _write(comparison: Comparison, question: Question, directory: Path) -> dict[str, Any]:
    summary = summarise(comparison, question, _runs(directory), environment())
    write_json(directory / SUMMARY, summary)
    return summary
