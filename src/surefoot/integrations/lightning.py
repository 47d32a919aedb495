"""Lightning: the stability numbers of `SteepestDescent` in its loggers."""

from collections import Counter
from typing import Any

from lightning.pytorch import Callback

from surefoot.monitor.weights import worst
from surefoot.optim.optimizer import SteepestDescent


class StabilityLog(Callback):
    """Log the largest stability numbers of all parameters before every `log_every_n_steps`-th step of an optimizer.

    Where a module has several `SteepestDescent`, the logged names end with the optimizer's number.
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps = Counter[int]()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Measure and log; on every process, since sharded weights need all."""
        if not isinstance(optimizer, SteepestDescent):  # a module may have others beside it
            return
        ours = [id(each) for each in trainer.optimizers if isinstance(each, SteepestDescent)]
        first = trainer.global_step if len(trainer.optimizers) == 1 else 0  # which counts the steps of all
        step = self._steps.setdefault(id(optimizer), first)
        self._steps[id(optimizer)] += 1
        if trainer.loggers and step % trainer.log_every_n_steps == 0:
            number = f"/{ours.index(id(optimizer))}" if len(ours) > 1 else ""
            numbers = {f"{name}{number}": value for name, value in worst(optimizer.stability()).items()}
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=trainer.global_step)
