"""`surefoot train`: one model, with a log and checkpoints, resumed where it stopped."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.cli import options

if TYPE_CHECKING:
    from surefoot.experiment.records import Log
    from surefoot.experiment.train import TrainConfig, TrainResult

LOG, RESULT, CHECKPOINTS = "log.jsonl", "result.json", "checkpoints"
_EXAMPLES = """
surefoot train --width 128 --steps 1000 --out runs/one
surefoot train --method adamw --lr 0.015 --out runs/adamw
surefoot train --model llama --width 256 --device cuda --autocast bfloat16 --data corpus.txt --out runs/llama
surefoot train --width 128 --steps 1000 --out runs/one     again: goes on from the newest checkpoint
"""


def add_to(commands: options.Commands) -> None:
    """Add the command."""
    help = "train one reference model, with a log and checkpoints"
    parser = options.command(commands, "train", run, help, _EXAMPLES)
    parser.add_argument("--method", choices=options.METHODS, default="beyond_mup", metavar="NAME",
                        help="out of " + ", ".join(options.METHODS))  # fmt: skip
    parser.add_argument("--model", choices=("gpt", "llama"), default="gpt", help="reference model")
    parser.add_argument("--width", type=options.count, default=64, help="model width")
    options.add_model(parser)
    parser.add_argument("--lr", type=options.positive, help="peak of the schedule (default: the method's own)")
    parser.add_argument("--seed", type=options.natural, default=0, help="of initial weights and data order")
    options.add_training(parser)
    parser.add_argument("--out", type=Path, default=Path("runs/train"), help="run directory, resumed if it exists")
    parser.add_argument("--checkpoint-every", type=options.count, default=100, help="steps between checkpoints")
    parser.add_argument("--log-every", type=options.count, default=10, help="steps between lines of the log")
    parser.add_argument(
        "--eval-every", type=options.natural, default=0, help="steps between evaluations; 0: only at the end"
    )
    parser.add_argument("--threads", type=options.count, help="CPU threads (default: torch's own choice)")
    options.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train, or go on training."""
    import torch

    from surefoot.experiment.checkpoint import Checkpoints
    from surefoot.experiment.data import load
    from surefoot.experiment.records import claim, dumps, locked, write_atomic
    from surefoot.experiment.train import train

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    config = _configure(arguments)
    corpus = load(arguments.data, context=config.context)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    arguments.resume = f"the same command goes on from the newest checkpoint in {out / CHECKPOINTS}, if there is one"
    with locked(out):
        claim(out, {**asdict(config), "text": corpus.name, "corpus": corpus.sha256}, LOG)
        print(f"surefoot: writing to {out}/, data: {corpus.name}", file=sys.stderr)
        with _log(out / LOG, config.steps) as on_step:
            result = train(
                config,
                corpus,
                on_step=on_step,
                log_every=arguments.log_every,
                eval_every=arguments.eval_every,
                checkpoints=Checkpoints(out / CHECKPOINTS, arguments.checkpoint_every),
            )
        write_atomic(out / RESULT, dumps(asdict(result), indent=2) + "\n")
    print(json.dumps(asdict(result), allow_nan=False) if arguments.json else _sentence(result, corpus.unit))
    return 0


def _configure(arguments: argparse.Namespace) -> TrainConfig:
    from surefoot.experiment.run import TrainConfig, pick_device

    own = {name: getattr(arguments, name) for name in ("width", "method", "seed", "steps")}
    own["lr"] = arguments.lr or 2.0 ** options.LOG2_LR[arguments.method]
    device: Any = pick_device(arguments.device).type
    return TrainConfig(**options.shared_settings(arguments), **own, device=device)


@contextmanager
def _log(path: Path, steps: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Append records to the log and show them on stderr.

    A resumed run repeats the steps since its checkpoint: their old lines are dropped when the first record comes.
    """
    from surefoot.experiment.records import Log, dumps, read_lines, write_atomic

    opened: list[Log] = []
    with ExitStack() as stack:

        def write(record: dict[str, Any]) -> None:
            if not opened:
                kept = [dumps(old) + "\n" for old in read_lines(path) if old["step"] < record["step"]]
                write_atomic(path, "".join(kept))
                opened.append(stack.enter_context(Log(path)))
            opened[0].append(record)
            loss = "not finite" if record["loss"] is None else f"{record['loss']:.3f}"
            print(f"step {record['step']}/{steps}: loss {loss}, lr {record['lr']:.3g}", file=sys.stderr, flush=True)

        yield write


def _sentence(result: TrainResult, unit: str) -> str:
    if result.val_loss is None or result.train_loss is None:
        return f"diverged after {result.steps} steps; try a smaller --lr"
    return (
        f"validation loss {result.val_loss:.4f}, training loss {result.train_loss:.4f} nats a {unit} "
        f"after {result.steps} steps in {result.seconds:.1f} s ({result.parameters:,} parameters)"
    )
