"""The executor of a slurm cluster: job arrays by submitit."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.experiment.errors import importing
from surefoot.experiment.sweep.executors import Function, Killed, Raised, guarded

MINUTES = 60
"""Time limit of a run without another; submitit's own is five minutes."""

AT_A_TIME = 64
POLL_SECONDS = 0.5


class Slurm:
    """Runs as slurm jobs of one CPU core each; what can begin together is one job array.

    Args:
        folder: for submitit's files and the runs' logs, on a disk that every node sees.
        workers: runs that slurm is given at a time.
        gpus_per_run: GPUs that a run is given.
        options: of slurm, by submitit's names: `partition`, `time` in minutes, `account`, `mem`.
        cluster: "slurm"; with "local" submitit starts the jobs itself, for tests.

    Raises:
        ValueError: submitit is not installed, this machine has no slurm, or an option does not exist.
    """

    def __init__(
        self,
        folder: Path,
        workers: int | None = None,
        gpus_per_run: int = 0,
        options: Mapping[str, str | int] | None = None,
        cluster: str = "slurm",
    ) -> None:
        with importing("slurm", "--executor slurm: {error}; it needs:"):
            import submitit
        self.workers: int = workers or AT_A_TIME
        self._errors = submitit.core.utils
        given = {"time": MINUTES, "array_parallelism": self.workers, **(options or {})}
        try:
            self._executor = submitit.AutoExecutor(folder, cluster=cluster)
            self._executor.update_parameters(
                name="surefoot",
                cpus_per_task=1,
                gpus_per_node=gpus_per_run or None,
                **{f"slurm_{key}": value for key, value in given.items()},
            )
        except (RuntimeError, NameError, AssertionError) as error:
            raise ValueError(f"--executor slurm: {str(error).splitlines()[0]}") from None
        self._running: list[Any] = []

    def submit(self, function: Function, items: Sequence[Any]) -> list[Any]:
        """As in `Executor`."""
        jobs: list[Any] = self._executor.map_array(guarded, [function] * len(items), items)
        self._running += jobs
        return jobs

    def wait(self, handles: Sequence[Any]) -> list[tuple[Any, Any]]:
        """As in `Executor`."""
        while not (done := [job for job in handles if job.done()]):
            time.sleep(POLL_SECONDS)
        self._running = [job for job in self._running if job not in done]
        return [(job, self._end(job)) for job in done]

    def close(self) -> None:
        """As in `Executor`: jobs that wait or run are cancelled."""
        for job in self._running:
            job.cancel(check=False)
        self._running = []

    def _end(self, job: Any) -> Any:
        try:
            end = job.result()
        except self._errors.FailedJobError as error:  # what was sent or returned cannot be read there
            return Raised.of(error)
        except self._errors.UncompletedJobError:
            return Killed(f"slurm job {job.job_id} left no result, its state is {job.state}, see {job.paths.stderr}")
        if isinstance(end, Raised) and end.summary.startswith("UncompletedJobError"):  # submitit's, on a signal
            return Killed(f"slurm job {job.job_id} was stopped: {end.summary}")
        return end
