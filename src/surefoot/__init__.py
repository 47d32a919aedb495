"""Surefoot: steepest descent under the right norm for each layer.

The public names are those of `_api`, and the modules of the package. They are imported when one is first used, so that
`surefoot --help` does not import torch.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from surefoot._api import *  # noqa: F403


def __dir__() -> list[str]:
    import importlib

    return [*importlib.import_module("surefoot._api").__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    import importlib.util

    if importlib.util.find_spec(f"surefoot.{name}") is not None:
        return importlib.import_module(f"surefoot.{name}")
    api = importlib.import_module("surefoot._api")
    if name in api.__all__:
        return getattr(api, name)
    home = next((module for module, names in api.ELSEWHERE.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'surefoot' has no attribute {name!r}; it has {', '.join(api.__all__)}")
    if home == "surefoot.contrib":
        import warnings

        warnings.warn(f"surefoot.{name} moved: {home}.{name}", DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module(home), name)
