"""Hugging Face models from their configuration alone, on the meta device: a model of any size in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn


def is_config(name: str) -> bool:
    """Whether a name is a configuration file, or a directory with a `config.json`."""
    path = Path(name)
    return path.suffix == ".json" or (path / "config.json").is_file()


def from_config(name: str) -> nn.Module:
    """The model that a configuration describes, on the meta device; of its own class where it names one.

    Args:
        name: a `config.json`, or the directory that holds one. Nothing is downloaded.

    Raises:
        ValueError: no such file, or one that describes no model that transformers knows.
        RuntimeError: transformers is not installed.
    """
    config, make = _described(name)
    with torch.device("meta"):
        model = getattr(make, "from_config", make)(config)  # AutoModel..., or the class itself
    assert isinstance(model, nn.Module)
    return model


def from_checkpoint(name: str) -> nn.Module:
    """The same model with the weights that lie beside its configuration, all of them in memory, in their own dtype.

    Args:
        name: a directory with `config.json` and weights, as `save_pretrained` writes it. Nothing is downloaded.

    Raises:
        ValueError: as `from_config`; no weights there, or damaged ones, or not those of this model.
        RuntimeError: transformers is not installed.
    """
    _, make = _described(name)
    try:
        model, told = make.from_pretrained(name, dtype="auto", local_files_only=True, output_loading_info=True)
    except Exception as error:  # OSError, SafetensorError, RuntimeError, ...: one for each format
        raise ValueError(f"{name} has no weights that can be read: {error}") from None
    for keys, problem in (("missing_keys", "lack"), ("unexpected_keys", "hold, and its configuration has not,")):
        if told[keys]:
            raise ValueError(f"the weights of {name} {problem} {', '.join(sorted(told[keys])[:5])}")
    assert isinstance(model, nn.Module)
    return model


def _described(name: str) -> tuple[Any, Any]:
    """The configuration and the class of its model."""
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give a model's config.json, or the directory that holds it")
    try:
        import transformers
    except ModuleNotFoundError:
        raise RuntimeError("models by configuration need transformers: pip install 'surefoot[integrations]'") from None
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise ValueError(f"{path} is no configuration that transformers knows: {error}") from None
    for named in (config.architectures or [])[:1]:
        if not hasattr(transformers, named):
            raise ValueError(f"{path} names the architecture {named}, which this transformers does not have")
        return config, getattr(transformers, named)
    return config, transformers.AutoModelForCausalLM
