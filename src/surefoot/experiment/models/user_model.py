"""A model of the user's own, named on the command line as `module:function`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from torch import nn


def is_own(name: str) -> bool:
    """Whether a model's name is `module:function` rather than a reference model's.

    >>> is_own("my_package.model:build"), is_own("gpt")
    (True, False)
    """
    return ":" in name


def call(target: str, *arguments: int) -> nn.Module:
    """Import `module:function`, from the working directory too as `python -m` does, and call it.

    Args:
        target: `module:function`.
        arguments: what the function takes; the width, in a sweep.

    Raises:
        ValueError: no such module or function, it does not take these arguments, or it returns no nn.Module.
    """
    place, _, name = target.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(place), name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{target}: {error}; it is looked for as Python would from {here}") from None
    except (AttributeError, ValueError):
        raise ValueError(f"{target}: module {place!r} has no function {name!r}") from None
    try:
        model = function(*arguments)
    except TypeError as error:
        how = f"with {', '.join(map(str, arguments))}" if arguments else "without arguments"
        raise ValueError(f"{target}: it is called {how}, and failed: {error}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{target}: it returned a {type(model).__name__}, not an nn.Module")
    return model
