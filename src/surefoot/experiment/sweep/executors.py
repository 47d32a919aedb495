"""Where a sweep's runs are run: the interface of all executors, and the one for this machine, a pool of processes."""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

from surefoot.experiment.errors import DataError, SweepError

Item = TypeVar("Item", bound=Hashable)
Function = Callable[[Any], Any]


class Killed(Exception):
    """Why a run has no result: its process ended without a Python exception, or ran out of memory."""


class NeverStarted(Killed):
    """As `Killed`, for a process that ended before it could begin the run."""


@dataclass(eq=False)
class Raised(Exception):
    """What a run raised in another process: one line for people, and its traceback, which is the text of this one.

    Args:
        summary: the exception's name and message.
        trace: its traceback.
        of_data: whether it was a `DataError`.
    """

    summary: str
    trace: str = ""
    of_data: bool = False

    def __str__(self) -> str:
        return self.trace or self.summary

    @classmethod
    def of(cls, error: BaseException) -> "Raised":
        """From an exception that is being handled.

        >>> Raised.of(KeyError("no such layer")).summary
        "KeyError: 'no such layer'"
        """
        trace = "".join(traceback.format_exception(error))
        return cls(f"{type(error).__name__}: {error}", trace, isinstance(error, DataError))


class Executor(Protocol):
    """Runs functions in other processes: begins them, waits for them, ends them."""

    @property
    def workers(self) -> int:
        """How many runs it is given at a time."""

    def submit(self, function: Function, items: Sequence[Any]) -> Sequence[Hashable]:
        """Begin `function(item)` for each item.

        Args:
            function: importable where it runs.
            items: its arguments, which can be pickled.

        Returns:
            A handle for each.
        """

    def wait(self, handles: Sequence[Any]) -> Sequence[tuple[Any, Any]]:
        """Wait until at least one of these has ended.

        Args:
            handles: of `submit`, not yet returned by this method.

        Returns:
            Those that have ended, each with what the function returned, `Killed` or `Raised`.
        """

    def close(self) -> None:
        """End whatever still runs. A later `submit` begins anew."""


def outcomes(
    executor: Executor, function: Function, wanted: Callable[[], Sequence[Item]]
) -> Iterator[tuple[Item, Any]]:
    """Run items on an executor until none is wanted. One whose process is killed is begun once more.

    Args:
        executor: where; as many items as it has workers are under way at a time.
        function: what is called with each item.
        wanted: gives the items without a result, the most urgent first; asked again whenever one has ended.

    Yields:
        Each item that has ended, with its result, or `Killed` if its process was killed twice.

    Raises:
        SweepError: the function raised (`DataError` if it was one), or twice a process could not even begin.
    """
    running: dict[Hashable, Item] = {}
    killed: set[Item] = set()
    while True:
        under_way = set(running.values())
        waiting = [item for item in wanted() if item not in under_way]
        if begun := waiting[: max(0, executor.workers - len(under_way))]:
            running.update(zip(executor.submit(function, begun), begun, strict=True))
        if not running:
            return
        ended = [(running.pop(handle), end) for handle, end in executor.wait(list(running))]
        for item, end in sorted(ended, key=lambda one: isinstance(one[1], Raised | NeverStarted)):  # results first
            if isinstance(end, Killed) and item not in killed:
                killed.add(item)
            elif isinstance(end, NeverStarted):  # no fault of the run: an environment is broken
                main = "a script that starts a sweep needs `if __name__ == '__main__'`"
                raise SweepError(f"{item}: twice {end} before it could begin; {main}") from end
            elif isinstance(end, Raised):
                raise (DataError if end.of_data else SweepError)(f"{item}: {end.summary}") from end
            else:
                yield item, end


def guarded(function: Function, item: Any) -> Any:
    """Called in a worker process: run the function on one thread, and return what it raises as `Raised`.

    Out of memory counts as `Killed`, as if the system had ended it: other runs may have enough.
    """
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")  # read when torch is loaded
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    try:
        with redirect_stdout(sys.stderr):  # what a model prints is no result
            return function(item)
    except (Exception, SystemExit) as error:
        name = type(error).__name__
        return Killed(f"{name}: {error}") if name in ("MemoryError", "OutOfMemoryError") else Raised.of(error)


def usable_cores() -> int:
    """Number of CPU cores that this process may use: its affinity mask, and a container's quota if there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()  # "max 100000", or microseconds (cgroup v2)
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
        self._idle = [worker for worker in self._idle if worker.process.is_alive()]
        begun = [self._idle.pop() if self._idle else _Worker() for _ in items]
        self._busy += begun
        for worker, item in zip(begun, items, strict=True):
            worker.begin(function, item)
        return begun

    def wait(self, handles: Sequence["_Worker"]) -> list[tuple["_Worker", Any]]:
        """As in `Executor`."""
        ended: list[tuple[_Worker, Any]] = []
        while not ended:
            # A process that a run has forked keeps the pipe open when the worker is killed, hence a look each second.
            connection.wait([worker.pipe for worker in handles], timeout=1.0)
            ended = [(worker, end) for worker in handles for end in worker.ends()]
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
        """Send a run to the process; if that has died, `ends` says so."""
        work = pickle.dumps((function, item))
        with suppress(OSError):
            self.pipe.send_bytes(work)

    def ends(self) -> list[Any]:
        """How the run has ended: its result, `Killed` or `Raised`; empty if it has not."""
        died = not self.process.is_alive()  # asked before the pipe, into which it may have written last
        try:
            while self.pipe.poll():
                message = self.pipe.recv()
                if self._started:
                    return [pickle.loads(message) if isinstance(message, bytes) else message]
                self._started = True
        except (EOFError, OSError):
            self.process.join()
            died = True
        kind = Killed if self._started else NeverStarted
        return [kind(f"its worker process ended with {_code(self.process.exitcode or 0)}")] if died else []


def _code(code: int) -> str:
    """An exit code, or the signal that it stands for.

    >>> _code(-9), _code(3)
    ('SIGKILL (out of memory?)', 'exit code 3')
    """
    with suppress(ValueError):  # it is not negative, or a signal without a name
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
    assert parent is not None, "a worker is spawned"
    parent.join()
    os._exit(1)
