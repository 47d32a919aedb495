"""A model of the user's own, named on the command line as `module:function`."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from torch import nn


def call(target: str, *arguments: int) -> nn.Module:
    """Import `module:function`, from the working directory too as `python -m` does, and call it.

    Args:
        target: `module:function`.
        *arguments: what the function takes; the width, in a sweep.

    Returns:
        The model.

    Raises:
        ValueError: no such module or function, the module cannot be imported, the function does not take these
            arguments or needs a package that is missing, or it returns no nn.Module.
        RuntimeError: the function fails otherwise.
    """
    with redirect_stdout(sys.stderr):  # the command's is for results
        function = _function(target)
    try:
        with redirect_stdout(sys.stderr):
            model = function(*arguments)
    except (Exception, SystemExit) as error:
        how = f"with {', '.join(map(str, arguments))}" if arguments else "without arguments"
        hint = "; --width gives it one" if isinstance(error, TypeError) and not arguments else ""
        kind = ValueError if isinstance(error, TypeError | ImportError | ValueError) else RuntimeError
        raise kind(f"{target}: calling it {how} failed: {_told(error)}{hint}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{target} returned a {type(model).__name__}, not an nn.Module")
    return model


def _function(target: str) -> Any:
    place, _, name = target.partition(":")
    if not name or not place or place.startswith("."):
        raise ValueError(f"{target!r} is not module:function, such as my_package.model:build")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{target}: importing {place} from {here} failed: {_told(error)}") from error
    if not hasattr(module, name):
        raise ValueError(f"{target}: module {place!r} has no function {name!r}")
    return getattr(module, name)


def _told(error: BaseException) -> str:
    """An error's text, with the line of the user's code that raised it, if the error does not name it itself."""
    frames = [f for f in extract_tb(error.__traceback__) if f.filename != __file__ and "importlib" not in f.filename]
    named = isinstance(error, SyntaxError) or not frames
    return f"{type(error).__name__}: {error}" + ("" if named else f" ({frames[-1].filename}, line {frames[-1].lineno})")


@contextmanager
def drawn_by(device: torch.device, *key: int) -> Iterator[None]:
    """Context where random draws, as of dropout, follow from a key alone; torch's generators are restored after it.

    Args:
        device: of the model.
        *key: 0 or more each.

    Yields:
        Nothing.
    """
    import numpy as np  # `surefoot audit` needs none

    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]))
        yield
