"""`surefoot convert`: a learning rate and weight decay in every convention."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict

from surefoot.cli import options
from surefoot.conversion import CONVENTIONS, Setting, table
from surefoot.experiment.models.sizes import PUBLISHED, published_name

_EXAMPLES = """
surefoot convert --lr 3e-4 --weight-decay 0.1 --d-in 768 --d-out 3072        from AdamW to all but muP's
surefoot convert --lr 3e-4 --d-in 3072 --d-out 768 --base-d-in 1024          and to muP's, with a base a third as wide
surefoot convert --source keller --lr 0.02 --d-in 1024 --d-out 1024 --json
surefoot convert --lr 6e-4 --weight-decay 0.1 --model gpt2-small              each shape of a published model's matrices
"""


def add_to(commands: options.Commands) -> None:
    """Add the command."""
    help = "write a matrix's learning rate and weight decay in every published convention"
    parser = options.command(commands, "convert", run, help, _EXAMPLES)
    add = parser.add_argument
    add("--source", choices=CONVENTIONS, default="adamw", help="convention of the given values")
    add("--lr", type=options.positive, required=True, help="learning rate")
    add("--weight-decay", type=float, default=0.0, metavar="WD", help="as published (times lr per step)")
    add("--d-in", type=options.count, help="fan-in of the matrix")
    add("--d-out", type=options.count, help="fan-out of the matrix")
    help = f"the hidden matrices of {', '.join(PUBLISHED)} in place of one matrix"
    add("--model", type=published_name, choices=tuple(PUBLISHED), metavar="NAME", help=help)
    help = "fan-in of the same matrix in the base model, for muP's rate (default: no line for muP)"
    add("--base-d-in", type=options.count, help=help)
    options.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print a table for each matrix."""
    setting, base = Setting(arguments.lr, arguments.weight_decay), arguments.base_d_in
    if arguments.source == "mup" and base is None:
        raise ValueError("muP's rates depend on the base model's fan-in: give --d-in, --d-out and --base-d-in")
    tables = {(d_out, d_in): table(setting, arguments.source, d_in, d_out, base) for d_out, d_in in _shapes(arguments)}
    if arguments.json:
        facts = {f"{d_out}x{d_in}": {name: asdict(s) for name, s in of.items()} for (d_out, d_in), of in tables.items()}
        print(json.dumps(facts if arguments.model else next(iter(facts.values())), indent=2), file=arguments.stdout)
    else:
        print("\n\n".join(_text(d_out, d_in, settings) for (d_out, d_in), settings in tables.items()))
    return 0


def _shapes(arguments: argparse.Namespace) -> list[tuple[int, int]]:
    """The shapes `(d_out, d_in)` that a table is asked for."""
    d_out, d_in, model = arguments.d_out, arguments.d_in, arguments.model
    if model is None:
        if d_in is None or d_out is None:
            raise ValueError("a matrix needs --d-in and --d-out, or name a published model: --model gpt2-small")
        return [(d_out, d_in)]
    if any(given is not None for given in (d_in, d_out, arguments.base_d_in)):
        raise ValueError(f"--model {model} has its own matrices: leave --d-in, --d-out and --base-d-in out")
    from surefoot.experiment.models.decoder import published
    from surefoot.experiment.training.build import without_memory
    from surefoot.plan import Plan

    with without_memory():
        placements = Plan.of(published(model)).placements.values()
    blocks = [block for each in placements if each.role.name == "linear" for block in each.projections]
    return list(dict.fromkeys((rows, columns) for _, rows, columns in blocks))


def _text(d_out: int, d_in: int, settings: Mapping[str, Setting]) -> str:
    """The table of one matrix."""
    same = "the steps and the decay are the same in every line"
    lines = [f"a ({d_out}, {d_in}) matrix; {same}", "", "convention  learning rate  weight decay  norm stays below"]
    for name, s in settings.items():
        lost = s.lr * s.weight_decay  # of itself a step
        bound = f"{settings['natural'].lr / (1 - abs(1 - lost)):.4g}" if 0 < lost < 2 else "no bound"
        lines.append(f"{name:10}  {s.lr:<13.4g}  {s.weight_decay:<12.4g}  {bound}")
    return "\n".join(lines)
