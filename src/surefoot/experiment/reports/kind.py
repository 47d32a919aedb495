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
        ValueError: `config.json` is damaged.
    """
    path = directory / CONFIG
    if not path.exists():
        raise FileNotFoundError(f"{directory} is no run directory: it has no {CONFIG}")
    try:
        config = configs.parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None
    if "axis" in config:
        return "extrapolate", config
    if "recipes" in config:
        return ("compare" if "rates_per_recipe" in config else "transfer"), config
    return ("train" if "width" in config else "coordcheck"), config
