"""The training loop, once: `surefoot train`, the sweep and the studies all run this one."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import nn

from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.training.checkpoint import Checkpoints
from surefoot.experiment.training.methods import Method
from surefoot.experiment.training.run import CHECK_EVERY, Record, Run, TrainConfig, TrainResult

__all__ = ["Checkpoints", "Record", "TrainConfig", "TrainResult", "train"]


def train(
    config: TrainConfig,
    corpus: Corpus,
    *,
    method: Method | None = None,
    prepare: Callable[[nn.Module], object] | None = None,
    on_step: Callable[[Record], None] | None = None,
    observe: Callable[[Run], None] | None = None,
    log_every: int = 10,
    eval_every: int = 0,
    checkpoints: Checkpoints | None = None,
) -> TrainResult:
    """Train a reference model; a run that diverges ends early and says so.

    Args:
        config, corpus, method, prepare: see `Run`.
        on_step: called with a record (step, loss, lr, tokens, seconds) every `log_every` steps and at the end.
        observe: called with the run before its first step and at the same steps, to look at it.
        eval_every: steps between two evaluations, whose `val_loss` joins the record; 0: none before the end.
        checkpoints: saved to, and resumed from when they hold one of this run.

    Raises:
        ValueError: an impossible configuration, or checkpoints of another run.
        OSError: a checkpoint cannot be written.
    """
    run = Run(config, corpus, method, prepare)
    saved = checkpoints.newest() if checkpoints else None
    if saved is not None:
        run.load_state(saved)
    if observe is not None and run.step == 0:
        observe(run)
    start, last = time.perf_counter() - run.seconds, config.steps
    listens, diverged = on_step is not None or observe is not None, _diverged(run)
    while run.step < last and not diverged:
        run.advance()
        diverged = _diverged(run)
        evaluates = eval_every > 0 and _due(run.step, last, eval_every)
        logs = listens and (evaluates or diverged or _due(run.step, last, log_every))
        saves = checkpoints is not None and _due(run.step, last, checkpoints.every)
        if not (logs or saves):
            continue
        run.wait()
        run.seconds = time.perf_counter() - start
        if on_step is not None and logs:
            on_step(run.record() | ({"val_loss": run.validate()} if evaluates else {}))
        if observe is not None and logs:
            observe(run)
        if checkpoints is not None and saves:
            checkpoints.save(run.step, run.state())
        start = time.perf_counter() - run.seconds  # evaluating, looking and saving are not training
    run.wait()
    run.seconds = time.perf_counter() - start
    return run.result()


def _diverged(run: Run) -> bool:
    return run.step % CHECK_EVERY == 0 and run.diverged()


def _due(step: int, last: int, every: int) -> bool:
    return step == last or step % every == 0
