"""What `surefoot train` does: one model, with a log and checkpoints, resumed where it stopped."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from surefoot.cli import chosen, options
from surefoot.cli.exit_codes import DIVERGED
from surefoot.cli.report import write_page
from surefoot.experiment.configs import CONFIG, claimed, read
from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.data.sources import evaluation, load
from surefoot.experiment.distributed.processes import ALONE, Layout, Processes, blocks_of
from surefoot.experiment.files import Log, continued, write_json
from surefoot.experiment.sweep.summary import environment
from surefoot.experiment.training.boards import Board, tensorboard, wandb
from surefoot.experiment.training.build import pick_device, require_model
from surefoot.experiment.training.checkpoint import Checkpoints
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train
from surefoot.experiment.training.names import AUTO
from surefoot.experiment.training.norm_alarm import Alarm
from surefoot.experiment.training.norm_log import NormLog, Norms
from surefoot.experiment.training.run import Run, TrainResult
from surefoot.experiment.training.throughput import Compute, flops_per_token, peak_of
from surefoot.scaling import LAWS

LOG, RESULT, ENVIRONMENT, CHECKPOINTS = "log.jsonl", "result.json", "environment.json", "checkpoints"
Training = Callable[..., TrainResult]
"""`train`, with the arguments that all processes share."""


def run(arguments: argparse.Namespace) -> int:
    """Train, or go on training.

    Args:
        arguments: of `surefoot train`, as parsed.

    Returns:
        The exit code.
    """
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    options.require_size(arguments.model, arguments)
    if arguments.keep_best and not arguments.eval_every:
        raise ValueError("--keep-best keeps the best of those saved at an evaluation: give --eval-every, too")
    config, source = chosen.config(arguments), chosen.data(arguments)
    if arguments.lr == AUTO and (begun := _begun_at(arguments.out)):
        config = config.replace(lr=begun)
    corpus = load(source, context=arguments.context)
    identity = {**config.to_json(), "text": corpus.name, "corpus": corpus.sha256}
    if arguments.eval_data is not None:
        other = evaluation(arguments.eval_data, source, corpus)
        other.require(arguments.context, ["validation"])
        corpus = replace(corpus, validation=other.validation)
        identity |= {"eval_text": other.name, "eval_corpus": other.sha256}
    require_model(config, corpus)
    with _processes(arguments) as processes:
        layout = Layout(processes, arguments.accumulate, arguments.recompute, _compile if arguments.compile else None)
        processes.rows(config.batch_size, 0, layout.accumulate)
        kept = {"keep": arguments.keep, "best": arguments.keep_best, "background": arguments.async_checkpoints}
        begins = {"start": arguments.start, "on_resume": _goes_on}
        checkpoints = Checkpoints(arguments.out / CHECKPOINTS, arguments.checkpoint_every, **kept, **begins)
        every = {"log_every": arguments.log_every, "eval_every": arguments.eval_every}
        training: Training = partial(train, config, corpus, layout=layout, checkpoints=checkpoints, **every)
        if not processes.first:
            # The other processes take part in every measurement, and write only their parts of checkpoints.
            norms = cache(partial(Norms, limit=arguments.norm_limit))  # made at the first look
            training(on_step=lambda record: None, observe=lambda run: norms(run).measure())
            return 0
        peak = arguments.peak_flops or peak_of(pick_device(config.device))
        compute = Compute(flops_per_token(config, corpus.vocab), peak and peak * processes.count)
        return _run_first(arguments, config, corpus, identity, training, compute)


def _begun_at(out: Path) -> float | None:
    """The learning rate of the run in a directory; None without one, or where it is damaged, which `claimed` says."""
    with suppress(OSError, ValueError):
        return lr if isinstance(lr := read(out / CONFIG).get("lr"), float | int) else None
    return None


def _run_first(
    arguments: argparse.Namespace, config: TrainConfig, corpus: Corpus, identity: dict[str, Any], training: Training,
    compute: Compute,
) -> int:  # fmt: skip
    """Train on the process that writes files and prints."""
    out: Path = arguments.out
    boards: list[Board] = [tensorboard(out / "tensorboard")] if arguments.tensorboard else []
    boards += [wandb(out, identity)] if arguments.wandb else []
    command = "the same command" if arguments.start == "auto" else "the same command with --resume auto"
    arguments.resume = f"{command} goes on from the newest checkpoint in {out / CHECKPOINTS}, if there is one"
    with claimed(out, "train", identity, LOG):
        write_json(out / ENVIRONMENT, environment())
        evaluated = f", validation: {identity['eval_text']}" if "eval_text" in identity else ""
        print(f"surefoot: writing to {out}/, data: {corpus.name}{evaluated}", file=sys.stderr)
        chosen.note_epochs(config, corpus)
        if arguments.lr == AUTO:
            law = f"the {'law' if arguments.method in LAWS else 'usual one'} of {arguments.method}"
            law += f", for {config.run.steps:,} steps of {config.run.tokens:,} tokens"
            if config.lr != config.replace(lr=AUTO).lr:  # under the law of another version, or at a rate that was given
                law = "which the run began with"
            print(f"surefoot: learning rate {config.lr:.4g}, {law}", file=sys.stderr)
        try:
            result = _train(arguments, training, boards, compute)
        except KeyboardInterrupt:
            _draw(out)
            raise
        shown = asdict(result) | compute.at(result.tokens_per_second)
        shown |= _measured_before(out / RESULT, shown)
        write_json(out / RESULT, shown)
        said = json.dumps(shown, allow_nan=False) if arguments.json else _sentence(result, corpus.unit)
        # Before pictures, which need gigabytes of addresses and may end the process.
        print(said, file=arguments.stdout, flush=True)
        _draw(out)
    return DIVERGED if result.diverged else 0


def _measured_before(path: Path, shown: dict[str, Any]) -> dict[str, Any]:
    """From an earlier result of the same steps, what this one, which took no steps, lacks: the time of a step."""
    with suppress(OSError, ValueError, KeyError):
        before = read(path)
        return {k: x for k, x in before.items() if before["steps"] == shown["steps"] and shown.get(k, x) is None}
    return {}


def _processes(arguments: argparse.Namespace) -> AbstractContextManager[Processes]:
    """The processes that `torchrun` started, or this one alone."""
    if not os.environ.keys() >= {"RANK", "WORLD_SIZE"}:
        asked = f"--mesh {arguments.mesh}" if arguments.mesh else "--async-checkpoints"
        if arguments.mesh or arguments.async_checkpoints:
            raise ValueError(f"{asked} needs several processes: torchrun -m surefoot train ...")
        return nullcontext(ALONE)
    from surefoot.experiment.distributed.mesh import joined

    return joined(arguments.mesh, pick_device(arguments.device), arguments.timeout)


def _compile(model: nn.Module) -> None:
    """Compile a model; where it is cut, block by block, since each block gathers its weights first."""
    cut = any(hasattr(p, "placements") for p in model.parameters())
    for module in (blocks_of(model) if cut else []) or [model]:
        module.compile()


def _train(arguments: argparse.Namespace, training: Training, boards: Sequence[Board], compute: Compute) -> TrainResult:
    """Train, and write the logs on the way."""
    log: Log | None = None
    with ExitStack() as opened:
        norms = cache(lambda run: opened.enter_context(NormLog(run, arguments.out, arguments.norm_limit, _warn)))
        for board in boards:
            opened.enter_context(board)

        def on_step(record: dict[str, Any]) -> None:
            nonlocal log
            record = record | compute.at(record["tokens_per_second"])
            if log is None:  # a resumed run repeats the steps since its checkpoint: this replaces their old lines
                log = opened.enter_context(continued(arguments.out / LOG, record["step"]))
            log.append(record)
            _progress(record, arguments.steps)
            for board in boards:
                board.losses(record)

        def observe(run: Run) -> None:
            line = norms(run).write()
            for board in boards:
                board.norms(line)
            if run.diverged() and (name := run.not_finite()) is not None:
                print(f"surefoot train: {name} is the first parameter that is not finite", file=sys.stderr)

        return training(on_step=on_step, observe=observe)


def _progress(record: dict[str, Any], steps: int) -> None:
    """Show the loss, tokens per second since the last record, and the time left at this speed."""
    loss = "not finite" if record["loss"] is None else f"{record['loss']:.3f}"
    line = f"step {record['step']}/{steps}: loss {loss}, lr {record['lr']:.3g}"
    if (speed := record["tokens_per_second"]) is not None:
        seconds = (steps - record["step"]) * record["tokens"] / record["step"] / speed
        line += f", {speed:,.0f} tokens/s, {timedelta(seconds=round(seconds))} left"
    print(line, file=sys.stderr, flush=True)


def _goes_on(path: Path) -> None:
    print(f"surefoot: going on from {path}", file=sys.stderr, flush=True)


def _warn(step: int, alarm: Alarm) -> None:
    print(f"surefoot train: warning: step {step}: {alarm}", file=sys.stderr, flush=True)


def _draw(out: Path) -> None:
    """Draw the norms and write the page, or say what is missing for it."""
    plain = sys.flags.optimize > 1
    if plain or find_spec("altair") is None or find_spec("vl_convert") is None:
        needed = "python without -OO" if plain else "pip install 'surefoot[plots]'"
        print(f"surefoot: no page and no picture of the norms: that needs {needed}", file=sys.stderr)
        return
    from surefoot.experiment.reports import report

    if picture := report.draw(out):  # none if it stopped before the first measurement
        print(f"surefoot: norms: {picture}", file=sys.stderr)
    write_page(out)


def _sentence(result: TrainResult, unit: str) -> str:
    """The outcome in one sentence, losses in nats a unit."""
    if result.val_loss is None or result.train_loss is None:
        return f"diverged after {result.steps} steps; try a smaller --lr"
    average = "" if result.val_loss_average is None else f"of the average {result.val_loss_average:.4f}, "
    return (
        f"validation loss {result.val_loss:.4f}, {average}training loss of the last tenth {result.train_loss:.4f} "
        f"(gap {result.val_loss - result.train_loss:+.4f}) nats a {unit} "
        f"after {result.steps} steps in {result.seconds:.1f} s ({result.parameters:,} parameters)"
    )
