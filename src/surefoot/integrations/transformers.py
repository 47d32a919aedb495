"""Hugging Face's Trainer: the stability numbers of `SteepestDescent` in its log."""

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from surefoot.monitor.weights import worst


class StabilityLog(TrainerCallback):
    """Log the largest stability numbers of all parameters whenever the Trainer logs its loss, every `logging_steps`.

    Args:
        log: the Trainer's method `log`, which reaches its history and every reporter.
    """

    def __init__(self, log: Callable[[dict[str, float]], None]) -> None:
        self._log = log

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Measure after the step whose loss is logged; on every process, since sharded weights need all."""
        if "loss" in given["logs"]:
            optimizer = getattr(given["optimizer"], "optimizer", given["optimizer"])  # accelerate wraps it
            self._log(worst(optimizer.stability()))
