"""Where a run's numbers are drawn while it trains: TensorBoard, Weights & Biases."""

import os
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, final

from surefoot.experiment.errors import importing
from surefoot.experiment.files import Record

_OF_LOSSES = ("loss", "val_loss", "val_loss_average", "lr", "tokens_per_second", "utilisation", "optimizer_share")


class Board(AbstractContextManager["Board"]):
    """Draws the numbers of a record of the training log by their names, and `norm/NAME`, `update/NAME`.

    Use as a context manager. Nothing is begun before the first record.
    """

    _begun: Any = None

    def losses(self, record: Record) -> None:
        """Draw the losses, the learning rate and the throughput of a record of the training log."""
        self._draw(record["step"], {key: record.get(key) for key in _OF_LOSSES})

    def norms(self, line: Record) -> None:
        """Draw the norms and updates of a record of `norms.jsonl`."""
        norms = {f"norm/{name}": lower for name, (lower, _) in line["norms"].items()}
        self._draw(line["step"], norms | {f"update/{name}": value for name, value in line.get("updates", {}).items()})

    def _draw(self, step: int, scalars: Mapping[str, float | None]) -> None:
        self._begun = self._begun or self._begin(step)
        self._write(step, {name: value for name, value in scalars.items() if value is not None})

    @abstractmethod
    def _begin(self, step: int) -> Any:
        """What numbers are written to, from this step on."""

    @abstractmethod
    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write numbers of a step, which is never below that of an earlier call."""

    @abstractmethod
    def _end(self) -> None:
        """Finish what was begun."""

    def __exit__(self, *_: object) -> None:
        if self._begun is not None:
            self._end()


@final
class TensorBoard(Board):
    """Writes scalars to a folder.

    Args:
        folder: created at the first record; if a run is resumed, later steps in it are replaced.

    Raises:
        RuntimeError: the package tensorboard is missing.
    """

    def __init__(self, folder: Path) -> None:
        with importing("tensorboard", "--tensorboard: {error};", RuntimeError):
            from torch.utils.tensorboard.writer import SummaryWriter
        self._folder, self._make = folder, SummaryWriter

    def _begin(self, step: int) -> Any:
        return self._make(str(self._folder), purge_step=step)

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._begun.add_scalar(name, value, step)
        self._begun.flush()

    def _end(self) -> None:
        self._begun.close()


@final
class Wandb(Board):
    """Logs to a run of Weights & Biases, offline unless WANDB_MODE is set; a resumed training is another run.

    Args:
        folder: the run directory, which gives the run its name; files are written to `wandb/` in it.
        config: the settings, shown beside the run.

    Raises:
        RuntimeError: the package wandb is missing.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        with importing("wandb", "--wandb: {error};", RuntimeError):
            import wandb
        self._init, self._folder, self._config = wandb.init, folder, dict(config)

    def _begin(self, step: int) -> Any:
        mode = os.environ.get("WANDB_MODE", "offline")
        return self._init(dir=str(self._folder), name=self._folder.name, config=self._config, mode=mode)

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._begun.log(dict(scalars), step=step)

    def _end(self) -> None:
        self._begun.finish()
