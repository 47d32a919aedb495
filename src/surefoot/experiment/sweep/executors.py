"""Where the runs of a sweep are run: three methods, and what every executor needs besides."""

import os
import sys
import traceback
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from surefoot.experiment.errors import DataError, SweepError

Item = TypeVar("Item", bound=Hashable)
Function = Callable[[Any], Any]


class Killed(Exception):
    """Why a run has no result: its process ended, and no Python exception says more."""


class NeverStarted(Killed):
    """As `Killed`, of a process that ended before it could begin the run."""


class Raised(Exception):
    """What a run raised, elsewhere: one line for people, and the traceback there, which is the text of this one.

    Args:
        summary: the exception's name and message.
        trace: its traceback.
        of_data: whether it was a `DataError`.
    """

    def __init__(self, summary: str, trace: str = "", of_data: bool = False) -> None:
        super().__init__(summary, trace, of_data)
        self.summary: str = summary
        self.trace: str = trace
        self.of_data: bool = of_data

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

    def error_of(self, item: object) -> Exception:
        """What to raise here when this ends an item: `DataError` if it was one there, else `SweepError`."""
        return (DataError if self.of_data else SweepError)(f"{item}: {self.summary}")


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


class Runs(Generic[Item]):
    """Items under way on an executor, each at most once at a time. One whose process is killed is begun once more.

    Args:
        executor: where.
        function: what is called with each item.
    """

    def __init__(self, executor: Executor, function: Function) -> None:
        self._executor, self._function = executor, function
        self._running: dict[Hashable, Item] = {}
        self._killed: set[Item] = set()

    def ended(self, wanted: Iterable[Item]) -> list[tuple[Item, Any]]:
        """Begin what is wanted and not yet under way, as far as there is room, and wait for what ends next.

        Args:
            wanted: items without a result, the most urgent first.

        Returns:
            The items that have ended, each with its result, `Raised`, or `Killed` (twice); empty if none was wanted.
        """
        wanted = list(wanted)
        while True:
            under_way = set(self._running.values())
            waiting = [item for item in wanted if item not in under_way]
            begun = waiting[: max(0, self._executor.workers - len(under_way))]
            if begun:
                self._running.update(zip(self._executor.submit(self._function, begun), begun, strict=True))
            if not self._running:
                return []
            ended = [(self._running.pop(handle), end) for handle, end in self._executor.wait(list(self._running))]
            if final := [(item, _final(end)) for item, end in ended if not self._again(item, end)]:
                return final

    def _again(self, item: Item, end: Any) -> bool:
        """Whether a run is begun once more: it was killed, for the first time."""
        again = isinstance(end, Killed) and item not in self._killed
        if again:
            self._killed.add(item)
        return again


def _final(end: Any) -> Any:
    """A process that twice cannot even begin is no fault of the run: an environment is broken, so nothing goes on."""
    if isinstance(end, NeverStarted):
        return Raised(
            f"twice {end} before it could begin; a script that starts a sweep needs `if __name__ == '__main__'`"
        )
    return end


def guarded(function: Function, item: Any) -> Any:
    """What a worker process calls: the function on one thread, what it raises returned as `Raised`."""
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")  # read when torch is loaded
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    try:
        return function(item)
    except (Exception, SystemExit) as error:
        return Raised.of(error)
