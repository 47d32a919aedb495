"""`surefoot transfer`: where does the best learning rate lie at each width, or at other sizes of a run?"""

import argparse

from surefoot.cli import options
from surefoot.experiment.models.sizes import PUBLISHED, REFERENCES
from surefoot.experiment.sweep.axis import AXES, Axis, flag
from surefoot.experiment.sweep.config import Extrapolation, SweepConfig
from surefoot.experiment.sweep.search import Bracket, Grid
from surefoot.experiment.training.config import Architecture
from surefoot.experiment.training.names import centre
from surefoot.scaling import Run

WIDTHS = (32, 64, 128)
_EXAMPLES = """
surefoot transfer                                    the demo: adamw, moonlight_tuned and steady, 3 widths
surefoot transfer --recipes muon steady --widths 64 256 --seeds 3 --out runs/muon
surefoot transfer --model my_package.model:build --recipes steady    build(width) returns an nn.Module
surefoot transfer --model gpt2-small --recipes moga_row:1.5 moga_row:3 --widths 256 512 768
surefoot transfer --rates -7 -6 -5 -4 --data ~/notes --out runs/notes
surefoot transfer --recipes steady --horizons 100 200 400 --to-steps 1600 --seeds 3 --out runs/horizons
surefoot transfer --recipes steady --batches 8 16 32 --to-batch 128 --widths 64 --seeds 3 --out runs/batches
surefoot transfer --recipes steady --depths 2 4 8 16 --widths 64 --seeds 3 --out runs/depths
surefoot transfer --out runs/transfer                again: finished runs are skipped
surefoot transfer --executor ray --device cuda --gpus-per-run 0.5    on a Ray cluster, two runs on each GPU
"""

_LISTS = {
    "horizon": "numbers of steps to sweep at, in place of widths, at one width; the schedule is stretched with them. "
    "Then the power law of the best rate is fitted",
    "batch": "likewise numbers of sequences a step, all for the same number of steps (so four times the batch is four "
    "times the data)",
    "depth": "likewise numbers of blocks of a reference model",
}
_UNITS = {"horizon": "steps", "batch": "sequences a step", "depth": "blocks"}


def add_to(commands: options.Commands) -> None:
    """Add the command."""
    help = "find the best learning rate at several widths and how far it moves; or at several horizons, batches, depths"
    parser = options.command(commands, "transfer", run, help, _EXAMPLES)
    options.add_recipes(parser, default=["adamw", "moonlight_tuned", "steady"])
    add, lists = parser.add_argument, parser.add_mutually_exclusive_group()
    add("--widths", nargs="+", type=options.count, help=f"model widths (default: {WIDTHS}, or the published one)")
    for axis in AXES.values():
        lists.add_argument(flag(axis.values), nargs="+", type=options.count, metavar="N", help=_LISTS[axis.name])
    for axis in AXES.values():
        help = f"with {flag(axis.values)}: number of {_UNITS[axis.name]} at which to read the law"
        add(flag(axis.target), type=options.count, metavar="N", help=help)
    add("--seeds", type=options.count, default=1, help="seeds per width and rate; three give intervals")
    add("--rates", nargs="+", type=options.exponent, metavar="LOG2", help="log2 learning rates, in place of a search")
    add("--budget", type=options.count, help="most rates per width in the search (default: 8)")
    options.add_sweep(parser, "runs/transfer")


def axis_of(arguments: argparse.Namespace) -> Axis | None:
    """The axis that the options ask for.

    Args:
        arguments: as parsed.

    Returns:
        The axis; None for an ordinary sweep over widths.

    Raises:
        ValueError: a target without its values, a value of what the axis varies, more than one width, or depths of a
            model that has its own.
    """
    axis = next((axis for axis in AXES.values() if getattr(arguments, axis.values)), None)
    for other in AXES.values():
        if other is not axis and getattr(arguments, other.target) is not None:
            raise ValueError(f"{flag(other.target)} needs {flag(other.values)}, the values to fit its law to")
    if axis is None:
        return None
    if axis.setting in arguments.given:
        raise ValueError(f"{flag(axis.setting)} conflicts with {flag(axis.values)}, which sets it: leave one out")
    if len(arguments.widths or ()) > 1:
        widths = " ".join(map(str, arguments.widths))
        raise ValueError(f"{flag(axis.values)} is for one width: give one of --widths {widths}")
    if axis.setting == "depth" and arguments.model not in REFERENCES:
        own = f"{arguments.model} has its own depth: give each depth a sweep of its own, with --widths alone"
        raise ValueError(f"--depths needs a reference model ({', '.join(REFERENCES)}); {own}")
    return axis


def run(arguments: argparse.Namespace) -> int:
    """Sweep, then print the table and draw the picture."""
    from surefoot.cli import chosen
    from surefoot.experiment.sweep import extrapolate, sweep

    config = configure(arguments)
    if not isinstance(config, Extrapolation):
        return chosen.sweep(arguments, sweep.run, config)
    return chosen.sweep(arguments, extrapolate.run, config, target=getattr(arguments, AXES[config.axis].target))


def configure(arguments: argparse.Namespace) -> SweepConfig | Extrapolation:
    """The sweep over widths, or the sweeps over an axis, that the options ask for.

    Args:
        arguments: as parsed.

    Returns:
        The configuration.

    Raises:
        ValueError: as `axis_of` and `chosen.trial_settings`, a value twice, or one alone on an axis.
    """
    from surefoot.cli import chosen

    axis, recipes, seeds = axis_of(arguments), tuple(arguments.recipes), tuple(range(arguments.seeds))
    # The search extends by itself: where it starts saves time and decides nothing.
    centres = {name: centre(name, Run(arguments.steps, arguments.batch_size * arguments.context)) for name in recipes}
    if arguments.rates and arguments.budget:
        raise ValueError("--budget is for a search, --rates replace it: leave one out")
    search = Grid(tuple(arguments.rates)) if arguments.rates else Bracket(centres, arguments.budget or 8)
    if axis is None:
        usual = (PUBLISHED[arguments.model].width,) if arguments.model in PUBLISHED else WIDTHS
        widths = tuple(arguments.widths or usual)
        settings = chosen.trial_settings(arguments, recipes, widths)
        return SweepConfig(recipes, widths, seeds, arguments.steps, search, settings)
    (width,) = arguments.widths or (Architecture(arguments.model).width,)
    values = tuple(getattr(arguments, axis.values))
    shared = chosen.trial_settings(arguments, recipes, [width], **{axis.setting: max(values)})
    settings = {**shared, "steps": arguments.steps}
    del settings[axis.setting]
    return Extrapolation(recipes, seeds, search, axis.name, values, width, settings)
