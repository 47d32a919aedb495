"""`surefoot train`: one model, with a log and checkpoints, resumed where it stopped."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.cli import options
from surefoot.cli.exit_codes import DIVERGED
from surefoot.experiment.training.config import Architecture, TrainConfig
from surefoot.experiment.training.norm_alarm import LIMIT

if TYPE_CHECKING:
    from torch import nn

    from surefoot.experiment.data.corpus import Corpus
    from surefoot.experiment.distributed.processes import Layout, Processes
    from surefoot.experiment.files import Log
    from surefoot.experiment.training.norm_alarm import Alarm
    from surefoot.experiment.training.run import Run, TrainResult
    from surefoot.experiment.training.tensorboard import Board

LOG, RESULT, CHECKPOINTS, BOARD = "log.jsonl", "result.json", "checkpoints", "tensorboard"
_EXAMPLES = """
surefoot train --width 128 --steps 1000 --out runs/one
surefoot train --recipes adamw --lr 0.015 --out runs/adamw
surefoot train --model gpt2-small --recipes moga_row:1.5 --device cuda --data bpe:50257:corpus.txt --out runs/gpt2
surefoot train --model llama --width 256 --device cuda --autocast bfloat16 --data corpus.txt --out runs/llama
surefoot train --width 128 --norm-limit 5 --tensorboard --out runs/watched
torchrun --nproc-per-node 4 -m surefoot train --mesh fsdp=2,tp=2 --model llama --out runs/mesh
surefoot train --width 128 --steps 1000 --out runs/one     again: goes on from the newest checkpoint
"""


def add_to(commands: options.Commands) -> None:
    """Add the command."""
    help = "train one reference model, with a log and checkpoints"
    parser = options.command(commands, "train", run, help, _EXAMPLES)
    options.add_recipe(parser)
    options.add_model(parser)
    options.add(parser, Architecture, "width", "depth", "head_dim")
    options.add_rate(parser)
    options.add(parser, TrainConfig, "seed")
    options.add_training(parser)
    parser.add_argument("--out", type=Path, default=Path("runs/train"), help="run directory, resumed if it exists")
    _add_checkpoints(parser)
    parser.add_argument("--log-every", type=options.count, default=10, help="steps between lines of the log")
    parser.add_argument(
        "--eval-every", type=options.natural, default=0, help="steps between evaluations; 0: only at the end"
    )
    parser.add_argument(
        "--norm-limit", type=options.positive, default=LIMIT, metavar="NORM",
        help="natural norm that a layer without a bound is warned of (--stabiliser bounds it)",
    )  # fmt: skip
    parser.add_argument("--tensorboard", action="store_true", help="write scalars to tensorboard/ in the run directory")
    _add_layout(parser)
    options.add_json(parser)


def _add_checkpoints(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint-every", type=options.count, default=100, help="steps between checkpoints")
    parser.add_argument("--keep", type=options.count, default=2, help="how many of the newest checkpoints are kept")
    parser.add_argument(
        "--keep-best", action="store_true", help="keep the one with the lowest validation loss, too (see --eval-every)"
    )
    parser.add_argument(
        "--async-checkpoints", action="store_true", help="under torchrun: write checkpoints while training goes on"
    )


def _add_layout(parser: argparse.ArgumentParser) -> None:
    """Options of how a step is computed, under any of which a run goes on."""
    mesh = "under torchrun: processes along replicate, fsdp and tp, fsdp=4,tp=2 for example (default: all along fsdp)"
    parser.add_argument("--mesh", metavar="AXIS=N,...", help=mesh)
    parser.add_argument(
        "--timeout", type=options.positive, default=10.0, metavar="MINUTES",
        help="under torchrun: how long a process waits for another before it ends with an error",
    )  # fmt: skip
    parser.add_argument(
        "--accumulate", type=options.count, default=1, metavar="N", help="forward and backward passes a step"
    )
    parser.add_argument(
        "--recompute",
        action="store_true",
        help="compute activations of a block again in the backward pass (less memory)",
    )
    parser.add_argument("--compile", action="store_true", help="compile forward and backward (a minute at the start)")
    parser.add_argument("--threads", type=options.count, help="CPU threads (default: torch's own choice)")


def run(arguments: argparse.Namespace) -> int:
    """Train, or go on training."""
    import torch

    from surefoot.experiment.data.corpus import load
    from surefoot.experiment.distributed.processes import Layout
    from surefoot.experiment.training.run import require_model

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    options.require_size(arguments.model, arguments)
    config = TrainConfig.of(**options.settings(arguments))
    corpus = load(options.data(arguments), context=arguments.context)
    require_model(config, corpus)
    with _processes(arguments) as processes:
        layout = Layout(processes, arguments.accumulate, arguments.recompute, _compile if arguments.compile else None)
        processes.rows(config.batches.batch_size, 0, layout.accumulate)
        if not processes.first:
            _train_beside(arguments, config, corpus, layout)
            return 0
        return _run_first(arguments, config, corpus, layout)


def _run_first(arguments: argparse.Namespace, config: TrainConfig, corpus: Corpus, layout: Layout) -> int:
    """Train on the process that writes files and speaks."""
    from surefoot.experiment.files import claim, dumps, locked, write_atomic

    out: Path = arguments.out
    board = _board(arguments)
    out.mkdir(parents=True, exist_ok=True)
    arguments.resume = f"the same command goes on from the newest checkpoint in {out / CHECKPOINTS}, if there is one"
    with locked(out):
        claim(out, {**config.to_json(), "text": corpus.name, "corpus": corpus.sha256}, LOG)
        print(f"surefoot: writing to {out}/, data: {corpus.name}", file=sys.stderr)
        try:
            result = _train(arguments, config, corpus, layout, board)
        except KeyboardInterrupt:
            _draw(out)
            raise
        write_atomic(out / RESULT, dumps(asdict(result), indent=2) + "\n")
        _draw(out)
    print(json.dumps(asdict(result), allow_nan=False) if arguments.json else _sentence(result, corpus.unit))
    return DIVERGED if result.diverged else 0


def _processes(arguments: argparse.Namespace) -> AbstractContextManager[Processes]:
    """The processes that `torchrun` started, or this one alone."""
    from surefoot.experiment.distributed.processes import ALONE

    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        if arguments.mesh:
            raise ValueError(f"--mesh {arguments.mesh} needs several processes: torchrun -m surefoot train ...")
        return nullcontext(ALONE)
    from surefoot.experiment.distributed.mesh import joined
    from surefoot.experiment.training.run import pick_device

    return joined(arguments.mesh, pick_device(arguments.device), arguments.timeout)


def _compile(model: nn.Module) -> None:
    """Compile a model; where it is cut, block by block, since each block gathers its weights first."""
    from surefoot.experiment.distributed.processes import blocks_of

    cut = any(hasattr(p, "placements") for p in model.parameters())
    for module in (blocks_of(model) if cut else []) or [model]:
        module.compile()


def _train(
    arguments: argparse.Namespace, config: TrainConfig, corpus: Corpus, layout: Layout, board: Board | None
) -> TrainResult:
    """Train, and write the logs on the way."""
    from surefoot.experiment.training.loop import train
    from surefoot.experiment.training.norm_log import NormLog

    out: Path = arguments.out
    with (
        _log(out / LOG, arguments.steps) as log,
        NormLog(out, arguments.norm_limit, _warn) as norms,
        board or nullcontext(),
    ):

        def on_step(record: dict[str, Any]) -> None:
            log(record)
            if board is not None:
                board.losses(record)

        def observe(run: Run) -> None:
            line = norms.write(run)
            if board is not None:
                board.norms(line)

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
    checkpoints = Checkpoints(folder, every, arguments.keep, arguments.keep_best, arguments.async_checkpoints)
    return {
        "layout": layout,
        "log_every": arguments.log_every,
        "eval_every": arguments.eval_every,
        "checkpoints": checkpoints,
    }


def _board(arguments: argparse.Namespace) -> Board | None:
    from surefoot.experiment.training.tensorboard import Board

    return Board(arguments.out / BOARD) if arguments.tensorboard else None


@contextmanager
def _log(path: Path, steps: int) -> Iterator[Callable[[dict[str, Any]], None]]:
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
            print(f"step {record['step']}/{steps}: loss {loss}, lr {record['lr']:.3g}", file=sys.stderr, flush=True)

        yield write


def _warn(step: int, alarm: Alarm) -> None:
    print(f"surefoot train: warning: step {step}: {alarm}", file=sys.stderr, flush=True)


def _draw(out: Path) -> None:
    """Draw the norms, or say what is missing for it."""
    from surefoot.experiment.files import read_lines
    from surefoot.experiment.training.norm_log import NORMS

    if not read_lines(out / NORMS):
        return  # stopped before the first measurement
    if find_spec("matplotlib") is None:
        print("surefoot: no picture of the norms: that needs pip install 'surefoot[plots]'", file=sys.stderr)
        return
    from surefoot.experiment.reports import norms as norm_report

    print(f"surefoot: norms: {norm_report.figure(out)}", file=sys.stderr)


def _sentence(result: TrainResult, unit: str) -> str:
    if result.val_loss is None or result.train_loss is None:
        return f"diverged after {result.steps} steps; try a smaller --lr"
    return (
        f"validation loss {result.val_loss:.4f}, training loss {result.train_loss:.4f} nats a {unit} "
        f"after {result.steps} steps in {result.seconds:.1f} s ({result.parameters:,} parameters)"
    )
