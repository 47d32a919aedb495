"""Learning-rate sweeps over recipes, widths, rates and seeds: resumable, on all cores."""

import math
import statistics
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

from surefoot.experiment import configs
from surefoot.experiment.files import NUMBER, Log, Record, read_lines, write_json
from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.config import SweepConfig, Trial, TrialResult
from surefoot.experiment.sweep.executors import Executor, Killed, Pool, outcomes
from surefoot.experiment.sweep.progress import Callback, Progress, on_stderr
from surefoot.experiment.sweep.summary import environment as this_environment
from surefoot.experiment.sweep.summary import points, summarise, transfer_rate

RESULTS, SUMMARY = "results.jsonl", "summary.json"
_KINDS = {
    "recipe": str,
    "log2_lr": int | float,
    "diverged": bool,
    **dict.fromkeys(("width", "seed", "steps"), int),
    **dict.fromkeys(("train_loss", "val_loss", "seconds"), NUMBER),
}


RunTrial = Callable[[Trial], TrialResult]


def run(
    config: SweepConfig,
    directory: Path,
    run_trial: RunTrial,
    *,
    workers: int | None = None,
    progress: Callback | None = None,
    environment: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
) -> dict[str, Any]:
    """Run every trial whose result is not yet in the directory, fit the optima and write the summary.

    Results are written as trials finish: after an interruption or an error the same call runs only the rest. A trial
    whose process is killed runs once more, and is recorded as failed if that is killed, too.

    Args:
        config: what to measure.
        directory: created if missing.
        run_trial: runs in spawned processes: it must be importable, and a script that calls this function needs
            `if __name__ == "__main__"`.
        workers: number of processes of the default executor, one thread each; by default one per usable core.
        progress: called after each trial; by default progress is shown on stderr.
        environment: joins the summary's description of this machine.
        executor: where trials run, closed at the end; by default `workers` processes on this machine.

    Returns:
        The content of `summary.json`.

    Raises:
        ValueError: the directory belongs to another configuration.
        DirectoryInUse: another process writes to the directory.
        OSError: a file cannot be written.
        SweepError: a trial raised, or worker processes cannot start.
    """
    with configs.claimed(directory, "transfer", config.to_json(), RESULTS):
        with Log(directory / RESULTS, _KINDS) as log, nullcontext(progress) if progress else on_stderr() as show:
            with closing(executor or Pool(workers)) as place:
                search = _Search(config, log)
                if search.missing():  # an earlier summary counts runs that were removed
                    (directory / SUMMARY).unlink(missing_ok=True)
                for trial, end in outcomes(place, run_trial, search.missing):
                    show(search.add(_to_record(trial, end), place.workers))
            summary = summarise(config.to_json(), log.records, {**this_environment(), **(environment or {})})
        return write_json(directory / SUMMARY, {**summary, "finished": True})


def load(directory: Path) -> tuple[dict[str, Any], list[Record]]:
    """Read a sweep's directory, finished or not.

    Args:
        directory: of `run`.

    Returns:
        The summary of the trials that have finished by now, and their records.

    Raises:
        FileNotFoundError: no run was started there.
        ValueError: the run that was started there is not a sweep, or a file is damaged.
    """
    kind, config = configs.kind_of(directory)
    if kind != "transfer":
        raise ValueError(f"{directory} holds a run of {kind}, not a sweep")
    for key, type_ in (("recipes", str), ("widths", int)):
        if not isinstance(values := config.get(key), list) or not all(isinstance(value, type_) for value in values):
            raise ValueError(f"{directory / configs.CONFIG}: {key} must be a list of {type_.__name__}, got {values!r}")
    stored, records = configs.read_if_there(directory / SUMMARY), results(directory)
    summary = summarise(config, records, stored.get("environment", {}))
    then, now = ([entry.get("runs") for entry in each.get("recipes", ())] for each in (stored, summary))
    return {**summary, "finished": then == now}, records  # else lines were taken out, or it has not ended


def results(directory: Path) -> list[Record]:
    """Read the records of a sweep's finished trials.

    Args:
        directory: of `run`; one that does not exist has none.

    Returns:
        A record for each line of its `results.jsonl`.

    Raises:
        ValueError: a line is no such record; the message names file and line.
    """
    return read_lines(directory / RESULTS, _KINDS)


def _key(record: Record) -> tuple[str, int, float, int]:
    return record["recipe"], record["width"], record["log2_lr"], record["seed"]


class _Search:
    """The search, replayed on the finished trials, so that a resumed sweep runs the same trials."""

    def __init__(self, config: SweepConfig, log: Log) -> None:
        self.config, self.log = config, log
        self.done = {_key(record): record for record in log.records}

    def add(self, record: Record, workers: int) -> Progress:
        """Write the record of a trial that has ended, and tell how far the sweep is."""
        self.log.append(record)
        self.done[_key(record)] = record
        config, expected, seconds_left = self.config, 0, 0.0
        for recipe, width in product(config.recipes, config.widths):
            rates, settled = self._rates(recipe, width)
            runs = len(config.seeds) * max(len(rates), 0 if settled else config.search.expected)
            done = sum(key[:2] == (recipe, width) for key in self.done)
            expected += runs
            seconds_left += max(0, runs - done) * self._cost(width)
        at_once = max(1, min(workers, expected - len(self.done)))
        return Progress(record, len(self.done), max(expected, len(self.done)), seconds_left / at_once)

    def missing(self) -> list[Trial]:
        """Trials that can be run now: the narrowest width's, for whose rate the widest waits, then widest first."""
        config = self.config
        narrowest, *wider = config.widths
        return [
            Trial(recipe, width, rate, seed, config.steps, config.settings)
            for width in (narrowest, *reversed(wider))
            for recipe in config.recipes
            for rate in self._rates(recipe, width)[0]
            for seed in config.seeds
            if (recipe, width, rate, seed) not in self.done
        ]

    def _rates(self, recipe: str, width: int) -> tuple[list[float], bool]:
        """The rates of one curve that follow from the finished trials, and whether these are all."""
        rates, settled = self._searched(recipe, width)
        narrowest, widest = self.config.widths[0], self.config.widths[-1]
        if width == widest != narrowest:
            if not self._searched(recipe, narrowest)[1]:
                return rates, False
            vertex = fit.optimum(points(self.log.records, recipe, narrowest)).log2_lr
            if vertex is not None and transfer_rate(vertex) not in rates:
                rates.append(transfer_rate(vertex))
        return rates, settled

    def _searched(self, recipe: str, width: int) -> tuple[list[float], bool]:
        """Replay the search on the finished trials of its own rates, without the transferred rate."""
        rates: list[float] = []
        while True:
            keys = [(recipe, width, rate, seed) for rate in rates for seed in self.config.seeds]
            if not self.done.keys() >= {*keys}:
                return rates, False
            means = fit.mean_curve(points([self.done[key] for key in keys], recipe, width))
            if not (new := self.config.search.next(recipe, means)):
                return rates, True
            rates += new

    def _cost(self, width: int) -> float:
        """Seconds of a run: measured at this width, else at the nearest one and scaled.

        A step of a small model costs between width**1 (memory) and width**2 (products).
        """
        ran = [record for record in self.log.records if "failed" not in record]
        nearest = min((record["width"] for record in ran), key=lambda other: abs(other - width), default=width)
        times = [record["seconds"] for record in ran if record["width"] == nearest] or [0.0]
        return statistics.fmean(times) * float((width / nearest) ** 1.5)


def _to_record(trial: Trial, end: TrialResult | Killed) -> Record:
    """One line of ``results.jsonl``: strict JSON, no loss where the run diverged or failed."""
    failed = isinstance(end, Killed)
    result = TrialResult(None, None, 0.0) if isinstance(end, Killed) else end
    losses = {"train_loss": result.train_loss, "val_loss": result.val_loss}
    lost = result.diverged or any(loss is None or not math.isfinite(loss) for loss in losses.values())
    record = {name: value for name, value in vars(trial).items() if name != "settings"}
    record |= dict.fromkeys(losses) if lost else losses
    record |= {"diverged": lost and not failed, "seconds": round(result.seconds, 3)}
    more = {"failed": failed and f"killed twice: {end}", "not_finite": lost and result.not_finite}
    return record | {name: value for name, value in {**more, "facts": dict(result.facts)}.items() if value}
