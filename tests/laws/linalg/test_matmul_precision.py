"""`full_precision`: float32 products inside, and the process's own settings back outside, also with several threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from surefoot.linalg.device import full_precision

CPU = torch.device("cpu")
BACKENDS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)


def settings() -> tuple[str, str]:
    return tuple(backend.fp32_precision for backend in BACKENDS)


@pytest.fixture
def chosen():
    """Settings that a user may have chosen, other than ieee, for the length of a test."""
    before = settings()
    for backend, precision in zip(BACKENDS, ("tf32", "bf16"), strict=True):
        backend.fp32_precision = precision
    yield settings()
    for backend, precision in zip(BACKENDS, before, strict=True):
        backend.fp32_precision = precision


def test_everything_is_switched_off_and_back(chosen):
    with torch.autocast("cpu", torch.bfloat16), full_precision(CPU):
        assert settings() == ("ieee", "ieee")
        assert not torch.is_autocast_enabled("cpu")
    assert settings() == chosen


def test_nested_blocks_restore_at_the_outermost(chosen):
    with full_precision(CPU):
        with full_precision(CPU):
            assert settings() == ("ieee", "ieee")
        assert settings() == ("ieee", "ieee")
    assert settings() == chosen


def test_an_exception_restores(chosen):
    with pytest.raises(RuntimeError, match="inside"), full_precision(CPU):
        raise RuntimeError("inside")
    assert settings() == chosen


def test_threads_that_overlap_restore_the_users_setting(chosen):
    """Each of four threads leaves while a later one is still inside: ieee until the last one leaves."""
    entered, may_leave = ([threading.Event() for _ in range(4)] for _ in range(2))

    def work(index: int) -> tuple[str, str]:
        with full_precision(CPU):
            entered[index].set()
            assert may_leave[index].wait(10)
            return settings()

    with ThreadPoolExecutor(4) as pool:
        threads = []
        for index in range(4):
            threads.append(pool.submit(work, index))
            assert entered[index].wait(10)
        inside = []
        for index in range(4):
            may_leave[index].set()
            inside.append(threads[index].result(10))
    assert inside == [("ieee", "ieee")] * 4
    assert settings() == chosen


def test_many_threads_at_random(chosen):
    def work(_: int) -> bool:
        alike = []
        for _ in range(200):
            with full_precision(CPU):
                alike.append(settings() == ("ieee", "ieee"))
        return all(alike)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert settings() == chosen


def test_a_setting_that_the_user_changes_inside_stays(chosen):
    with full_precision(CPU):
        BACKENDS[1].fp32_precision = "tf32"
    assert settings() == (chosen[0], "tf32")


def test_a_setting_changed_inside_is_replaced_for_a_block_that_follows(chosen):
    with full_precision(CPU):
        BACKENDS[1].fp32_precision = "tf32"
        with full_precision(CPU):
            assert settings() == ("ieee", "ieee")
    assert settings() == (chosen[0], "tf32")
