"""`surefoot train`: one model, with a log and checkpoints, resumed where it stopped."""

import argparse
from pathlib import Path

from surefoot.cli import options
from surefoot.experiment.training.norm_alarm import LIMIT

_EXAMPLES = """
surefoot train --width 128 --steps 1000 --out runs/one
surefoot train --recipes adamw --lr 0.015 --out runs/adamw
surefoot train --model gpt2-small --recipes moga_row:1.5 --device cuda --data bpe:50257:corpus.txt --out runs/gpt2
surefoot train --model llama --width 256 --device cuda --autocast bfloat16 --data corpus.txt --out runs/llama
surefoot train --model my_package.model:build --width 512 --accumulate 4 --average 0.999 --out runs/own
surefoot train --width 128 --norm-limit 5 --tensorboard --out runs/watched
torchrun --nproc-per-node 4 -m surefoot train --mesh fsdp=2,tp=2 --model llama --out runs/mesh
surefoot train --width 128 --steps 1000 --out runs/one     again: goes on from the newest checkpoint
surefoot train --width 128 --steps 1000 --out runs/two --resume runs/one/checkpoints/step-00000500.pt
"""


def add_to(commands: options.Commands) -> None:
    """Add the command."""
    help = "train one model, with a log and checkpoints"
    parser = options.command(commands, "train", run, help, _EXAMPLES)
    add = parser.add_argument
    options.add_recipes(parser)
    options.add_model(parser, "width", "depth", "head_dim")
    options.add(parser, "lr", type=options.rate)
    options.add(parser, "average", "seed")
    options.add_training(parser)
    help = "source of validation batches: the validation split of other data, as for --data"
    add("--eval-data", metavar="PATH", help=help)
    add("--out", type=options.path, default=Path("runs/train"), help="run directory, resumed if it exists")
    help = "where to start: at the newest sound checkpoint of the run directory; never: at step 0, in a directory "
    help += "without checkpoints; PATH: at this checkpoint, a file or folder, of a run of the same configuration"
    add("--resume", dest="start", type=_start, default="auto", metavar="auto|never|PATH", help=help)
    add("--checkpoint-every", type=options.count, default=100, help="steps between checkpoints")
    add("--keep", type=options.count, default=2, help="how many of the newest checkpoints are kept")
    help = "also keep the one with the lowest validation loss of those saved at an evaluation (--eval-every)"
    add("--keep-best", action="store_true", help=help)
    add("--async-checkpoints", action="store_true", help="under torchrun: write checkpoints while training goes on")
    add("--log-every", type=options.count, default=10, help="steps between lines of the log")
    add("--eval-every", type=options.natural, default=0, help="steps between evaluations; 0: only at the end")
    help = "warn of unbounded layers above this natural norm (--stabiliser bounds them)"
    add("--norm-limit", type=options.positive, default=LIMIT, metavar="NORM", help=help)
    add("--tensorboard", action="store_true", help="write scalars to tensorboard/ in the run directory")
    add("--wandb", action="store_true", help="log to Weights & Biases; in the run directory, unless WANDB_MODE is set")
    help = "peak FLOPs per second of one device, for its utilisation (default: known of H100, H200, A100)"
    add("--peak-flops", type=options.positive, metavar="FLOPS", help=help)
    _add_layout(parser)
    options.add_json(parser)


def _add_layout(parser: argparse.ArgumentParser) -> None:
    """Add the options of how a step is computed, which may change when a run is resumed."""
    add = parser.add_argument
    help = "under torchrun: processes along replicate, fsdp and tp, fsdp=4,tp=2 for example (default: all along fsdp)"
    add("--mesh", metavar="AXIS=N,...", help=help)
    help = "under torchrun: how long a process waits for another before it ends with an error"
    add("--timeout", type=options.positive, default=10.0, metavar="MINUTES", help=help)
    add("--accumulate", type=options.count, default=1, metavar="N", help="forward and backward passes per step")
    help = "recompute a block's activations in the backward pass (less memory)"
    add("--recompute", action="store_true", help=help)
    add("--compile", action="store_true", help="compile forward and backward (a minute at the start)")
    add("--threads", type=options.count, help="CPU threads (default: torch's own choice)")


def _start(text: str) -> str | Path:
    return text if text in ("auto", "never") else Path(text)


def run(arguments: argparse.Namespace) -> int:
    """Train, or go on training."""
    from surefoot.cli import training

    return training.run(arguments)
