"""`surefoot report`: the table and the picture of a run directory, made again."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from surefoot.cli import options

_EXAMPLES = """
surefoot report runs/transfer
surefoot report runs/transfer --json | jq .recipes[].drift_octaves
surefoot report runs/compare                         losses, paired differences, steps to a target
surefoot report runs/train                           norms by kind of layer, and the alarms
surefoot report runs/coordcheck
"""

Report = tuple[dict[str, Any], str, Path | None]
"""Summary, statement, picture if there is anything to draw."""


def add_to(commands: options.Commands) -> None:
    """Add the command."""
    help = "make the table and the picture of a run directory again, finished or not"
    parser = options.command(commands, "report", run, help, _EXAMPLES)
    parser.add_argument("directory", type=Path, help="what transfer, compare, train or coordcheck wrote to")
    options.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the table, draw the picture."""
    from surefoot.experiment import coordcheck
    from surefoot.experiment.compare.run import TUNING
    from surefoot.experiment.training import norm_log

    directory: Path = arguments.directory
    if (directory / coordcheck.SUMMARY).exists():
        summary, text, picture = _coordcheck(directory)
    elif (directory / norm_log.NORMS).exists():
        summary, text, picture = _train(directory)
    elif (directory / TUNING).exists():
        summary, text, picture = _compare(directory)
    else:
        summary, text, picture = _transfer(directory)
    print(json.dumps(summary, indent=2, allow_nan=False) if arguments.json else text)
    if picture:
        print(f"\npicture: {picture}", file=sys.stderr if arguments.json else sys.stdout)
    return 0


def _transfer(directory: Path) -> Report:
    from surefoot.experiment.reports import transfer as transfer_report
    from surefoot.experiment.sweep import sweep

    summary, _ = sweep.load(directory)
    picture = transfer_report.figure(directory)
    return summary, transfer_report.statement(summary), picture


def _compare(directory: Path) -> Report:
    from surefoot.experiment.compare.run import load
    from surefoot.experiment.reports import compare as compare_report

    summary = load(directory)
    return summary, compare_report.statement(summary), compare_report.figure(summary, directory)


def _train(directory: Path) -> Report:
    from surefoot.experiment.reports import norms as norm_report

    summary = norm_report.summarise(directory)
    return summary, norm_report.statement(summary), norm_report.figure(directory)


def _coordcheck(directory: Path) -> Report:
    from surefoot.experiment import coordcheck
    from surefoot.experiment.reports import coordcheck as coordcheck_report

    summary = json.loads((directory / coordcheck.SUMMARY).read_text(encoding="utf-8"))
    return summary, coordcheck_report.statement(summary), coordcheck_report.figure(summary, directory)
