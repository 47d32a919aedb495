"""Where a run's numbers are drawn while it trains: TensorBoard, Weights & Biases."""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from surefoot.experiment.errors import importing
from surefoot.experiment.files import Record

_OF_LOSSES = ("loss", "val_loss", "val_loss_average", "lr", "tokens_per_second", "utilisation", "optimizer_share")

Write = Callable[[int, dict[str, float]], object]


class Board(ExitStack):
    """Draws the numbers of a record of the training log by their names, and `norm/NAME`, `update/NAME`.

    Use as a context manager. Nothing is begun before the first record.

    Args:
        begin: given the first step and the stack with which writing ends, returns the function that writes a step's
            numbers; steps never decrease.
    """

    def __init__(self, begin: Callable[[int, ExitStack], Write]) -> None:
        super().__init__()
        self._begin = begin
        self._write: Write | None = None

    def losses(self, record: Record) -> None:
        """Draw the losses, the learning rate and the throughput of a record of the training log."""
        self._draw(record["step"], {key: record.get(key) for key in _OF_LOSSES})

    def norms(self, line: Record) -> None:
        """Draw the norms and updates of a record of `norms.jsonl`."""
        norms = {f"norm/{name}": lower for name, (lower, _) in line["norms"].items()}
        self._draw(line["step"], norms | {f"update/{name}": value for name, value in line.get("updates", {}).items()})

    def _draw(self, step: int, scalars: Mapping[str, float | None]) -> None:
        self._write = self._write or self._begin(step, self)
        self._write(step, {name: value for name, value in scalars.items() if value is not None})


def tensorboard(folder: Path) -> Board:
    """Writes scalars to a folder.

    Args:
        folder: created at the first record; if a run is resumed, later steps in it are replaced.

    Returns:
        The board.

    Raises:
        RuntimeError: the package tensorboard is missing.
    """
    with importing("tensorboard", "--tensorboard: {error};", RuntimeError):
        from torch.utils.tensorboard.writer import SummaryWriter

    def begin(step: int, begun: ExitStack) -> Write:
        writer = begun.enter_context(SummaryWriter(str(folder), purge_step=step))

        def write(step: int, scalars: dict[str, float]) -> None:
            for name, value in scalars.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        return write

    return Board(begin)


def wandb(folder: Path, config: Mapping[str, Any]) -> Board:
    """Logs to a run of Weights & Biases, offline unless WANDB_MODE is set; a resumed training is another run.

    Args:
        folder: the run directory, which gives the run its name; files are written to `wandb/` in it.
        config: the settings, shown beside the run.

    Returns:
        The board.

    Raises:
        RuntimeError: the package wandb is missing.
    """
    with importing("wandb", "--wandb: {error};", RuntimeError):
        from wandb import init

    def begin(step: int, begun: ExitStack) -> Write:
        mode = os.environ.get("WANDB_MODE", "offline")
        run = init(dir=str(folder), name=folder.name, config=dict(config), mode=mode)
        begun.callback(run.finish)
        return lambda step, scalars: run.log(scalars, step=step)

    return Board(begin)
