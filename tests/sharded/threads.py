"""Several ranks as threads of one process, on torch's threaded process group: `run(4, function)`."""

import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)


def run(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(rank, *args)` on every rank; their results, or the first error with its traceback."""
    results: list[Any] = [None] * ranks
    errors: list[str] = []
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    store = dist.HashStore()

    def work(rank: int) -> None:
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
