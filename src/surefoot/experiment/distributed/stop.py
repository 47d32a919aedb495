"""SIGTERM and Ctrl-C as a request to end between two steps, on which all processes of a run agree."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, final

from surefoot.experiment.distributed.processes import Processes


@final
class Stop:
    """While it is open, the first SIGTERM or Ctrl-C is remembered and acts at its end; a second one acts at once.

    Use as a context manager. Only the main thread gets signals; one that is ignored stays so.

    Args:
        processes: all that train together.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._number = 0
        self._before: dict[int, Any] = {}

    def asked(self) -> bool:
        """Whether one of the processes has got such a signal: a collective, so that all agree."""
        self._number = self._processes.highest(self._number) or self._number  # which may have come meanwhile
        return self._number > 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        self._restore()

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._restore()
        if self._number and kind is None:
            signal.raise_signal(self._number)
