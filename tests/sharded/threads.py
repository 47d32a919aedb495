"""Several ranks as threads of one process, on torch's threaded process group: `run(4, function)`."""

import contextlib
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Threads that take turns at Python's lock, operation by operation, take half the time on one core."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores, worker = os.sched_getaffinity(0), os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    os.sched_setaffinity(0, {sorted(cores)[int(worker[2:]) % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def run(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(rank, *args)` on every rank; their results, or the first error with its traceback."""
    results: list[Any] = [None] * ranks
    errors: list[str] = []
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    store = dist.HashStore()

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(backend="threaded", rank=rank, world_size=ranks, store=store)
        try:
            results[rank] = function(rank, *args)
        except BaseException as error:
            errors.append(f"rank {rank}:\n{traceback.format_exc()}")
            ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(ranks)]
    try:
        with one_core():
            for thread in threads:
                thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank hangs"
        ProcessLocalGroup.reset()
    finally:
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    first = [error for error in errors if "_terminate" not in error] or errors
    assert not first, first[0]
    return results
