"""`surefoot ladder`: predict a larger model's loss from small ones, trained at the rate of the law."""

import argparse
import math

from surefoot.cli import options
from surefoot.experiment.sweep.config import Ladder, Rung
from surefoot.experiment.training.names import AUTO, COUNT
from surefoot.scaling import LAWS

_EXAMPLES = """
surefoot ladder --widths 32 64 128 --to-width 512 --out runs/ladder
surefoot ladder --widths 32 48 64 96 --to-width 256 --seeds 1 --tokens-per-parameter 5 --data ~/notes
surefoot ladder --widths 32 64 128 --to-width 256 --train-target     how far off was the prediction?
surefoot ladder --widths 32 64 128 --to-width 1024                   again: another target needs no other rungs
"""


def add_to(commands: options.Commands) -> None:
    """Add the command."""
    help = "predict the loss of a larger model from small ones, trained at the rate of the law"
    parser = options.command(commands, "ladder", run, help, _EXAMPLES)
    options.add_recipes(parser, names=tuple(LAWS))
    add = parser.add_argument
    add("--widths", nargs="+", type=options.count, default=[32, 64, 128], help="of the small models, three or more")
    add("--to-width", type=options.count, required=True, metavar="N", help="width of the model to predict the loss of")
    help = "training tokens per parameter of each model; the steps follow from it"
    add("--tokens-per-parameter", type=options.positive, default=20.0, metavar="N", help=help)
    help = "seeds per small model; the interval needs four runs in all, and is narrow with three seeds"
    add("--seeds", type=options.count, default=3, help=help)
    help = "train the large model, too, with the first seed, and say how far off the prediction was"
    add("--train-target", action="store_true", help=help)
    options.add_sweep(parser, "runs/ladder")
    next(action for action in parser._actions if action.dest == "steps").help = argparse.SUPPRESS


def run(arguments: argparse.Namespace) -> int:
    """Train the small models, then print the table and draw the picture."""
    from surefoot.cli import chosen
    from surefoot.experiment.sweep import ladder as running

    return chosen.sweep(arguments, running.run, *configure(arguments), train_target=arguments.train_target)


def configure(arguments: argparse.Namespace) -> tuple[Ladder, Rung]:
    """The ladder that the options ask for, and its target.

    Args:
        arguments: as parsed.

    Returns:
        Both.

    Raises:
        ValueError: as `chosen.trial_settings`, a number of steps, or fewer than three widths.
    """
    from surefoot.cli import chosen
    from surefoot.experiment.sweep.worker import unchanged
    from surefoot.experiment.training.build import require_model

    if "steps" in arguments.given:
        raise ValueError("--steps: a ladder's follow from --tokens-per-parameter, leave it out")
    recipe, widths = arguments.method, [*arguments.widths, arguments.to_width]
    settings = chosen.trial_settings(arguments, [recipe], widths)
    shared, corpus = chosen.config(arguments), unchanged(settings["data"], settings["corpus"])

    def rung(width: int) -> Rung:
        parameters = sum(p.numel() for p in require_model(shared.replace(width=width), corpus).parameters())
        steps = arguments.tokens_per_parameter * parameters / shared.run.tokens
        if not COUNT.allows(max(1, steps)):
            raise ValueError(f"--tokens-per-parameter: width {width} would take {steps:.3g} steps; give fewer tokens")
        config = shared.replace(width=width, steps=max(1, round(steps)), lr=AUTO)
        chosen.note_epochs(config, corpus)
        return Rung(width, parameters, config.steps, math.log2(config.lr))

    seeds, rungs = tuple(range(arguments.seeds)), tuple(map(rung, arguments.widths))
    return Ladder(recipe, rungs, arguments.tokens_per_parameter, seeds, settings), rung(arguments.to_width)
