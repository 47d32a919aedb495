"""Options that commands share, made from the fields of `TrainConfig`, and what argparse needs to read them."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from surefoot.experiment.errors import Respell, with_remedy
from surefoot.experiment.models.sizes import MODELS, PUBLISHED, is_user_model, published_name, refuse_other
from surefoot.experiment.sweep.axis import flag
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.names import AUTO, COUNT, LOG2, METHODS, NATURAL, POSITIVE, VALUES, Number, parse

Commands = Any  # argparse's own type of `add_subparsers` is private
Runner = Callable[[argparse.Namespace], int]
Reader = Callable[[str], Any]


def command(commands: Commands, name: str, run: Runner, help: str, examples: str) -> argparse.ArgumentParser:
    """Add a command whose help ends in examples.

    Args:
        commands: of `ArgumentParser.add_subparsers`.
        name: of the command.
        run: called with the parsed arguments; returns the exit code.
        help: one line, without a full stop.
        examples: one a line.

    Returns:
        The command's parser; its namespace has in `given` the destinations of the options that were given.
    """
    epilog = "examples:\n" + "\n".join(f"  {line}" for line in examples.strip().splitlines())
    said = {"help": help, "description": f"{help[0].upper()}{help[1:]}.", "epilog": epilog}
    parser: argparse.ArgumentParser = commands.add_parser(name, formatter_class=_Help, allow_abbrev=False, **said)
    parser.register("action", None, _Store)
    parser.set_defaults(run=run, parser=parser, given=frozenset())
    return parser


class _Store(argparse.Action):
    """Store a value as `argparse` does, and note in `given` that the option was given, even if with its default."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values)
        namespace.given |= {self.dest}


class _Help(argparse.RawDescriptionHelpFormatter):
    """Show the defaults of options that have one, and each example on a line of its own."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default in (None, argparse.SUPPRESS) or default is False:
            return action.help
        return f"{action.help} (default: {' '.join(map(str, default)) if isinstance(default, list) else default})"


def _reader(number: Number) -> Reader:
    def read(text: str) -> Any:
        value = number.read(text)
        if not number.allows(value):
            raise argparse.ArgumentTypeError(f"{number.condition}, got {text}")
        return value

    read.__name__ = number.name  # for argparse's message about text that is not a number
    return read


count: Reader = _reader(COUNT)
natural: Reader = _reader(NATURAL)
positive: Reader = _reader(POSITIVE)
exponent: Reader = _reader(LOG2)


def path(text: str) -> Path:
    """Read a path; an empty one, as from an unset variable, is refused: it does not mean the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def checked(check: Callable[[str], object]) -> Callable[[str], str]:
    """Read text as it is, if a check does not refuse it with a `ValueError`, whose message argparse then shows."""

    def read(text: str) -> str:
        try:
            check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return read


def add(parser: argparse.ArgumentParser, *names: str, **changes: Any) -> None:
    """Add the options that the fields of `TrainConfig` declare in their metadata.

    Args:
        parser: of a command.
        *names: of the fields.
        **changes: arguments of `add_argument` that replace those of the declaration.
    """
    for setting in fields(TrainConfig):
        if setting.name in names:
            declared = dict(setting.metadata)
            flag = declared.pop("flag", "--" + setting.name.replace("_", "-"))
            if (number := declared.pop("number", None)) is not None:
                declared["type"] = _reader(number)
            parser.add_argument(flag, dest=setting.name, **{"default": setting.default, **declared, **changes})


def add_recipes(
    parser: argparse.ArgumentParser, default: str | list[str] = TrainConfig.method, names: Sequence[str] = METHODS
) -> None:
    """Add the choice of one method, or of several.

    Args:
        parser: of a command.
        default: name of a method, or a list of several.
        names: the methods to choose from.
    """
    several = isinstance(default, list)
    of, valued = "out of" if several else "one of", ", ".join(name for name in VALUES if name in names)
    help = f"{of} {', '.join(names)}; " + (f"{valued} may take a value, as in moga_row:1.5; " if valued else "")
    help += "--recipe and --method are the same"
    read = checked(lambda text: parse(text, tuple(names)))
    arguments: Any = {"dest": "recipes" if several else "method", "nargs": "+" if several else None, "type": read}
    parser.add_argument("--recipes", default=default, help=help, metavar="NAME", **arguments)
    hidden = argparse.SUPPRESS
    parser.add_argument("--recipe", "--method", default=hidden, help=hidden, metavar="NAME", **arguments)


def add_model(parser: argparse.ArgumentParser, *sizes: str) -> None:
    """Add the choice of a model, and those of its sizes ("width", "depth", "head_dim") that are named."""
    help = f"one of {', '.join(MODELS)}, or module:function that takes a width"
    add(parser, "model", type=_model, metavar="NAME", help=help)
    add(parser, *sizes)


def _model(text: str) -> str:
    if (name := published_name(text)) not in MODELS and not is_user_model(name):
        message = f"{text!r} is unknown; choose one of {', '.join(MODELS)}, or module:function"
        raise with_remedy(argparse.ArgumentTypeError(message), Respell(text, MODELS))
    return name


def rate(text: str) -> float | str:
    """Read a learning rate: `auto`, or a number above 0."""
    return text if text == AUTO else positive(text)


def add_training(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add the options of a training run other than its model, its method and its learning rate.

    Args:
        parser: of a command.
        **defaults: of the command, by the names of the settings, in place of `TrainConfig`'s.
    """
    add(parser, "stabiliser", "steps", "warmup", "decay", "cooldown_shape")
    add(parser, "batch_size", "context", "data_order", "device", "autocast")
    help = "text file or folder (text:PATH is the same), bpe:N or bpe:N:PATH for BPE tokens, bin:PATH for a file or a "
    help += "folder of tokens (see surefoot tokens), or markov:N (default: Python's standard library)"
    parser.add_argument("--data", metavar="PATH", help=help)
    help = "tokens of bin:PATH (default: its manifest's, or the largest token's rounded up to a multiple of 64)"
    parser.add_argument("--vocab", type=count, help=help)
    parser.set_defaults(**defaults)


def require_size(model: str, arguments: argparse.Namespace) -> None:
    """Refuse sizes that were asked for beside a published model and are not its own.

    Args:
        model: any name.
        arguments: as parsed; sizes that no option gave are None.

    Raises:
        ValueError: such a size.
    """
    if (name := published_name(model)) in PUBLISHED:
        refuse_other(name, **{size: getattr(arguments, size, None) for size in vars(PUBLISHED[name])})


def refuse_sizes(model: str, arguments: argparse.Namespace, *sizes: str) -> None:
    """Refuse sizes that were asked for beside a model that has its own.

    Args:
        model: its name, for the message.
        arguments: as parsed; sizes that no option gave are None.
        *sizes: names of the options that change nothing of it.

    Raises:
        ValueError: such a size.
    """
    for size in sizes:
        if getattr(arguments, size) is not None:
            raise ValueError(f"{model} has sizes of its own: leave {flag(size)} out")


def add_executor(parser: argparse.ArgumentParser, out: str, default: str | None = "pool") -> None:
    """Add `--out`, and the choice of where a command's runs are run, for `chosen.executor`.

    Args:
        parser: of a command.
        out: the default run directory.
        default: the default executor; None for the command's own process, one run after the other.
    """
    add = parser.add_argument
    add("--out", type=path, default=Path(out), help="run directory, resumed if it exists")
    own = "" if default else " (default: this process, one run after the other)"
    help = f"where runs are run: processes of one thread each on this machine, Ray tasks, or slurm jobs{own}"
    add("--executor", choices=("pool", "ray", "slurm"), default=default, help=help)
    help = "runs at a time (default: one per core; on Ray, as many as the cluster has room for; on slurm, 64)"
    add("--workers", type=count, help=help)
    help = "with ray: the cluster, as ray.init takes it (default: $RAY_ADDRESS, or Ray on this machine alone)"
    add("--ray-address", metavar="ADDRESS", help=help)
    add("--gpus-per-run", type=positive, metavar="N", help="with ray or slurm: GPUs for each run (default: none)")
    help = "with slurm: options by submitit's names, as in partition=long time=120 (minutes; default: 60)"
    add("--slurm", nargs="+", default=[], metavar="KEY=VALUE", type=_slurm_option, help=help)


def add_sweep(parser: argparse.ArgumentParser, out: str, *sizes: str) -> None:
    """Add what the commands that sweep have in common, after their own options.

    Args:
        parser: of a command.
        out: the default run directory.
        *sizes: the command's sizes besides depth and head dimension.
    """
    add_executor(parser, out)
    add_model(parser, "depth", "head_dim")
    add(parser, *sizes)
    add_training(parser)
    add_json(parser)


def _slurm_option(text: str) -> tuple[str, str | int]:
    """Read KEY=VALUE, a whole number as such.

    >>> _slurm_option("partition=long"), _slurm_option("time=120")
    (('partition', 'long'), ('time', 120))
    """
    key, equals, value = text.partition("=")
    if not key.isidentifier() or not equals or (key == "time" and not value.isdecimal()):
        raise argparse.ArgumentTypeError(f"give KEY=VALUE, time in minutes, got {text}")
    return key, int(value) if value.isdecimal() else value


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON on stdout, and nothing else there")
