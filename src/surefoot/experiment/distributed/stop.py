"""SIGTERM and Ctrl-C as a request to end between two steps, on which all processes of a run agree."""

import signal
import threading
import time
from contextlib import ExitStack
from types import FrameType
from typing import Self

from surefoot.experiment.distributed.processes import Processes

TOGETHER = 1.0
"""Seconds within which signals count as one: `timeout` and terminals send theirs to a process and to its group."""


class Stop:
    """While it is open, the first SIGTERM or Ctrl-C is remembered and acts at its end; a second one acts at once.

    Use as a context manager. Only the main thread gets signals; one that is ignored stays so.

    Args:
        processes: all that train together.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._number, self._since, self._agreed = 0, 0.0, 0
        self._before = ExitStack()  # restores the earlier handlers

    def asked(self) -> bool:
        """Whether one of the processes has got such a signal: a collective, so that all agree."""
        self._agreed = self._processes.highest(self._number)
        return self._agreed > 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._number:
            self._number, self._since = number, now
        elif now - self._since > TOGETHER:
            self._before.close()
            signal.raise_signal(number)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before.callback(signal.signal, number, signal.signal(number, self._note))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._before.close()
        if kind is None and (number := self._number or self._agreed):
            signal.raise_signal(number)
