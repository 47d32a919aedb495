"""`surefoot coordcheck`: do activations, and what training changes of them, keep their size as the width grows?"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from surefoot.cli import options
from surefoot.cli.report import show, write_page
from surefoot.experiment.training.config import TrainConfig

_EXAMPLES = """
surefoot coordcheck                                  the default recipe, widths 64 to 512
surefoot coordcheck --recipes adamw --out runs/adamw-check          fails: exit code 1
surefoot coordcheck --model my_package.model:build --out runs/own   build(width) returns an nn.Module
surefoot coordcheck --seeds 8                        again: only the five new seeds are run
"""


def add_to(commands: options.Commands) -> None:
    """Add the command."""
    help = "check over several widths that activations and their changes keep their size; exit code 1 if not"
    parser = options.command(commands, "coordcheck", run, help, _EXAMPLES)
    options.add_recipe(parser)
    options.add_model(parser, "depth", "head_dim")
    parser.add_argument("--widths", nargs="+", type=options.count, default=[64, 128, 256, 512], help="two or more")
    parser.add_argument("--seeds", type=options.count, default=3, help="seeds per width; three give intervals")
    parser.add_argument("--band", type=options.positive, default=0.1, help="largest slope that passes")
    options.add_rate(parser)
    options.add_training(parser, steps=10, warmup=0.0, decay=0.0)
    parser.add_argument("--out", type=Path, default=Path("runs/coordcheck"), help="run directory, resumed if it exists")
    options.add_executor(parser, default=None)
    options.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Check, print the table, draw the picture; 1 if a slope leaves the band."""
    from surefoot.experiment.coordcheck import check
    from surefoot.experiment.data.sources import absolute, load

    executor, data = options.executor(arguments), absolute(options.data(arguments))
    config = TrainConfig.of(**options.settings(arguments))
    corpus = load(options.data(arguments), context=arguments.context)
    arguments.resume = "what was finished is kept: the same command goes on from there"
    print(f"surefoot: writing to {arguments.out}/, data: {corpus.name}", file=sys.stderr)
    widths, seeds = tuple(arguments.widths), range(arguments.seeds)
    summary = check(config, corpus, arguments.out, widths, seeds, arguments.band, _say, executor, data)
    show(arguments.out, arguments.json)
    write_page(arguments.out)
    return 0 if summary["passes"] else 1


def _say(record: dict[str, Any]) -> None:
    outcome = record.get("failed")
    if outcome is None:
        loss = "not finite" if record["loss"] is None else f"{record['loss']:.3f}"
        outcome = f"loss {loss}, {record['seconds']:.1f} s"
    print(f"width {record['width']}, seed {record['seed']}: {outcome}", file=sys.stderr, flush=True)
