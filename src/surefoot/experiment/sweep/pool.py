"""Worker processes for runs of one thread each."""

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
    """CPU cores this process may use: its affinity mask, and a container's quota if there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = _CGROUP_QUOTA.read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


@contextmanager
def worker_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of spawned processes (CUDA and threads do not survive a fork), stopped at once on exit."""
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()  # a run in flight would otherwise delay the exit by minutes
        pool.shutdown(wait=True)


def _start_worker() -> None:
    """One thread; Ctrl-C is the parent's to handle; never outlive the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")  # read when torch is loaded
    if "torch" in sys.modules:  # the user's main module, imported again by spawn, has loaded it
        sys.modules["torch"].set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker waiting for work holds both ends of its queue and would not notice a killed parent."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
