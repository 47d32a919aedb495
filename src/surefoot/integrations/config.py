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
    """The model that a configuration describes, without weights; of its own class where it names one.

    Args:
        name: a `config.json`, or the directory that holds one. Nothing is downloaded.

    Raises:
        ValueError: no such file, or one that describes no model that transformers knows.
        RuntimeError: transformers is not installed.
    """
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
    named = None
    for name in (config.architectures or [])[:1]:
        named = getattr(transformers, name, None)
        if named is None:
            raise ValueError(f"{path} names the architecture {name}, which this transformers does not have")
    any_decoder: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = named(config) if named else any_decoder.from_config(config)
    assert isinstance(model, nn.Module)
    return model
