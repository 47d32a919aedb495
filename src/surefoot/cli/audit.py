"""`surefoot audit`: which rule does each parameter get, and why?"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from surefoot.cli import options

if TYPE_CHECKING:
    from torch import nn

_EXAMPLES = """
surefoot audit llama --width 768 --depth 12 --head-dim 64
surefoot audit my_package.model:build --recipe muon      build() returns an nn.Module
surefoot audit --json | jq .parameters[].role
"""


def add_to(commands: options.Commands) -> None:
    """Add the command."""
    help = "print the plan of a model: role, norm and reason of every parameter"
    parser = options.command(commands, "audit", run, help, _EXAMPLES)
    parser.add_argument("target", nargs="?", metavar="model", help="gpt, llama, or module:function returning a model")
    parser.add_argument("--model", default="gpt", help="the same")
    parser.add_argument("--recipe", choices=options.RECIPES, default="beyond_mup", metavar="NAME",
                        help="out of " + ", ".join(options.RECIPES))  # fmt: skip
    parser.add_argument("--width", type=options.count, default=64, help="of the reference model")
    options.add_model(parser)
    parser.add_argument("--vocab", type=options.count, default=256, help="of the reference model")
    parser.add_argument("--head", metavar="MODULE", help="the LM head's module, or none (default: found by the wiring)")
    options.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; 1 if a parameter cannot be placed."""
    from surefoot.experiment.methods import Steepest, method
    from surefoot.plan import Plan

    model, chosen = _build(arguments), method(arguments.recipe)
    assert isinstance(chosen, Steepest)
    try:
        plan = Plan.of(model, chosen.recipe, head=() if arguments.head == "none" else arguments.head)
    except ValueError as error:
        print(f"surefoot audit: error: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps({"recipe": plan.recipe, "hash": plan.hash, "parameters": plan.rows()}, indent=2))
    else:
        print(plan)
    return 0


def _build(arguments: argparse.Namespace) -> nn.Module:
    """The model; reference models on the meta device, where any size is instant."""
    import torch

    from surefoot.experiment.models import reference
    from surefoot.experiment.own import call, is_own

    name = arguments.target or arguments.model
    if is_own(name):
        return call(name)
    with torch.device("meta"):
        return reference(name, arguments.width, arguments.depth, arguments.head_dim, arguments.vocab)
