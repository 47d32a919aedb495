"""A run's numbers as TensorBoard scalars."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, final

from surefoot.experiment.training.boards.base import Board

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


@final
class TensorBoard(Board):
    """Writes scalars to a folder.

    Args:
        folder: created at the first record; if a run is resumed, later steps in it are replaced.

    Raises:
        RuntimeError: the package tensorboard is missing.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ModuleNotFoundError as error:
            raise RuntimeError(f"--tensorboard: {error}; pip install 'surefoot[tensorboard]'") from error
        self._folder, self._make = folder, SummaryWriter
        self._writer: SummaryWriter | None = None

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = self._make(str(self._folder), purge_step=step)
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
