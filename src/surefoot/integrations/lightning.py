"""Lightning: the stability numbers of `SteepestDescent` in its loggers."""

from typing import Any

from lightning.pytorch import Callback

from surefoot.monitor.weights import worst
from surefoot.optim.optimizer import SteepestDescent


class StabilityLog(Callback):
    """Logs the largest stability numbers of all parameters before a step, every `log_every_n_steps` steps."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Measure and log; on every process, since sharded weights need all."""
        ours = isinstance(optimizer, SteepestDescent)  # a module may have others beside it
        if ours and trainer.loggers and trainer.global_step % trainer.log_every_n_steps == 0:
            numbers = worst(optimizer.stability())
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=trainer.global_step)
