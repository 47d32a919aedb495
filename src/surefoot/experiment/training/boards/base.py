"""What every board draws of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Self

from surefoot.experiment.files import Record

_OF_LOSSES = ("loss", "val_loss", "val_loss_average", "lr", "tokens_per_second", "utilisation", "optimizer_share")


class Board(ABC):
    """Draws the numbers of a record of the training log by their names, and `norm/NAME`, `update/NAME`.

    Use as a context manager.
    """

    def losses(self, record: Record) -> None:
        """Draw the losses, the learning rate and the throughput of a record of the training log."""
        self._draw(record["step"], {key: record.get(key) for key in _OF_LOSSES})

    def norms(self, line: Record) -> None:
        """Draw the norms and updates of a record of `norms.jsonl`."""
        norms = {f"norm/{name}": lower for name, (lower, _) in line["norms"].items()}
        updates = {f"update/{name}": value for name, value in line.get("updates", {}).items()}
        self._draw(line["step"], norms | updates)

    def _draw(self, step: int, scalars: Mapping[str, float | None]) -> None:
        self._write(step, {name: value for name, value in scalars.items() if value is not None})

    @abstractmethod
    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write numbers of a step, which is never below that of an earlier call."""

    @abstractmethod
    def _close(self) -> None:
        """Finish what was written, if anything was."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
