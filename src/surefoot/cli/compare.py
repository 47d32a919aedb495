"""`surefoot compare`: recipes and baselines on one model and data, with equal tuning."""

import argparse

from surefoot.cli import options
from surefoot.experiment.sweep.config import Comparison, Question
from surefoot.experiment.training.config import Architecture
from surefoot.experiment.training.names import parse_at

_EXAMPLES = """
surefoot compare --recipes steady moonlight_tuned muon adamw --baseline moonlight_tuned --steps 600
surefoot compare --recipes steady adamw --baseline adamw --width 128 --seeds 5 --data corpus.txt --out runs/pair
surefoot compare --recipes steady --published muon@0.02 --baseline muon@0.02 --out runs/as-published
surefoot compare --model my_package.model:build --rates-per-recipe 9 --tuning-seeds 3 --out runs/own
surefoot compare --target 1.9                        again: finished runs are kept, another question is answered
"""


def add_to(commands: options.Commands) -> None:
    """Add the command."""
    help = "compare recipes on one model: equal tuning for each, then paired runs over fresh seeds"
    parser = options.command(commands, "compare", run, help, _EXAMPLES)
    options.add_recipes(parser, default=["adamw", "moonlight_tuned", "steady"])
    add = parser.add_argument
    help = "methods at a fixed rate, such as muon@0.02, in this library's conventions"
    add("--published", nargs="+", type=options.checked(parse_at), metavar="NAME@RATE", help=help)
    add("--baseline", metavar="NAME", help="recipe to compare the others with (default: the first of --recipes)")
    help = "number of learning rates that each recipe is tuned with; at least 3"
    add("--rates-per-recipe", type=options.count, default=7, metavar="N", help=help)
    add("--tuning-seeds", type=options.count, default=1, help="seeds for each of these rates")
    add("--seeds", type=options.count, default=3, help="seeds of the final runs, none of them used in tuning")
    add("--evaluations", type=options.count, default=20, help="at most, of the validation loss during a final run")
    help = "loss to which steps and time are counted (default: the baseline's mean final loss)"
    add("--target", type=options.positive, metavar="LOSS", help=help)
    options.add_sweep(parser, "runs/compare", "width")


def run(arguments: argparse.Namespace) -> int:
    """Tune, run over fresh seeds, print the table and draw the picture."""
    from surefoot.cli import chosen
    from surefoot.experiment.sweep import compare as comparing

    comparison = configure(arguments)
    question = Question(arguments.baseline or comparison.names[0], arguments.target)
    question.check(comparison)
    return chosen.sweep(arguments, comparing.run, comparison, question)


def configure(arguments: argparse.Namespace) -> Comparison:
    """The comparison that the options ask for.

    Args:
        arguments: as parsed.

    Returns:
        The comparison.

    Raises:
        ValueError: as `chosen.trial_settings`, or a recipe that is named twice.
    """
    from surefoot.cli import chosen

    published = tuple(arguments.published or ())
    methods = [*arguments.recipes, *(parse_at(text)[0] for text in published)]
    width = arguments.width or Architecture(arguments.model).width
    names = ("steps", "rates_per_recipe", "tuning_seeds", "seeds", "evaluations")
    numbers = {name: getattr(arguments, name) for name in names}
    settings = chosen.trial_settings(arguments, methods, [width])
    return Comparison(tuple(arguments.recipes), published, width, settings=settings, **numbers)
