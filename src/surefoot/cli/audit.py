"""`surefoot audit`: which rule does each parameter get, and why?"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from surefoot.cli import options
from surefoot.experiment.models.sizes import MODELS, is_user_model
from surefoot.experiment.training.config import Architecture, TrainConfig
from surefoot.experiment.training.names import RECIPES

if TYPE_CHECKING:
    from torch import nn

    from surefoot.plan import Plan

VOCAB = 256
SMALL_SIDE, LARGE_RATIO, LARGE_NORM = 8, 32, 8.0  # sides, aspect ratios and norms beyond which a warning is given

_EXAMPLES = """
surefoot audit llama --width 768 --depth 12 --head-dim 64
surefoot audit gpt2-xl --recipes moga_row:1.5             a published model by its name
surefoot audit my_package.model:build --recipes muon     build() returns an nn.Module; with --width 64, build(64)
surefoot audit checkpoints/llama-70b                      a Hugging Face config.json: nothing but its shapes is made
surefoot audit checkpoints/gpt2 --weights                 and its weights: which norms are far from 1?
surefoot audit --json | jq .parameters[].role
"""


def add_to(commands: options.Commands) -> None:
    """Add the command."""
    help = "print the plan of a model: role, norm and reason of every parameter"
    parser = options.command(commands, "audit", run, help, _EXAMPLES)
    add = parser.add_argument
    help = f"{', '.join(MODELS)}, module:function returning a model, or a Hugging Face config.json"
    add("target", nargs="?", metavar="model", help=help)
    options.add(parser, "model", default=None, help="the same (default: gpt)")
    options.add_recipes(parser, names=RECIPES)
    options.add(parser, "width", "depth", "head_dim")
    help = f"vocabulary of a reference model (default: {VOCAB}, or the published model's)"
    add("--vocab", type=options.count, help=help)
    help = "read the weights beside a config.json too, all into memory, and warn of norms far from 1"
    add("--weights", action="store_true", help=help)
    add("--head", metavar="MODULE", help="the LM head's module, or none (default: by the wiring)")
    options.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; 1 if a parameter cannot be placed."""
    from surefoot.experiment.training.methods import Steepest, method
    from surefoot.plan import Plan

    model, chosen = _build(arguments), method(arguments.method)
    assert isinstance(chosen, Steepest)
    try:
        plan = Plan.of(model, chosen.recipe, head=() if arguments.head == "none" else arguments.head)
    except ValueError as error:
        print(f"surefoot audit: error: {error}", file=sys.stderr)
        return 1
    cautions = warnings(model, plan)
    if arguments.json:
        facts = {"recipe": plan.recipe, "hash": plan.hash, "smoothness": plan.smoothness()}
        shown = {**facts, "parameters": plan.rows(), "warnings": cautions}
        print(json.dumps(shown, indent=2), file=arguments.stdout)
    else:
        print("\n".join([str(plan), *(f"warning: {line}" for line in cautions)]))
    return 0


def warnings(model: nn.Module, plan: Plan) -> list[str]:
    """Warnings about a plan: matrices with a short side or a large aspect ratio, and weights far from norm 1.

    Args:
        model: on any device; on the meta device norms are not measured.
        plan: of the model.

    Returns:
        One sentence per warning.
    """
    from surefoot.attention.logits import usually_scaled
    from surefoot.geometry import Spectral
    from surefoot.optim.measuring import of_weights

    lines = []
    for name, placement in plan.placements.items():
        sides = [sorted(block[-2:]) for block in placement.blocks if type(placement.role.geometry) is Spectral]
        if tiny := next((small for small, _ in sides if small < SMALL_SIDE), 0):
            lines.append(f"{name} has a side of {tiny}: a spectral norm of so few directions is nearly a Euclidean one")
        elif ratio := next((large // small for small, large in sides if large > LARGE_RATIO * small), 0):
            lines.append(f"{name} is {ratio} times as long as wide: is it one matrix, or several that are fused?")
    if not plan.recipe.startswith("steady") and (usual := usually_scaled(model)):  # whose steps fall with d_head
        stays = "which stays so; where a model's widths differ in d_head, surefoot.scale_attention_ makes it 1/d_head"
        lines.append(f"{len(usual)} modules scale attention by 1/sqrt(d_head), {stays}")
    if not any(p.is_meta for p in model.parameters()):
        weights = of_weights(model, plan)
        for name in plan:
            if (norm := weights[name].get("forward_lower", 0.0)) > LARGE_NORM:
                lines.append(f"{name} has norm {norm:.3g}: plan.initialise_ it, or if pretrained use plan.relative_to")
    return lines


def _build(arguments: argparse.Namespace) -> nn.Module:
    """The model; one with a name is built on the meta device, where any size takes no time."""

    from surefoot.cli.hf_config import from_checkpoint, from_config, is_config
    from surefoot.experiment.models.user_model import call
    from surefoot.experiment.training.build import build, without_memory

    name = arguments.target or arguments.model or Architecture().model
    if arguments.model not in (None, name):
        raise ValueError(f"{name} and --model {arguments.model}: name one model")
    described, own = arguments.weights or is_config(name), is_user_model(name)
    unread = ("width",) * described + ("depth", "head_dim", "vocab") * (described or own)
    options.refuse_sizes(name, arguments, *unread)
    if described:
        return from_checkpoint(name) if arguments.weights else from_config(name)
    if own:
        return call(name, *(() if arguments.width is None else (arguments.width,)))
    options.require_size(name, arguments)
    with without_memory():
        return build(TrainConfig(name, arguments.width, arguments.depth, arguments.head_dim), arguments.vocab or VOCAB)
