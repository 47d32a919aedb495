"""`full_precision`: products of float32 matrices in float32, whatever the process's settings are."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_BACKENDS = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


class _ProcessFlags:
    """Sets `fp32_precision` of all backends to `ieee` while at least one user needs it.

    The flags belong to the process, not to a thread: a count of the users under a lock decides when to restore them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._replaced: dict[Any, str] = {}  # settings to restore, by backend

    def acquire(self) -> None:
        with self._lock:
            self._users += 1
            for backend in _BACKENDS:
                if backend.fp32_precision != "ieee":
                    self._replaced[backend] = backend.fp32_precision
                    backend.fp32_precision = "ieee"

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            while self._replaced:
                backend, precision = self._replaced.popitem()
                if backend.fp32_precision == "ieee":  # otherwise it was changed meanwhile, and stays so
                    backend.fp32_precision = precision


_FLAGS = _ProcessFlags()


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Context in which float32 products are float32 products: no autocast, no TF32, no bfloat16 passes of oneDNN.

    Contexts may be nested and entered from several threads: the process's settings are restored when the last one is
    left. Until then float32 products of every other thread are computed in full precision too. If a setting is changed
    to something other than `ieee` inside, the change survives: the next context entered replaces it, and the last one
    left restores it. A setting that was inherited from `torch.backends.fp32_precision` is restored as an explicit one.
    Within a graph of `torch.compile` it does nothing: `surefoot.compiled` sets the flags around the graph.

    Args:
        device: the device whose autocast is switched off, for this thread.

    Yields:
        Nothing.

    >>> with torch.autocast("cpu", torch.bfloat16), full_precision(torch.device("cpu")):
    ...     (torch.eye(2) @ torch.eye(2)).dtype
    torch.float32
    """
    if torch.compiler.is_compiling():  # a graph cannot set flags
        yield
        return
    _FLAGS.acquire()
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        _FLAGS.release()
