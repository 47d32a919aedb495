"""`surefoot convert`: a learning rate and weight decay in every convention."""

from __future__ import annotations

import argparse
import json

from surefoot.cli import options
from surefoot.conversion import CONVENTIONS, Setting, table

_EXAMPLES = """
surefoot convert --lr 3e-4 --weight-decay 0.1 --d-in 768 --d-out 3072        from AdamW to all but muP's
surefoot convert --lr 3e-4 --d-in 3072 --d-out 768 --base-d-in 1024          and to muP's, with a base a third as wide
surefoot convert --source keller --lr 0.02 --d-in 1024 --d-out 1024 --json
"""


def add_to(commands: options.Commands) -> None:
    """Add the command."""
    help = "write a matrix's learning rate and weight decay in every published convention"
    parser = options.command(commands, "convert", run, help, _EXAMPLES)
    parser.add_argument("--source", choices=CONVENTIONS, default="adamw", help="convention that they are given in")
    parser.add_argument("--lr", type=options.positive, required=True, help="learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.0, metavar="WD", help="as published, times lr a step")
    parser.add_argument("--d-in", type=options.count, required=True, help="fan-in of the matrix")
    parser.add_argument("--d-out", type=options.count, required=True, help="fan-out of the matrix")
    same = "fan-in of the same matrix in the base model, for muP's rate (default: no line for muP)"
    parser.add_argument("--base-d-in", type=options.count, help=same)
    options.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    setting = Setting(arguments.lr, arguments.weight_decay)
    settings = table(setting, arguments.source, arguments.d_in, arguments.d_out, arguments.base_d_in)
    if arguments.json:
        print(
            json.dumps({name: {"lr": s.lr, "weight_decay": s.weight_decay} for name, s in settings.items()}, indent=2)
        )
        return 0
    print(f"a ({arguments.d_out}, {arguments.d_in}) matrix; the steps and the decay are the same in every line\n")
    print("convention  learning rate  weight decay  norm stays below")
    for name, s in settings.items():
        bound = f"{1 / settings['natural'].weight_decay:.4g}" if s.weight_decay else "no bound"
        print(f"{name:10}  {s.lr:<13.4g}  {s.weight_decay:<12.4g}  {bound}")
    return 0
