import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from surefoot.experiment.files import Log

from .commands import CORPUS


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(CORPUS)
    return path


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def signal_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str, int], None]:
    """Sends this process a signal once, when a log has got its n-th record."""

    def arrange(number: int, name: str, count: int) -> None:
        append = Log.append

        def append_and_signal(log: Log, record: dict[str, object]) -> None:
            append(log, record)
            if log.path.name == name and len(log.records) == count:
                monkeypatch.setattr(Log, "append", append)
                signal.raise_signal(number)

        monkeypatch.setattr(Log, "append", append_and_signal)

    return arrange
