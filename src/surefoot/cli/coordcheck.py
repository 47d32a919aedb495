"""`surefoot coordcheck`: do activations, and their changes by training, keep their size as the width grows?"""

import argparse
import sys
from typing import Any

from surefoot.cli import options
from surefoot.cli.report import reported

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
    options.add_recipes(parser)
    options.add_model(parser, "depth", "head_dim")
    parser.add_argument("--widths", nargs="+", type=options.count, default=[64, 128, 256, 512], help="two or more")
    parser.add_argument("--seeds", type=options.count, default=3, help="seeds per width; three give intervals")
    parser.add_argument("--band", type=options.positive, default=0.1, help="largest slope that passes")
    options.add(parser, "lr", type=options.rate)
    options.add_training(parser, steps=10, warmup=0.0, decay=0.0)
    options.add_executor(parser, "runs/coordcheck", default=None)
    options.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Check, print the table, draw the picture; 1 if a slope leaves the band."""
    from surefoot.cli import chosen
    from surefoot.experiment.coordcheck import check
    from surefoot.experiment.data.sources import absolute, load

    executor, data = chosen.executor(arguments), chosen.data(arguments)
    config = chosen.config(arguments)
    corpus = load(data, context=arguments.context)
    given = (tuple(arguments.widths), range(arguments.seeds), arguments.band)
    with reported(arguments, corpus.name):
        summary = check(config, corpus, arguments.out, *given, _say, executor, absolute(data))
    return 0 if summary["passes"] else 1


def _say(record: dict[str, Any]) -> None:
    outcome = record.get("failed")
    if outcome is None:
        loss = "not finite" if record["loss"] is None else f"{record['loss']:.3f}"
        outcome = f"loss {loss}, {record['seconds']:.1f} s"
    print(f"width {record['width']}, seed {record['seed']}: {outcome}", file=sys.stderr, flush=True)
