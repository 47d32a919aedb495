"""The executor that a command line asks for, and the device of its runs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefoot.experiment.sweep.executors import Executor


def executor(arguments: argparse.Namespace) -> Executor | None:
    """The executor that the options of `add_executor` ask for.

    Args:
        arguments: as parsed.

    Returns:
        The executor, which begins nothing yet; None for the command's own process.

    Raises:
        ValueError: an option of another executor, a package that is not installed, or there is no slurm.
    """
    kind, gpus = arguments.executor, arguments.gpus_per_run
    for flag, given, kinds in (
        ("--workers", arguments.workers, ("pool", "ray", "slurm")),
        ("--ray-address", arguments.ray_address, ("ray",)),
        ("--gpus-per-run", gpus, ("ray", "slurm")),
        ("--slurm", arguments.slurm, ("slurm",)),
    ):
        if given and kind not in kinds:
            raise ValueError(f"{flag} needs --executor {' or '.join(kinds)}")
    if kind == "ray":
        from surefoot.experiment.sweep.clusters import Ray

        return Ray(arguments.workers, arguments.ray_address, gpus or 0.0)
    if kind == "slurm":
        from surefoot.experiment.sweep.clusters import Slurm

        if gpus and gpus % 1:
            raise ValueError(f"--gpus-per-run {gpus:g}: slurm gives whole GPUs")
        return Slurm(arguments.out / "slurm", arguments.workers, int(gpus or 0), dict(arguments.slurm))
    if kind == "pool":
        from surefoot.experiment.sweep.executors import Pool

        return Pool(arguments.workers)
    return None


def device_elsewhere(arguments: argparse.Namespace) -> str | None:
    """The device of runs on Ray or slurm, which has to be what they are given; None for runs on this machine."""
    if getattr(arguments, "executor", None) not in ("ray", "slurm"):
        return None
    given = "cuda" if arguments.gpus_per_run else "cpu"
    if arguments.device not in ("auto", given):
        gpus = "give --gpus-per-run" if given == "cpu" else "give --device cuda, or leave out --gpus-per-run"
        raise ValueError(f"--device {arguments.device} with --executor {arguments.executor}: {gpus}")
    return given


def slurm_option(text: str) -> tuple[str, str | int]:
    """Read KEY=VALUE, a whole number as such.

    >>> slurm_option("partition=long"), slurm_option("time=120")
    (('partition', 'long'), ('time', 120))
    """
    key, equals, value = text.partition("=")
    if not key.isidentifier() or not equals or (key == "time" and not value.isdecimal()):
        raise argparse.ArgumentTypeError(f"give KEY=VALUE, time in minutes, got {text}")
    return key, int(value) if value.isdecimal() else value
