"""`surefoot train`: one model, with a log and checkpoints, resumed where it stopped."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.cli import options, train_options
from surefoot.cli.exit_codes import DIVERGED
from surefoot.cli.report import write_page
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.names import AUTO
from surefoot.scaling import LAWS

if TYPE_CHECKING:
    from torch import nn

    from surefoot.experiment.data.corpus import Corpus
    from surefoot.experiment.distributed.processes import Layout, Processes
    from surefoot.experiment.files import Log
    from surefoot.experiment.training.boards import Board
    from surefoot.experiment.training.norm_alarm import Alarm
    from surefoot.experiment.training.run import Run, TrainResult
    from surefoot.experiment.training.throughput import Compute

LOG, RESULT, ENVIRONMENT = "log.jsonl", "result.json", "environment.json"
CHECKPOINTS, BOARD = "checkpoints", "tensorboard"


def add_to(commands: options.Commands) -> None:
    """Add the command."""
    train_options.add_to(commands, run)


def run(arguments: argparse.Namespace) -> int:
    """Train, or go on training."""
    import torch

    from surefoot.experiment.data.sources import evaluation, load
    from surefoot.experiment.distributed.processes import Layout
    from surefoot.experiment.training.build import require_model

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    options.require_size(arguments.model, arguments)
    config = TrainConfig.of(**options.settings(arguments))
    corpus, identity = load(options.data(arguments), context=arguments.context), config.to_json()
    identity |= {"text": corpus.name, "corpus": corpus.sha256}
    if arguments.eval_data is not None:
        other = evaluation(arguments.eval_data, options.data(arguments), corpus)
        corpus = replace(corpus, validation=other.validation)
        corpus.require(arguments.context)
        identity |= {"eval_text": other.name, "eval_corpus": other.sha256}
    require_model(config, corpus)
    with _processes(arguments) as processes:
        layout = Layout(processes, arguments.accumulate, arguments.recompute, _compile if arguments.compile else None)
        processes.rows(config.batches.batch_size, 0, layout.accumulate)
        if not processes.first:
            _train_beside(arguments, config, corpus, layout)
            return 0
        return _run_first(arguments, config, corpus, layout, identity)


def _compute(arguments: argparse.Namespace, config: TrainConfig, corpus: Corpus, layout: Layout) -> Compute:
    """What a token costs, and what the devices could do."""
    from surefoot.experiment.training.build import pick_device
    from surefoot.experiment.training.throughput import Compute, flops_per_token, peak_of

    peak = arguments.peak_flops or peak_of(pick_device(config.execution.device))
    return Compute(flops_per_token(config, corpus.vocab), peak and peak * layout.processes.count)


def _run_first(
    arguments: argparse.Namespace, config: TrainConfig, corpus: Corpus, layout: Layout, identity: dict[str, Any]
) -> int:
    """Train on the process that writes files and speaks."""
    from surefoot.experiment.configs import claimed
    from surefoot.experiment.files import write_json
    from surefoot.experiment.sweep.summary import environment

    out: Path = arguments.out
    boards = _boards(arguments, identity)
    command = "the same command" if arguments.start == "auto" else "the same command with --resume auto"
    arguments.resume = f"{command} goes on from the newest checkpoint in {out / CHECKPOINTS}, if there is one"
    with claimed(out, "train", identity, LOG):
        write_json(out / ENVIRONMENT, environment())
        evaluated = f", validation: {identity['eval_text']}" if "eval_text" in identity else ""
        print(f"surefoot: writing to {out}/, data: {corpus.name}{evaluated}", file=sys.stderr)
        options.note_epochs(config, corpus)
        if arguments.lr == AUTO:
            law = (
                f"the law of {arguments.method}" if arguments.method in LAWS else f"the usual one of {arguments.method}"
            )
            length = f"{config.run.steps:,} steps of {config.run.tokens:,} tokens"
            print(f"surefoot: learning rate {config.lr:.4g}, {law}, for {length}", file=sys.stderr)
        try:
            compute = _compute(arguments, config, corpus, layout)
            result = _train(arguments, config, corpus, layout, boards, compute)
        except KeyboardInterrupt:
            _draw(out)
            raise
        shown = asdict(result) | compute.at(result.tokens_per_second)
        shown |= _measured_before(out / RESULT, shown)
        write_json(out / RESULT, shown)
        _draw(out)
    print(json.dumps(shown, allow_nan=False) if arguments.json else _sentence(result, corpus.unit))
    return DIVERGED if result.diverged else 0


def _measured_before(path: Path, shown: dict[str, Any]) -> dict[str, Any]:
    """What an earlier result of the same steps has and this one, which took none, has not: the time of a step."""
    try:
        before = json.loads(path.read_bytes())
        return {k: x for k, x in before.items() if before["steps"] == shown["steps"] and shown.get(k, x) is None}
    except (OSError, ValueError, KeyError, AttributeError):
        return {}


def _processes(arguments: argparse.Namespace) -> AbstractContextManager[Processes]:
    """The processes that `torchrun` started, or this one alone."""
    from surefoot.experiment.distributed.processes import ALONE

    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        if arguments.mesh:
            raise ValueError(f"--mesh {arguments.mesh} needs several processes: torchrun -m surefoot train ...")
        return nullcontext(ALONE)
    from surefoot.experiment.distributed.mesh import joined
    from surefoot.experiment.training.build import pick_device

    return joined(arguments.mesh, pick_device(arguments.device), arguments.timeout)


def _compile(model: nn.Module) -> None:
    """Compile a model; where it is cut, block by block, since each block gathers its weights first."""
    from surefoot.experiment.distributed.processes import blocks_of

    cut = any(hasattr(p, "placements") for p in model.parameters())
    for module in (blocks_of(model) if cut else []) or [model]:
        module.compile()


def _train(
    arguments: argparse.Namespace,
    config: TrainConfig,
    corpus: Corpus,
    layout: Layout,
    boards: list[Board],
    compute: Compute,
) -> TrainResult:
    """Train, and write the logs on the way."""
    from surefoot.experiment.training.loop import train
    from surefoot.experiment.training.norm_log import NormLog

    out: Path = arguments.out
    with (
        _open_log(out / LOG, arguments.steps) as log,
        NormLog(out, arguments.norm_limit, _warn) as norms,
        ExitStack() as open_boards,
    ):
        for board in boards:
            open_boards.enter_context(board)

        def on_step(record: dict[str, Any]) -> None:
            record = record | compute.at(record["tokens_per_second"])
            log(record)
            for board in boards:
                board.losses(record)

        def observe(run: Run) -> None:
            line = norms.write(run)
            for board in boards:
                board.norms(line)
            if run.diverged() and (name := run.not_finite()) is not None:
                print(f"surefoot train: {name} is the first parameter that is not finite", file=sys.stderr)

        return train(config, corpus, on_step=on_step, observe=observe, **_options(arguments, layout))


def _train_beside(arguments: argparse.Namespace, config: TrainConfig, corpus: Corpus, layout: Layout) -> None:
    """Train on the other processes, which take part in every measurement and write only their parts of checkpoints."""
    from surefoot.experiment.training.loop import train
    from surefoot.experiment.training.norm_log import Norms

    measured: list[Norms] = []

    def observe(run: Run) -> None:
        if not measured:
            measured.append(Norms(run, arguments.norm_limit))
        measured[0].measure()

    train(config, corpus, on_step=lambda record: None, observe=observe, **_options(arguments, layout))


def _options(arguments: argparse.Namespace, layout: Layout) -> dict[str, Any]:
    """What all processes must agree on."""
    from surefoot.experiment.training.checkpoint import Checkpoints

    every, folder = arguments.checkpoint_every, arguments.out / CHECKPOINTS
    kept = {"keep": arguments.keep, "best": arguments.keep_best}
    checkpoints = Checkpoints(folder, every, **kept, background=arguments.async_checkpoints, start=arguments.start)
    return {
        "layout": layout,
        "log_every": arguments.log_every,
        "eval_every": arguments.eval_every,
        "checkpoints": checkpoints,
    }


def _boards(arguments: argparse.Namespace, identity: dict[str, Any]) -> list[Board]:
    from surefoot.experiment.training.boards import TensorBoard, Wandb

    boards: list[Board] = []
    if arguments.tensorboard:
        boards.append(TensorBoard(arguments.out / BOARD))
    if arguments.wandb:
        boards.append(Wandb(arguments.out, identity))
    return boards


@contextmanager
def _open_log(path: Path, steps: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Append records to the log and show them on stderr.

    A resumed run repeats the steps since its checkpoint: the first record replaces their old lines.
    """
    from surefoot.experiment.files import continued

    opened: list[Log] = []
    with ExitStack() as stack:

        def write(record: dict[str, Any]) -> None:
            if not opened:
                opened.append(stack.enter_context(continued(path, record["step"])))
            opened[0].append(record)
            loss = "not finite" if record["loss"] is None else f"{record['loss']:.3f}"
            speed = _speed(record, steps)
            print(
                f"step {record['step']}/{steps}: loss {loss}, lr {record['lr']:.3g}{speed}", file=sys.stderr, flush=True
            )

        yield write


def _speed(record: dict[str, Any], steps: int) -> str:
    """Tokens per second since the last record, and the time left at this speed."""
    if record["tokens_per_second"] is None:
        return ""
    seconds = (steps - record["step"]) * record["tokens"] / record["step"] / record["tokens_per_second"]
    return f", {record['tokens_per_second']:,.0f} tokens/s, {timedelta(seconds=round(seconds))} left"


def _warn(step: int, alarm: Alarm) -> None:
    """Show an alarm of a norm."""
    print(f"surefoot train: warning: step {step}: {alarm}", file=sys.stderr, flush=True)


def _draw(out: Path) -> None:
    """Draw the norms and write the page, or say what is missing for it."""
    if find_spec("altair") is None or find_spec("vl_convert") is None:
        print(
            "surefoot: no page and no picture of the norms: that needs pip install 'surefoot[plots]'", file=sys.stderr
        )
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
        f"validation loss {result.val_loss:.4f}, {average}training loss {result.train_loss:.4f} nats a {unit} "
        f"after {result.steps} steps in {result.seconds:.1f} s ({result.parameters:,} parameters)"
    )
