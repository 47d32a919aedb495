"""What the options of a command line ask for: settings of runs, data, and where runs are run."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from surefoot.cli import options
from surefoot.cli.report import reported
from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.data.sources import absolute, load
from surefoot.experiment.models.sizes import is_user_model
from surefoot.experiment.sweep.axis import flag
from surefoot.experiment.sweep.clusters import Ray, Slurm
from surefoot.experiment.sweep.executors import Executor, Pool
from surefoot.experiment.sweep.worker import run_trial
from surefoot.experiment.training.build import pick_device, require_model
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.methods import method

OF_TRIALS = ("method", "width", "lr", "seed", "steps", "average")
"""Settings that each trial of a sweep has of its own, and `average`, which trials do not have."""


def executor(arguments: argparse.Namespace) -> Executor | None:
    """The executor that the options of `options.add_executor` ask for.

    Args:
        arguments: as parsed.

    Returns:
        The executor, which begins nothing yet; None for the command's own process.

    Raises:
        ValueError: an option of another executor, a package that is not installed, or there is no slurm.
    """
    kind, gpus = arguments.executor, arguments.gpus_per_run
    own = {"workers": "pool or ray or slurm", "ray_address": "ray", "gpus_per_run": "ray or slurm", "slurm": "slurm"}
    for name, kinds in own.items():
        if getattr(arguments, name) and kind not in kinds.split(" or "):
            raise ValueError(f"{flag(name)} needs --executor {kinds}")
    if kind == "ray":
        return Ray(arguments.workers, arguments.ray_address, gpus or 0.0)
    if kind == "slurm":
        if gpus and gpus % 1:
            raise ValueError(f"--gpus-per-run {gpus:g}: slurm gives whole GPUs")
        return Slurm(arguments.out / "slurm", arguments.workers, int(gpus or 0), dict(arguments.slurm))
    return Pool(arguments.workers) if kind == "pool" else None


def _device_elsewhere(arguments: argparse.Namespace) -> str | None:
    """The device of runs on Ray or slurm, which must match the GPUs that they get; None for runs on this machine."""
    if getattr(arguments, "executor", None) not in ("ray", "slurm"):
        return None
    given = "cuda" if arguments.gpus_per_run else "cpu"
    if arguments.device not in ("auto", given):
        gpus = "give --gpus-per-run" if given == "cpu" else "give --device cuda, or leave out --gpus-per-run"
        raise ValueError(f"--device {arguments.device} with --executor {arguments.executor}: {gpus}")
    return given


def config(arguments: argparse.Namespace) -> TrainConfig:
    """The configuration of a run; settings without an option keep their defaults.

    Args:
        arguments: as parsed.

    Returns:
        The configuration, with the model's sizes, the learning rate and the device resolved.

    Raises:
        ValueError: a method that takes no such value, sizes that are not a published model's or change nothing of one
            of the user's own, or a GPU was asked for and there is none.
    """
    if is_user_model(arguments.model):
        options.refuse_sizes(arguments.model, arguments, "depth", "head_dim")
    given = {each.name: getattr(arguments, each.name) for each in fields(TrainConfig) if hasattr(arguments, each.name)}
    given["device"] = _device_elsewhere(arguments) or pick_device(arguments.device).type
    resolved = TrainConfig(**given)
    method(resolved.method, resolved.stabiliser)  # refuses before anything is written
    return resolved


def data(arguments: argparse.Namespace) -> str | None:
    """What `--data` and `--vocab` ask for, as `surefoot.experiment.data.sources.load` takes it.

    Args:
        arguments: as parsed.

    Returns:
        The value of `--data`, with the vocabulary in it if one is given.

    Raises:
        ValueError: a vocabulary for other data than `bin:PATH`, or a second one; a folder of texts that the run is in.
    """
    source: str | None = arguments.data
    for name in filter(None, (source, getattr(arguments, "eval_data", None))):
        read, out = Path(re.sub(r"^(text:|bpe:\d+:)", "", name) or name).resolve(), arguments.out.resolve()
        hidden = any(part.startswith(".") for part in out.parts[len(read.parts) :])  # whose files are not read
        if out.is_relative_to(read) and not hidden:
            raise ValueError(f"{arguments.out} lies in {read}, whose files are read: give a folder outside it")
    if arguments.vocab is None:
        return source
    if source is None or not re.match(r"bin:(?!\d+:)", source):
        raise ValueError(f"--vocab {arguments.vocab} is for --data bin:PATH; other data and bin:N:PATH have their own")
    return f"bin:{arguments.vocab}:{source.removeprefix('bin:')}"


def note_epochs(config: TrainConfig, corpus: Corpus) -> None:
    """Say on stderr that a run reads documents more than once, if it does."""
    epochs = config.steps * config.run.tokens / corpus.train.size
    if config.data_order == "documents" and epochs > 1:
        told = f"{config.steps} steps read the {corpus.train.size:,} {corpus.unit}s for training {epochs:.2f} times"
        print(f"surefoot: {told}: the final training loss is of documents read before", file=sys.stderr)


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
        ValueError: as `executor` and `config`; data that cannot be used, a width that the head dimension does not
            divide, or a stabiliser for a baseline.
    """
    executor(arguments)  # so that its options are refused before data are read
    for name in methods:
        method(name, arguments.stabiliser)
    corpus, shared = load(data(arguments), context=arguments.context), config(arguments)
    for width in widths:
        model = require_model(shared.replace(width=width), corpus)
        for name in methods:
            method(name).initialise_(model, 0)
    note_epochs(shared.replace(**longest), corpus)
    settings = {name: value for name, value in shared.to_json().items() if name not in OF_TRIALS}
    return {**settings, "data": absolute(data(arguments)), "text": corpus.name, "corpus": corpus.sha256}


def sweep(arguments: argparse.Namespace, run: Callable[..., object], *what: Any, **further: Any) -> int:
    """Run a sweep on the executor that the options ask for, and show the results.

    Args:
        arguments: as parsed.
        run: the `run` of a module of `surefoot.experiment.sweep`.
        *what: its first arguments, before the directory, of which the first has the settings of all runs.
        **further: others of it.

    Returns:
        The exit code.
    """
    with reported(arguments, what[0].settings["text"]):
        run(*what, arguments.out, run_trial, executor=executor(arguments), **further)
    return 0
