"""`surefoot transfer`: where does the best learning rate lie at each width?"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.cli import options
from surefoot.cli.report import write_page
from surefoot.experiment.models.sizes import PUBLISHED, published_name
from surefoot.experiment.training.names import log2_lr

if TYPE_CHECKING:
    from surefoot.experiment.sweep.config import SweepConfig

WIDTHS = (32, 64, 128)
_EXAMPLES = """
surefoot transfer                                    the demo: adamw, moonlight_tuned and steady, 3 widths
surefoot transfer --recipes muon steady --widths 64 256 --seeds 3 --out runs/muon
surefoot transfer --model my_package.model:build --recipes steady    build(width) returns an nn.Module
surefoot transfer --model gpt2-small --recipes moga_row:1.5 moga_row:3 --widths 256 512 768
surefoot transfer --rates -7 -6 -5 -4 --data ~/notes --out runs/notes
surefoot transfer --out runs/transfer                again: finished runs are skipped
surefoot transfer --executor ray --device cuda --gpus-per-run 0.5    on a Ray cluster, two runs on each GPU
"""


def add_to(commands: options.Commands) -> None:
    """Add the command."""
    help = "find the best learning rate at several widths, and how far it moves"
    parser = options.command(commands, "transfer", run, help, _EXAMPLES)
    options.add_recipes(parser, default=["adamw", "moonlight_tuned", "steady"])
    parser.add_argument(
        "--widths", nargs="+", type=options.count, help=f"model widths (default: {WIDTHS}, or the published one)"
    )
    parser.add_argument("--seeds", type=options.count, default=1, help="seeds per width and rate; three give intervals")
    parser.add_argument(
        "--rates", nargs="+", type=options.exponent, metavar="LOG2", help="log2 learning rates, in place of a search"
    )
    parser.add_argument("--budget", type=options.count, default=8, help="rates per width that the search may take")
    parser.add_argument("--out", type=Path, default=Path("runs/transfer"), help="run directory, resumed if it exists")
    options.add_executor(parser)
    options.add_own_model(parser)
    options.add_training(parser)
    options.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Sweep, then print the table and draw the picture."""
    from surefoot.experiment.reports import transfer as transfer_report
    from surefoot.experiment.sweep import sweep
    from surefoot.experiment.sweep.worker import run_trial

    executor = options.executor(arguments)
    config = configure(arguments)
    arguments.resume = "what was finished is kept: the same command goes on from there"
    print(f"surefoot: writing to {arguments.out}/, data: {config.settings['text']}", file=sys.stderr)
    summary = sweep.run(config, arguments.out, run_trial, executor=executor)
    if arguments.json:
        print(json.dumps(summary, indent=2, allow_nan=False))
    else:
        print(transfer_report.statement(summary))
    if any(entry["best_loss"] != [None] * len(entry["widths"]) for entry in summary["recipes"]):
        print(f"\npicture: {transfer_report.figure(arguments.out)}", file=sys.stderr if arguments.json else sys.stdout)
    write_page(arguments.out)
    return 0


def configure(arguments: argparse.Namespace) -> SweepConfig:
    """The sweep that the options ask for.

    Args:
        arguments: as parsed.

    Returns:
        The configuration of the sweep.

    Raises:
        ValueError: data that cannot be used, a width that the head dimension does not divide, or a stabiliser for a
            baseline.
    """
    from surefoot.experiment.sweep.config import SweepConfig
    from surefoot.experiment.sweep.search import Bracket, Grid

    widths = tuple(arguments.widths or _widths(published_name(arguments.model)))
    settings = options.trial_settings(arguments, arguments.recipes, widths)
    # The search extends by itself: where it starts saves time and decides nothing.
    centres = {name: log2_lr(name) for name in arguments.recipes}
    search = Grid(tuple(arguments.rates)) if arguments.rates else Bracket(centres, arguments.budget)
    seeds = tuple(range(arguments.seeds))
    return SweepConfig(tuple(arguments.recipes), widths, seeds, arguments.steps, search, settings)


def _widths(model: str) -> tuple[int, ...]:
    return (PUBLISHED[model].width,) if model in PUBLISHED else WIDTHS
