"""Worker processes of one thread each."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "max 100000" or "<microseconds> <period>" (cgroup v2)


def usable_cores() -> int:
    """Number of CPU cores that this process may use: its affinity mask, and a container's quota if there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = _CGROUP_QUOTA.read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


@contextmanager
def worker_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of spawned processes (CUDA and threads do not survive a fork), terminated on exit."""
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()  # a running trial would otherwise delay the exit by minutes
        pool.shutdown(wait=True)


def _start_worker() -> None:
    """Restrict the worker to one thread, leave Ctrl-C to the parent, and end when the parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")  # read when torch is loaded
    if "torch" in sys.modules:  # the user's main module, imported again by spawn, has loaded it
        sys.modules["torch"].set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the parent has. A worker that waits for work has both ends of its queue open: no end of file comes."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
