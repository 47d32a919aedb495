"""The executors of clusters: a task of Ray core for each run, or job arrays of slurm by submitit."""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.experiment.errors import importing
from surefoot.experiment.sweep.executors import Function, Killed, Raised, guarded

MINUTES = 60
"""Time limit of a run without another; submitit's own is five minutes."""


class Ray:
    """Runs as Ray tasks of one CPU core each. Ray starts with the first run.

    Args:
        workers: runs that Ray is given at a time; by default as many as the cluster has room for.
        address: of a running cluster, as `ray.init` takes it; None starts Ray on this machine, unless the environment
            names a cluster in `RAY_ADDRESS`.
        gpus_per_run: GPUs that a run is given; a fraction for several runs on one.

    Raises:
        ValueError: Ray is not installed.
    """

    def __init__(self, workers: int | None = None, address: str | None = None, gpus_per_run: float = 0.0) -> None:
        with importing("ray", "--executor ray: {error}; it needs:"):
            import ray
        self._ray = ray
        self._asked, self._address, self._gpus = workers, address, gpus_per_run
        self._running: set[Any] = set()
        self._ours = False

    @property
    def workers(self) -> int:
        """The number asked for, or that of the runs for which the cluster has room now."""
        self._start()
        found = self._ray.cluster_resources()
        return self._asked or max(1, int(found.get("GPU", 0) / self._gpus if self._gpus else found.get("CPU", 1)))

    def submit(self, function: Function, items: Sequence[Any]) -> list[Any]:
        """As in `Executor`.

        Args:
            function: importable on every node, or of the main script.
            items: its arguments.

        Returns:
            A reference for each.

        Raises:
            ValueError: the cluster has fewer GPUs than a run is to get.
            ConnectionError: there is no cluster at the address.
        """
        self._start()
        task = self._ray.remote(num_cpus=1, num_gpus=self._gpus, max_retries=0)(guarded)
        begun = [task.remote(function, item) for item in items]
        self._running.update(begun)
        return begun

    def wait(self, handles: Sequence[Any]) -> list[tuple[Any, Any]]:
        """As in `Executor`."""
        self._ray.wait(list(handles), num_returns=1)
        ready, _ = self._ray.wait(list(handles), num_returns=len(handles), timeout=0)
        self._running.difference_update(ready)
        return [(handle, self._end(handle)) for handle in ready]

    def close(self) -> None:
        """As in `Executor`; a cluster that was running before goes on."""
        while self._running:
            self._ray.cancel(self._running.pop(), force=True)
        if self._ours:
            self._ray.shutdown()
        self._ours = False

    def _start(self) -> None:
        if self._ours or self._ray.is_initialized():
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else Ray reports to its makers
        host, _, port = (self._address or "").rpartition(":")
        if port.isdecimal() and "/" not in host:
            try:  # where nothing listens, Ray itself would go on trying for many minutes
                socket.create_connection((host, int(port)), timeout=10).close()
            except OSError as error:
                message = f"no Ray cluster at {self._address} ({error}): give its head's address"
                raise ConnectionError(message) from None
        sigterm = signal.getsignal(signal.SIGTERM)
        self._ray.init(self._address, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
        self._ours = True
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, sigterm)  # Ray has put its own in its place
        there = self._ray.cluster_resources().get("GPU", 0)
        if there < self._gpus:
            self.close()
            raise ValueError(f"--gpus-per-run {self._gpus:g}: no run could start, Ray has only {there:g} GPUs")

    def _end(self, handle: Any) -> Any:
        errors = self._ray.exceptions
        killed = (errors.WorkerCrashedError, errors.OutOfMemoryError, errors.NodeDiedError, errors.ObjectLostError)
        try:
            return self._ray.get(handle)
        except killed as error:
            return Killed(f"its Ray worker died ({type(error).__name__})")
        except errors.RayError as error:
            return Raised.of(error)


class Slurm:
    """Runs as slurm jobs of one CPU core each; what can begin together is one job array.

    Args:
        folder: for submitit's files and the runs' logs, on a disk that every node sees.
        workers: runs that slurm is given at a time; None for 64.
        gpus_per_run: GPUs that a run is given.
        options: of slurm, by submitit's names: `partition`, `time` in minutes, `account`, `mem`.
        cluster: "slurm"; with "local" submitit starts the jobs itself, for tests.

    Raises:
        ValueError: submitit is not installed, this machine has no slurm, or an option does not exist.
    """

    def __init__(
        self, folder: Path, workers: int | None, gpus_per_run: int, options: Mapping[str, Any], cluster: str = "slurm"
    ) -> None:
        with importing("slurm", "--executor slurm: {error}; it needs:"):
            import submitit
        self.workers: int = workers or 64
        self._errors = submitit.core.utils
        given = {"time": MINUTES, "array_parallelism": self.workers, **options}
        own = {"name": "surefoot", "cpus_per_task": 1, "gpus_per_node": gpus_per_run or None}
        try:
            self._executor = submitit.AutoExecutor(folder, cluster=cluster)
            self._executor.update_parameters(**own, **{f"slurm_{key}": value for key, value in given.items()})
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
            time.sleep(0.5)
        self._running = [job for job in self._running if job not in done]
        return [(job, self._end(job)) for job in done]

    def close(self) -> None:
        """As in `Executor`: jobs that wait or run are cancelled."""
        while self._running:
            self._running.pop().cancel(check=False)

    def _end(self, job: Any) -> Any:
        try:
            end = job.result()
        except self._errors.FailedJobError as error:  # what was sent or returned cannot be read there
            return Raised.of(error)
        except self._errors.UncompletedJobError:
            return Killed(f"slurm job {job.job_id} left no result; state {job.state}, see {job.paths.stderr}")
        if isinstance(end, Raised) and end.summary.startswith("UncompletedJobError"):  # submitit's, on a signal
            return Killed(f"slurm job {job.job_id} was stopped: {end.summary}")
        return end
