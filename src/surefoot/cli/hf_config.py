"""Hugging Face models from a configuration or a checkpoint on disk; without weights on the meta device, in seconds."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from surefoot.experiment.errors import importing


def is_config(name: str) -> bool:
    """True if the name has the suffix .json or is a directory with a `config.json`."""
    path = Path(name)
    return path.suffix == ".json" or (path / "config.json").is_file()


def from_config(name: str) -> nn.Module:
    """Build the model of a configuration on the meta device.

    Args:
        name: a `config.json`, or the directory with one. Nothing is downloaded.

    Returns:
        The model, of the first class in the configuration's `architectures`, by default an `AutoModelForCausalLM`.

    Raises:
        ValueError: the file does not exist, or describes no model of transformers.
        RuntimeError: transformers is not installed.
    """
    config, model_class = _read_config(name)
    try:
        with torch.device("meta"):
            make = getattr(model_class, "from_config", model_class)  # AutoModel..., or the class itself
            model: nn.Module = make(config)
    except Exception as error:  # whatever a constructor raises for sizes that it cannot take
        raise ValueError(f"{name} describes a model that cannot be built: {_reason(error)}") from error
    return model


def from_checkpoint(name: str) -> nn.Module:
    """Load a model with its weights into memory, in their own dtype.

    Args:
        name: a directory with `config.json` and weights, as `save_pretrained` writes it. Nothing is downloaded.

    Returns:
        The model, of the same class as from `from_config`.

    Raises:
        ValueError: as `from_config`; or the weights are missing, damaged, or of another model.
        RuntimeError: transformers is not installed.
    """
    _, model_class = _read_config(name)
    try:
        model, loaded = model_class.from_pretrained(name, dtype="auto", local_files_only=True, output_loading_info=True)
    except Exception as error:  # OSError, SafetensorError, RuntimeError, ...: one per format
        raise ValueError(f"{name} has no readable weights: {error}") from None
    for keys, problem in (("missing_keys", "lack"), ("unexpected_keys", "have, unlike its configuration,")):
        if loaded[keys]:
            raise ValueError(f"the weights of {name} {problem} {', '.join(sorted(loaded[keys])[:5])}")
    assert isinstance(model, nn.Module)
    return model


def _read_config(name: str) -> tuple[Any, Any]:
    """(configuration, class of its model)."""
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give a model's config.json, or the directory that holds it")
    with importing("integrations", "models by configuration need transformers:", RuntimeError):
        import transformers
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # ValueError, OSError, KeyError, StrictDataclassError, ...: one per thing to be wrong
        raise ValueError(f"{path} is not a configuration known to transformers: {_reason(error)}") from None
    if not config.architectures:
        return config, transformers.AutoModelForCausalLM
    model_class = getattr(transformers, architecture := config.architectures[0], None)
    if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):
        raise ValueError(f"{path} names the architecture {architecture}, which is no model of this transformers")
    return config, model_class


def _reason(error: Exception) -> str:
    """The first line of an error, and the second one where the first ends in a colon."""
    first, _, rest = str(error).partition("\n")
    return f"{first} {rest.strip().partition(chr(10))[0]}" if first.endswith(":") else first
