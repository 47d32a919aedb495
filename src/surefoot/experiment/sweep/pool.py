"""The executor of one machine: worker processes of one thread each."""

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any

from surefoot.experiment.sweep.executors import Function, Killed, NeverStarted, guarded

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "max 100000" or "<microseconds> <period>" (cgroup v2)


def usable_cores() -> int:
    """Number of CPU cores that this process may use: its affinity mask, and a container's quota if there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = _CGROUP_QUOTA.read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


class Pool:
    """Worker processes of one thread each on this machine, spawned (CUDA and threads do not survive a fork).

    Each has a pipe of its own, so that one that dies takes no other run with it.

    Args:
        workers: their number; by default one per usable core.
    """

    def __init__(self, workers: int | None = None) -> None:
        self.workers: int = workers or usable_cores()
        self._idle: list[_Worker] = []
        self._busy: list[_Worker] = []

    def submit(self, function: Function, items: Sequence[Any]) -> list["_Worker"]:
        """As in `Executor`; processes that have finished a run are used again."""
        begun = []
        for item in items:
            self._idle = [worker for worker in self._idle if worker.process.is_alive()]
            worker = self._idle.pop() if self._idle else _Worker()
            self._busy.append(worker)
            worker.begin(function, item)
            begun.append(worker)
        return begun

    def wait(self, handles: Sequence["_Worker"]) -> list[tuple["_Worker", Any]]:
        """As in `Executor`."""
        ended: list[tuple[_Worker, Any]] = []
        while not ended:
            # A process that a run has forked keeps the pipe open when the worker is killed, hence a look each second.
            connection.wait([worker.pipe for worker in handles], timeout=1.0)
            ends = [(worker, worker.end()) for worker in handles]
            ended = [(worker, end[0]) for worker, end in ends if end is not None]
        for worker, _ in ended:
            self._busy.remove(worker)
            self._idle.append(worker)
        return ended

    def close(self) -> None:
        """As in `Executor`: a running trial would otherwise delay the exit by minutes."""
        workers, self._idle, self._busy = self._idle + self._busy, [], []
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.process.join()
            worker.pipe.close()


class _Worker:
    """A process, and this end of the pipe to it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,))
        self.process.start()
        theirs.close()  # else the pipe would stay open when the process dies
        self._started = False

    def begin(self, function: Function, item: Any) -> None:
        """Send a run to the process; if that has died, `end` says so."""
        work = pickle.dumps((function, item))
        with suppress(OSError):
            self.pipe.send_bytes(work)

    def end(self) -> tuple[Any] | None:
        """How the run has ended: its result, `Killed` or `Raised`, in a tuple; None if it has not."""
        died = not self.process.is_alive()  # asked before the pipe, into which it may have written last
        try:
            while self.pipe.poll():
                message = self.pipe.recv()
                if self._started:
                    return (pickle.loads(message) if isinstance(message, bytes) else message,)
                self._started = True
        except (EOFError, OSError):
            self.process.join()
            died = True
        kind = Killed if self._started else NeverStarted
        return (kind(f"its worker process ended with {_code(self.process.exitcode)}"),) if died else None


def _code(code: int | None) -> str:
    """An exit code, or the signal that it stands for.

    >>> _code(-9), _code(3)
    ('SIGKILL (out of memory?)', 'exit code 3')
    """
    with suppress(ValueError):
        if code is not None and code < 0:
            return signal.Signals(-code).name + " (out of memory?)" * (code == -signal.SIGKILL)
    return f"exit code {code}"


def _serve(pipe: connection.Connection) -> None:
    """What a worker process does: say that it has started, then answer each run with its result."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, OSError):  # the parent has closed its end
        pipe.send("started")
        while True:
            pipe.send(guarded(_call, pipe.recv_bytes()))


def _call(work: bytes) -> bytes:
    function, item = pickle.loads(work)
    return pickle.dumps(function(item))


def _end_with_parent() -> None:
    """Exit when the parent has, in the middle of a run too."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
