"""The training loop, once: `surefoot train`, the sweep and the studies all run this one."""

from __future__ import annotations

import time
from collections.abc import Callable

from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.distributed.processes import Layout
from surefoot.experiment.training.checkpoint import Checkpoints
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.methods import Method
from surefoot.experiment.training.run import CHECK_EVERY, Record, Run, TrainResult


def train(
    config: TrainConfig,
    corpus: Corpus,
    *,
    method: Method | None = None,
    layout: Layout | None = None,
    on_step: Callable[[Record], None] | None = None,
    observe: Callable[[Run], None] | None = None,
    log_every: int = 10,
    eval_every: int = 0,
    checkpoints: Checkpoints | None = None,
) -> TrainResult:
    """Train a model, from its newest checkpoint if there is one. A run that diverges ends early.

    Args:
        config: settings of the run.
        corpus: the data.
        method: overrides the method that `config` names.
        layout: how the work of a step is divided; default: one process, the whole batch at once.
        on_step: called with a record of `Run` every `log_every` steps and at the end.
        observe: called with the run before its first step and whenever `on_step` is.
        log_every: steps between two records.
        eval_every: steps between two evaluations, whose `val_loss` joins the record; 0: only at the end.
        checkpoints: folder to save to and to resume from.

    Returns:
        The outcome, as the run has it after its last step.

    Raises:
        ValueError: an impossible configuration, or checkpoints of another run.
        OSError: a checkpoint cannot be written.
    """
    run = Run(config, corpus, method, layout)
    _begin(run, observe, checkpoints)
    start, diverged = time.perf_counter() - run.seconds, _diverged(run)
    while run.step < config.schedule.steps and not diverged:
        run.advance(keep=observe is not None and _due(run, log_every, ahead=1))
        logs = (diverged := _diverged(run)) or _due(run, eval_every) or _due(run, log_every)
        if (logs and (on_step or observe)) or (checkpoints and _due(run, checkpoints.every)):
            _stop_clock(run, start)
            val_loss = _log(run, on_step, observe, evaluates=_due(run, eval_every)) if logs else None
            if checkpoints and _due(run, checkpoints.every):
                checkpoints.write(run, val_loss)
            start = time.perf_counter() - run.seconds  # neither evaluating, observing nor saving counts as training
    _stop_clock(run, start)
    if checkpoints:
        checkpoints.close()
    return run.result()


def _begin(run: Run, observe: Callable[[Run], None] | None, checkpoints: Checkpoints | None) -> None:
    if checkpoints:
        checkpoints.resume(run)
    if observe and run.step == 0:
        observe(run)


def _log(
    run: Run, on_step: Callable[[Record], None] | None, observe: Callable[[Run], None] | None, evaluates: bool
) -> float | None:
    """Call what observes the run; the validation loss, if it was measured."""
    val_loss = run.validate() if evaluates else None
    if on_step is not None:
        on_step(run.record() | ({"val_loss": val_loss} if evaluates else {}))
    if observe is not None:
        observe(run)
    return val_loss


def _stop_clock(run: Run, start: float) -> None:
    run.wait()
    run.seconds = time.perf_counter() - start


def _diverged(run: Run) -> bool:
    return run.step % CHECK_EVERY == 0 and run.diverged()


def _due(run: Run, every: int, ahead: int = 0) -> bool:
    """Whether something that happens every so many steps, and at the end, happens now or so many steps ahead."""
    step = run.step + ahead
    return every > 0 and (step == run.config.schedule.steps or step % every == 0)
