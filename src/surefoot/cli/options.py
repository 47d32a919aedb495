"""Options that commands share, made from the fields of `TrainConfig`, and what argparse needs to read them."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from surefoot.cli.executor import device_elsewhere, slurm_option
from surefoot.cli.executor import executor as executor
from surefoot.experiment.errors import Respell, with_remedy
from surefoot.experiment.models.sizes import MODELS, PUBLISHED, is_user_model, published_name, refuse_other
from surefoot.experiment.training import config
from surefoot.experiment.training.config import Architecture, Batches, Execution, Optimisation, TrainConfig
from surefoot.experiment.training.names import AUTO, COUNT, LOG2, METHODS, NATURAL, POSITIVE, VALUES, Number, parse
from surefoot.experiment.training.schedule import Schedule

if TYPE_CHECKING:
    from surefoot.experiment.data.corpus import Corpus

Commands = Any  # argparse's own type of `add_subparsers` is private
Runner = Callable[[argparse.Namespace], int]


def command(commands: Commands, name: str, run: Runner, help: str, examples: str) -> argparse.ArgumentParser:
    """Add a command whose help ends in examples.

    Args:
        commands: of `ArgumentParser.add_subparsers`.
        name: of the command.
        run: called with the parsed arguments; returns the exit code.
        help: one line, without a full stop.
        examples: one a line.

    Returns:
        The command's parser. What it parses has in `given` the destinations of the options that were given.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog="examples:\n" + "\n".join(f"  {line}" for line in examples.strip().splitlines()),
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.register("action", None, _Store)
    parser.set_defaults(run=run, parser=parser, given=frozenset())
    return parser


class _Store(argparse.Action):
    """Store a value as `argparse` does, and in `given` that the option was given, be it with the default's value."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values)
        namespace.given |= {self.dest}


class _Help(argparse.RawDescriptionHelpFormatter):
    """Show the defaults of options that have one, and each example on a line of its own."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default is None or default is False or default is argparse.SUPPRESS:
            return action.help
        shown = " ".join(map(str, default)) if isinstance(default, list) else str(default)
        return f"{action.help} (default: {shown})"


def _reader(number: Number) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value = number.read(text)
        if not number.allows(value):
            raise argparse.ArgumentTypeError(f"{number.condition}, got {text}")
        return value

    read.__name__ = number.name  # for argparse's message about text that is not a number
    return read


count: Callable[[str], float] = _reader(COUNT)
natural: Callable[[str], float] = _reader(NATURAL)
positive: Callable[[str], float] = _reader(POSITIVE)
exponent: Callable[[str], float] = _reader(LOG2)


def add(parser: argparse.ArgumentParser, part: type, *names: str, **changes: Any) -> None:
    """Add the options that the fields of a dataclass declare in their metadata.

    Args:
        parser: of a command.
        part: one of the dataclasses of `surefoot.experiment.training.config`.
        *names: of the fields; none for all.
        **changes: arguments of `add_argument` that replace those of the declaration.
    """
    for setting in fields(part):
        if setting.name in names or (not names and "help" in setting.metadata):
            declared = dict(setting.metadata)
            flag = declared.pop("flag", "--" + setting.name.replace("_", "-"))
            if (number := declared.pop("number", None)) is not None:
                declared["type"] = _reader(number)
            parser.add_argument(flag, dest=setting.name, **{"default": setting.default, **declared, **changes})


def add_recipe(parser: argparse.ArgumentParser, names: tuple[str, ...] = METHODS) -> None:
    """Add the choice of one method.

    Args:
        parser: of a command.
        names: the methods to choose from.
    """
    _add_recipe(parser, "method", names, "one of", default=config.TrainConfig().optimisation.method)


def add_recipes(parser: argparse.ArgumentParser, default: list[str]) -> None:
    """Add the choice of several methods.

    Args:
        parser: of a command.
        default: names of methods.
    """
    _add_recipe(parser, "recipes", METHODS, "out of", default=default, nargs="+")


def _add_recipe(
    parser: argparse.ArgumentParser, dest: str, names: tuple[str, ...], of: str, default: Any, **arguments: Any
) -> None:
    valued = ", ".join(name for name in VALUES if name in names)
    help = f"{of} {', '.join(names)}; {valued} may take a value, as in moga_row:1.5; --recipe and --method are the same"
    arguments |= {"dest": dest, "type": _method(names), "metavar": "NAME"}
    parser.add_argument("--recipes", default=default, help=help, **arguments)
    parser.add_argument("--recipe", "--method", default=argparse.SUPPRESS, help=argparse.SUPPRESS, **arguments)


def _method(names: tuple[str, ...]) -> Callable[[str], str]:
    def read(text: str) -> str:
        try:
            parse(text, names)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return read


def add_model(parser: argparse.ArgumentParser, *sizes: str) -> None:
    """Add the choice of a model, and of those of "width", "depth" and "head_dim" that the command has one of."""
    help = f"one of {', '.join(MODELS)}, or module:function that takes a width"
    add(parser, Architecture, "model", type=_model, metavar="NAME", help=help)
    add(parser, Architecture, *sizes)


def _model(text: str) -> str:
    if (name := published_name(text)) not in MODELS and not is_user_model(name):
        known = ", ".join(MODELS)
        error = argparse.ArgumentTypeError(f"{text!r} is unknown; choose one of {known}, or module:function")
        raise with_remedy(error, Respell(text, MODELS))
    return name


def require_size(model: str, arguments: argparse.Namespace) -> None:
    """Refuse sizes that were asked for beside a published model and are not its own.

    Args:
        model: any name.
        arguments: as parsed; sizes that no option gave are None.

    Raises:
        ValueError: such a size.
    """
    if (name := published_name(model)) in PUBLISHED:
        given = {size: getattr(arguments, size, None) for size in vars(PUBLISHED[name])}
        refuse_other(name, **given)


def add_rate(parser: argparse.ArgumentParser) -> None:
    """Add the learning rate, which a run takes above 0 from the command line."""
    add(parser, Optimisation, "lr", type=_rate)


def _rate(text: str) -> float | str:
    return text if text == AUTO else positive(text)


_rate.__name__ = "rate"


def add_training(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add the options of a training run other than its model, its method and its learning rate.

    Args:
        parser: of a command.
        **defaults: of the command, by the names of the settings, in place of `TrainConfig`'s.
    """
    add(parser, Optimisation, "stabiliser")
    add(parser, Schedule)
    add(parser, Batches)
    add(parser, Execution)
    data = (
        "text file or folder (text:PATH is the same), bpe:N or bpe:N:PATH for BPE tokens, bin:PATH for a file or a "
        "folder of tokens (see surefoot tokens), or markov:N (default: Python's standard library)"
    )
    parser.add_argument("--data", metavar="PATH", help=data)
    vocab = "tokens of bin:PATH (default: its manifest's, or the largest token's rounded up to a multiple of 64)"
    parser.add_argument("--vocab", type=count, help=vocab)
    parser.set_defaults(**defaults)


def add_executor(parser: argparse.ArgumentParser, default: str | None = "pool") -> None:
    """Add the choice of where a command's runs are run, for `executor`.

    Args:
        parser: of a command that has `--out`.
        default: the executor without a choice; None for the command's own process, one run after the other.
    """
    add = parser.add_argument
    own = "" if default else " (default: this process, one run after the other)"
    help = f"where runs are run: processes of one thread each on this machine, Ray tasks, or slurm jobs{own}"
    add("--executor", choices=("pool", "ray", "slurm"), default=default, help=help)
    help = "runs at a time (default: one per core; on Ray, as many as the cluster has room for; on slurm, 64)"
    add("--workers", type=count, help=help)
    help = "with ray: the cluster, as ray.init takes it (default: $RAY_ADDRESS, or Ray on this machine alone)"
    add("--ray-address", metavar="ADDRESS", help=help)
    add("--gpus-per-run", type=positive, metavar="N", help="with ray or slurm: GPUs for each run (default: none)")
    help = "with slurm: options by submitit's names, as in partition=long time=120 (minutes; default: 60)"
    add("--slurm", nargs="+", default=[], metavar="KEY=VALUE", type=slurm_option, help=help)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON on stdout, and nothing else there")


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of `TrainConfig` for which a command has options, by their flat names.

    Args:
        arguments: as parsed; a command without an option for the learning rate has none in the result either.

    Returns:
        The settings, with the model's sizes, the learning rate and the device resolved.

    Raises:
        ValueError: a method that takes no such value, sizes that are not a published model's, or a GPU was asked for
            and there is none.
    """
    from surefoot.experiment.training.build import pick_device
    from surefoot.experiment.training.methods import method

    chosen = {name: getattr(arguments, name) for name in config.TrainConfig().to_json() if hasattr(arguments, name)}
    if "method" in chosen:
        method(chosen["method"], chosen["stabiliser"])  # refuses before anything is written
    chosen["device"] = device_elsewhere(arguments) or pick_device(arguments.device).type
    resolved = config.TrainConfig.of(**chosen).to_json()
    return {name: resolved[name] for name in chosen}


def data(arguments: argparse.Namespace) -> str | None:
    """What `--data` and `--vocab` ask for, as `surefoot.experiment.data.sources.load` takes it.

    Args:
        arguments: as parsed.

    Returns:
        The value of `--data`, with the vocabulary in it if one is given.

    Raises:
        ValueError: a vocabulary for other data than `bin:PATH`, or a second one.
    """
    source: str | None = arguments.data
    if arguments.vocab is None:
        return source
    if source is None or not source.startswith("bin:"):
        raise ValueError(f"--vocab {arguments.vocab} is for --data bin:PATH; other data have their own vocabulary")
    if re.match(r"bin:\d+:", source):
        raise ValueError(f"--vocab {arguments.vocab} and --data {source} are two vocabularies: give one")
    return f"bin:{arguments.vocab}:{source.removeprefix('bin:')}"


def note_epochs(config: TrainConfig, corpus: Corpus) -> None:
    """Say on stderr that a run reads documents more than once, if it does."""
    batches, steps = config.batches, config.schedule.steps
    epochs = steps * batches.batch_size * batches.context / corpus.train.size
    if batches.data_order == "documents" and epochs > 1:
        told = f"{steps} steps read the {corpus.train.size:,} {corpus.unit}s for training {epochs:.2f} times"
        print(f"surefoot: {told}: the training loss at the end is of documents read before", file=sys.stderr)


def trial_settings(
    arguments: argparse.Namespace, methods: Sequence[str], widths: Sequence[int], **longest: int
) -> dict[str, Any]:
    """The settings of a sweep's trials; refuses what cannot be run before anything is written.

    Args:
        arguments: as parsed.
        methods: names of the methods that are to be run.
        widths: of the models.
        **longest: settings of the longest runs, where they are not those of the arguments, for `note_epochs`.

    Returns:
        The settings that all trials share, as `run_trial` of `surefoot.experiment.sweep.worker` reads them.

    Raises:
        ValueError: data that cannot be used, a width that the head dimension does not divide, or a stabiliser for a
            baseline.
    """
    from surefoot.experiment.data.sources import absolute, load
    from surefoot.experiment.training.build import require_model
    from surefoot.experiment.training.methods import method

    for name in methods:
        method(name, arguments.stabiliser)
    corpus = load(data(arguments), context=arguments.context)
    shared = {name: value for name, value in settings(arguments).items() if name not in ("width", "steps")}
    for width in widths:
        require_model(config.TrainConfig.of(width=width, **shared), corpus)
    note_epochs(config.TrainConfig.of(**{**shared, "steps": arguments.steps, **longest}), corpus)
    return {**shared, "data": absolute(data(arguments)), "text": corpus.name, "corpus": corpus.sha256}
