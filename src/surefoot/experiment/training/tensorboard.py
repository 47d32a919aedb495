"""A run's numbers as TensorBoard scalars."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, final

from surefoot.experiment.files import Record

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


@final
class Board:
    """Writes `loss`, `val_loss`, `lr`, `norm/NAME` and `update/NAME` as scalars. Use as a context manager.

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

    def losses(self, record: Record) -> None:
        """Write the losses and the learning rate of a record of the training log."""
        self._write(record["step"], {key: record.get(key) for key in ("loss", "val_loss", "val_loss_average", "lr")})

    def norms(self, line: Record) -> None:
        """Write the norms and updates of a record of `norms.jsonl`."""
        norms = {f"norm/{name}": lower for name, (lower, _) in line["norms"].items()}
        updates = {f"update/{name}": value for name, value in line.get("updates", {}).items()}
        self._write(line["step"], norms | updates)

    def _write(self, step: int, scalars: dict[str, float | None]) -> None:
        if self._writer is None:
            self._writer = self._make(str(self._folder), purge_step=step)
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()
