"""`surefoot report`: the table and the picture of a run directory, made again."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from surefoot.cli import options

_EXAMPLES = """
surefoot report runs/transfer
surefoot report runs/transfer --json | jq .recipes[].drift_octaves
"""


def add_to(commands: options.Commands) -> None:
    """Add the command."""
    help = "make the table and the picture of a transfer directory again, finished or not"
    parser = options.command(commands, "report", run, help, _EXAMPLES)
    parser.add_argument("directory", type=Path, help="what transfer wrote to")
    options.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the table, draw the picture."""
    from surefoot.experiment import report, sweep

    summary, _ = sweep.load(arguments.directory)
    picture = report.figure(arguments.directory)
    print(json.dumps(summary, indent=2, allow_nan=False) if arguments.json else report.statement(summary))
    print(f"\npicture: {picture}", file=sys.stderr if arguments.json else sys.stdout)
    return 0
