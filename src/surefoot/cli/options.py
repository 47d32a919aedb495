"""Options that commands share, and the checks argparse makes of them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECIPES = (
    "beyond_mup",
    "moga_row",
    "moga_column",
    "muon",
    "moonlight",
    "scion",
    "lion",
    "sign_sgd",
    "sign_natural",
    "hyperball",
)
METHODS = (*RECIPES, "adamw", "mup_adamw")
"""The names of `experiment.methods.METHODS`, repeated since that module imports torch (a test compares them)."""

MODELS = ("gpt", "llama", "qwen", "moe", "tied")
"""The names of `experiment.models.REFERENCES`, likewise."""

LOG2_LR = {
    "beyond_mup": -4.0,
    "moga_row": -4.0,
    "moga_column": -4.0,
    "muon": -2.0,
    "moonlight": -5.0,
    "scion": -11.0,
    "lion": -7.0,
    "sign_sgd": -7.0,
    "sign_natural": -4.0,
    "hyperball": -3.0,
    "adamw": -6.0,
    "mup_adamw": -6.0,
}
"""A sensible log2 learning rate of each method: where a search starts, and `train`'s default."""

Commands = Any  # argparse's own type of `add_subparsers` is private
Runner = Callable[[argparse.Namespace], int]


def command(commands: Commands, name: str, run: Runner, help: str, examples: str) -> argparse.ArgumentParser:
    """Add a command whose help ends in examples."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog="examples:\n" + "\n".join(f"  {line}" for line in examples.strip().splitlines()),
        formatter_class=_Help,
    )
    parser.set_defaults(run=run)
    return parser


class _Help(argparse.RawDescriptionHelpFormatter):
    """Defaults beside the options that have one, examples on lines of their own."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default is None or default is False or default is argparse.SUPPRESS:
            return action.help
        shown = " ".join(map(str, default)) if isinstance(default, list) else str(default)
        return f"{action.help} (default: {shown})"


def count(text: str) -> int:
    """A whole number from 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def natural(text: str) -> int:
    """A whole number from 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {value}")
    return value


def positive(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text}")
    return value


def part(text: str) -> float:
    """A part of a whole."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must lie between 0 and 1, got {text}")
    return value


def exponent(text: str) -> float:
    """A base-2 logarithm that a learning rate can have."""
    value = float(text)
    if not abs(value) <= 60:
        raise argparse.ArgumentTypeError(f"log2 of a learning rate lies between -60 and 60, got {text}")
    return value


def add_model(parser: argparse.ArgumentParser) -> None:
    """The reference model's size, except its width."""
    parser.add_argument("--depth", type=count, default=2, help="blocks")
    parser.add_argument("--head-dim", type=count, default=16, help="dimension of an attention head")


def add_training(parser: argparse.ArgumentParser) -> None:
    """What a training run takes besides the model and the method."""
    parser.add_argument("--steps", type=count, default=120, help="optimizer steps of a run")
    parser.add_argument(
        "--stabiliser", metavar="NAME:VALUE", help="bound on every role, post_clip:2 or pre_decay:0.5 for example"
    )
    parser.add_argument("--warmup", type=part, default=0.1, help="first part of the steps, the rate rising linearly")
    parser.add_argument("--decay", type=part, default=1.0, help="last part of the steps, the rate falling to 0")
    parser.add_argument("--batch-size", type=count, default=16, help="sequences a step")
    parser.add_argument("--context", type=count, default=64, help="tokens a sequence")
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="text file or folder, bpe:N or bpe:N:PATH for BPE tokens, or markov:N (default: the Python standard "
        "library's source)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda", "auto"), default="cpu", help="where to train")
    parser.add_argument("--autocast", choices=("none", "bfloat16"), default="none", help="dtype of the forward pass")


def add_json(parser: argparse.ArgumentParser) -> None:
    """For machines."""
    parser.add_argument("--json", action="store_true", help="print JSON on stdout, and nothing else there")


def shared_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of `TrainConfig` that `add_model` and `add_training` set, steps apart."""
    names = ("model", "depth", "head_dim", "batch_size", "context", "stabiliser", "warmup", "decay", "autocast")
    return {name: getattr(arguments, name) for name in names}


def absolute(path: str | None) -> str | None:
    """A path, or the path in `bpe:N:PATH`, that a worker process, or a later run, finds again."""
    if path is None or path.startswith("markov:"):
        return path
    if path.startswith("bpe:"):
        kind, size, *source = path.split(":", 2)
        return ":".join([kind, size, *(str(Path(part).resolve()) for part in source)])
    return str(Path(path).resolve())
