"""Learning-rate sweeps over recipes, widths, rates and seeds: resumable, on all cores."""

import json
import math
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from surefoot.experiment.files import Log, Record, claim, dumps, locked, read_lines, write_atomic
from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.config import SweepConfig, Trial, TrialResult
from surefoot.experiment.sweep.pool import usable_cores, worker_pool
from surefoot.experiment.sweep.progress import Callback, Progress, on_stderr
from surefoot.experiment.sweep.summary import environment as this_environment
from surefoot.experiment.sweep.summary import points, summarise, transfer_rate

RESULTS, SUMMARY, CONFIG = "results.jsonl", "summary.json", "config.json"


class SweepError(RuntimeError):
    """A trial raised or its worker process died; results of finished trials are written, and `run` resumes."""


RunTrial = Callable[[Trial], TrialResult]


def run(
    config: SweepConfig,
    directory: Path | str,
    run_trial: RunTrial,
    *,
    workers: int | None = None,
    progress: Callback | None = None,
    environment: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Run every trial whose result is not yet in the directory, fit the optima and write the summary.

    Results are written as trials finish: after an interruption or an error the same call runs only the rest.

    Args:
        config: what to measure.
        directory: created if missing.
        run_trial: runs in spawned processes: it must be importable, and a script that calls this function needs
            `if __name__ == "__main__"`.
        workers: number of processes, one thread each; by default one per usable core.
        progress: called after each trial; by default progress is shown on stderr.
        environment: joins the summary's description of this machine.

    Returns:
        The content of `summary.json`.

    Raises:
        ValueError: the directory belongs to another configuration.
        DirectoryInUse: another process writes to the directory.
        OSError: a file cannot be written.
        SweepError: a trial raised, or a worker process died.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory):
        claim(directory, config.to_json(), RESULTS)
        with Log(directory / RESULTS) as log, nullcontext(progress) if progress else on_stderr() as show:
            _Sweep(config, log).work(run_trial, workers or usable_cores(), show)
            facts = {**this_environment(), **(environment or {})}
            summary = summarise(config.to_json(), log.records, facts)
        write_atomic(directory / SUMMARY, dumps(summary, indent=2) + "\n")
    return summary


def load(directory: Path | str) -> tuple[dict[str, Any], list[Record]]:
    """Read a sweep's directory, finished or not.

    Args:
        directory: of `run`.

    Returns:
        The summary, and the records of the finished trials.

    Raises:
        FileNotFoundError: no run was started there.
        ValueError: the run that was started there is not a sweep, or a line of the results is damaged.
    """
    directory = Path(directory)
    records = read_lines(directory / RESULTS)
    if (directory / SUMMARY).exists():
        return json.loads((directory / SUMMARY).read_text(encoding="utf-8")), records
    if not (directory / CONFIG).exists():
        raise FileNotFoundError(f"{directory} is no run directory: it has no {CONFIG}")
    config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    if "recipes" not in config:
        raise ValueError(
            f"{directory} holds no sweep, no norms.jsonl and no coordcheck.json: "
            "what was started there has nothing to report yet"
        )
    return summarise(config, records, {}), records


def _key(record: Record) -> tuple[str, int, float, int]:
    return record["recipe"], record["width"], record["log2_lr"], record["seed"]


class _Sweep:
    """The search, replayed on the finished trials, so that a resumed sweep runs the same trials."""

    def __init__(self, config: SweepConfig, log: Log) -> None:
        self.config = config
        self.log = log
        self.done = {_key(record): record for record in log.records}

    def work(self, run_trial: RunTrial, workers: int, show: Callback) -> None:
        """Run the missing trials, widest first, until the search is complete."""
        if not self.missing():
            return
        with worker_pool(workers) as pool:
            running: dict[Future[TrialResult], Trial] = {}
            while True:
                waiting = [trial for trial in self.missing() if trial not in running.values()]
                try:
                    for trial in waiting[: workers - len(running)]:
                        running[pool.submit(run_trial, trial)] = trial
                    if not running:
                        return
                    self._record(wait(running, return_when=FIRST_COMPLETED).done, running, workers, show)
                except BrokenProcessPool as error:
                    raise SweepError(self._died(running)) from error

    def _record(
        self,
        finished: set[Future[TrialResult]],
        running: dict[Future[TrialResult], Trial],
        workers: int,
        show: Callback,
    ) -> None:
        failed = [future for future in finished if future.exception() is not None]
        for future in finished.difference(failed):
            trial = running.pop(future)
            record = _to_record(trial, future.result())
            self.log.append(record)
            self.done[_key(record)] = record
            show(self._progress(record, workers))
        for future in failed:
            error = future.exception()
            if isinstance(error, BrokenProcessPool):
                raise error
            raise SweepError(f"{running[future]}: {type(error).__name__}: {error}") from error

    def missing(self) -> list[Trial]:
        """Trials that can be run now, widest first."""
        config = self.config
        settings = dict(config.settings)
        trials = [
            Trial(recipe, width, rate, seed, config.steps, settings)
            for recipe in config.recipes
            for width in config.widths
            for rate in self._rates(recipe, width)[0]
            for seed in config.seeds
            if (recipe, width, rate, seed) not in self.done
        ]
        return sorted(trials, key=lambda trial: -trial.width)  # stable: recipes stay in their order

    def _rates(self, recipe: str, width: int) -> tuple[list[float], bool]:
        """The rates of one curve that follow from the finished trials, and whether these are all."""
        rates, settled = self._searched(recipe, width)
        if width != self.config.widths[-1] or len(self.config.widths) == 1:
            return rates, settled
        narrowest = self.config.widths[0]
        if not self._searched(recipe, narrowest)[1]:
            return rates, False
        vertex = fit.optimum(points(self.log.records, recipe, narrowest)).log2_lr
        transferred = [] if vertex is None else [transfer_rate(vertex)]
        return rates + [rate for rate in transferred if rate not in rates], settled

    def _searched(self, recipe: str, width: int) -> tuple[list[float], bool]:
        """Replay the search on the finished trials of its own rates, without the transferred rate."""
        rates: list[float] = []
        while True:
            records = [self.done.get((recipe, width, rate, seed)) for rate in rates for seed in self.config.seeds]
            finished = [record for record in records if record is not None]
            if len(finished) < len(records):
                return rates, False
            means = fit.mean_curve(points(finished, recipe, width))
            new = self.config.search.next(recipe, means)
            if not new:
                return rates, True
            rates += new

    def _progress(self, record: Record, workers: int) -> Progress:
        config, seeds = self.config, len(self.config.seeds)
        expected, seconds_left = 0, 0.0
        for recipe in config.recipes:
            for width in config.widths:
                rates, settled = self._rates(recipe, width)
                runs = seeds * (len(rates) if settled else max(len(rates), config.search.expected))
                done = sum(key[:2] == (recipe, width) for key in self.done)
                expected += runs
                seconds_left += max(0, runs - done) * self._cost(width)
        return Progress(record, len(self.done), expected, seconds_left / workers)

    def _cost(self, width: int) -> float:
        """Seconds of a run: measured at this width, else at the nearest one and scaled.

        A step of a small model costs between width**1 (memory) and width**2 (products).
        """
        times: dict[int, list[float]] = {}
        for record in self.log.records:
            times.setdefault(record["width"], []).append(record["seconds"])
        nearest = min(times, key=lambda other: abs(other - width))
        mean = sum(times[nearest]) / len(times[nearest])
        scale: float = (width / nearest) ** 1.5
        return mean * scale

    def _died(self, running: Mapping[Any, Trial]) -> str:
        return (
            f"a worker process was killed (out of memory?) while running {'; '.join(map(str, running.values()))}. "
            f"{len(self.done)} finished runs are kept in {self.log.path}: run again to go on, "
            "with fewer workers if memory was the cause"
        )


def _to_record(trial: Trial, result: TrialResult) -> Record:
    """One line of ``results.jsonl``: strict JSON, no loss where the run diverged."""
    losses = result.train_loss, result.val_loss
    diverged = result.diverged or any(loss is None or not math.isfinite(loss) for loss in losses)
    train, validation = (None, None) if diverged else losses
    return {
        "recipe": trial.recipe,
        "width": trial.width,
        "log2_lr": trial.log2_lr,
        "seed": trial.seed,
        "steps": trial.steps,
        "train_loss": train,
        "val_loss": validation,
        "diverged": diverged,
        "seconds": round(result.seconds, 3),
        **({"facts": dict(result.facts)} if result.facts else {}),
    }
