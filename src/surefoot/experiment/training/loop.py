"""The training loop, once: `surefoot train`, the sweep and the studies all run this one."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.distributed.processes import Layout
from surefoot.experiment.distributed.stop import Stop
from surefoot.experiment.training.checkpoint import Checkpoints
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.methods import Method
from surefoot.experiment.training.run import CHECK_EVERY, Record, Run, TrainResult
from surefoot.experiment.training.throughput import Meter


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

    With checkpoints, SIGTERM and Ctrl-C first let the present step end and save it, then act as they would without:
    nothing of the finished steps is lost. A second one acts at once.

    Args:
        config: settings of the run.
        corpus: the data.
        method: overrides the method that `config` names.
        layout: how the work of a step is divided; default: one process, the whole batch at once.
        on_step: called with a record of `Run` and of `Meter` every `log_every` steps and at the end.
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
    run, watch = Run(config, corpus, method, layout), _Watch(on_step, observe, log_every, eval_every)
    if checkpoints:
        checkpoints.resume(run)
    if observe and run.step == 0:
        observe(run)
    meter = Meter(run, times=on_step is not None)
    with Stop(run.layout.processes) if checkpoints else nullcontext() as stop:
        _take_steps(run, meter, watch, checkpoints, stop)
        if checkpoints:
            checkpoints.close()
    return meter.of_all(run.result())


@dataclass(frozen=True)
class _Watch:
    """The observers of a run, and when they are called: as the arguments of `train`."""

    on_step: Callable[[Record], None] | None
    observe: Callable[[Run], None] | None
    log_every: int
    eval_every: int

    def look(self, run: Run, meter: Meter) -> float | None:
        """Call the observers of the run; returns the validation loss if it was measured."""
        losses = run.evaluate() if _due(run, self.eval_every) else {}
        if self.on_step is not None:
            self.on_step(run.record() | meter.window() | losses)
        if self.observe is not None:
            self.observe(run)
        return losses.get("val_loss")


def _take_steps(run: Run, meter: Meter, watch: _Watch, checkpoints: Checkpoints | None, stop: Stop | None) -> None:
    """Take the run's steps, until its end, divergence or a signal."""
    diverged, stopped = _diverged(run), False
    meter.start()
    while run.step < run.config.steps and not diverged and not stopped:
        run.advance(keep=watch.observe is not None and _due(run, watch.log_every, ahead=1))
        stopped = stop is not None and stop.asked()
        logs = (diverged := _diverged(run)) or _due(run, watch.eval_every) or _due(run, watch.log_every)
        saves = checkpoints and (stopped or _due(run, checkpoints.every))
        if (logs and (watch.on_step or watch.observe)) or saves:
            meter.stop()
            val_loss = watch.look(run, meter) if logs else None
            if checkpoints and saves:
                checkpoints.write(run, val_loss)
            meter.start()
    meter.stop()


def _diverged(run: Run) -> bool:
    return run.step % CHECK_EVERY == 0 and run.diverged()


def _due(run: Run, every: int, ahead: int = 0) -> bool:
    """Whether an event of every so many steps, and of the end, is due now or so many steps ahead."""
    step = run.step + ahead
    return every > 0 and (step == run.config.steps or step % every == 0)
