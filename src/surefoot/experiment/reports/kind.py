"""Which command a run directory is of."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from surefoot.experiment import configs

CONFIG = "config.json"
Kind = Literal["transfer", "extrapolate", "compare", "train", "coordcheck"]


def kind_of(directory: Path) -> tuple[Kind, dict[str, Any]]:
    """Tell which command wrote a run directory, by the configuration that it wrote first.

    Args:
        directory: of a run, finished or not.

    Returns:
        The command ("extrapolate": `transfer` over horizons, batches or depths), and the content of `config.json`.

    Raises:
        FileNotFoundError: no run was started there.
        ValueError: `config.json` is damaged, or was written by another program.
    """
    path = directory / CONFIG
    if not path.exists():
        raise FileNotFoundError(f"{directory} is no run directory: it has no {CONFIG}")
    config = configs.read(path)
    if "axis" in config:
        return "extrapolate", config
    if "recipes" in config:
        return ("compare" if "rates_per_recipe" in config else "transfer"), config
    if "width" in config:
        return "train", config
    if "method" in config:
        return "coordcheck", config
    raise ValueError(f"{path} is of no run of transfer, compare, train or coordcheck")
