"""A run's numbers in Weights & Biases: on the disk, unless the environment says otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from surefoot.experiment.training.boards.base import Board


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
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise RuntimeError(f"--wandb: {error}; pip install 'surefoot[wandb]'") from error
        self._init, self._folder, self._config = wandb.init, folder, dict(config)
        self._run: Any = None

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._run is None:
            mode = os.environ.get("WANDB_MODE", "offline")
            self._run = self._init(dir=str(self._folder), name=self._folder.name, config=self._config, mode=mode)
        self._run.log(dict(scalars), step=step)

    def _close(self) -> None:
        if self._run is not None:
            self._run.finish()
