"""Fixtures that several folders share."""

import gc
import os
import resource
import signal
from collections.abc import Callable, Iterator

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # processes that share the cores; torch is not imported yet
    os.environ.setdefault("OMP_NUM_THREADS", "1")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job, `make test &`, ignores Ctrl-C


def pytest_collection_finish() -> None:
    """Garbage collection need not look through all tests and modules again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def inline() -> Iterator[None]:
    """The command line's sweeps run in this process: no other has to start and import torch."""
    from inline_executor import Inline

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("surefoot.cli.chosen.executor", lambda arguments: Inline())
        yield


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """`surefoot train` leaves out its picture and page, which take longer than training a small model."""
    monkeypatch.setattr("surefoot.cli.training._draw", lambda out: None)


@pytest.fixture
def file_size_limit() -> Iterator[Callable[[int], None]]:
    """Limits the size of files in bytes, as a quota or a full disk would; removed afterwards."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
