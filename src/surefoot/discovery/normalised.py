"""Weights that are reparametrised as `tau w / |w|`: w has the kind that the weight would have."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from surefoot.stabilise.reparametrise import Reparametrised


def is_normalised(module: nn.Module) -> bool:
    """True for the module that holds such a w, a child of the layer that torch makes."""
    return isinstance(module, ParametrizationList) and all(isinstance(part, Reparametrised) for part in module)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """A module's own parameters by attribute; of a normalised weight the w that it is made of.

    Args:
        module: any module.

    Returns:
        Attribute -> parameter, normalised ones last.

    >>> list(own_parameters(nn.Linear(2, 2)))
    ['weight', 'bias']
    """
    own = dict(module.named_parameters(recurse=False))
    if is_normalised(module) or not is_parametrized(module):
        return {} if is_normalised(module) else own
    parts = module.get_submodule("parametrizations").named_children()
    return own | {name: part.get_parameter("original") for name, part in parts if is_normalised(part)}


def path_of(module: nn.Module, attribute: str) -> str:
    """Name, within the module, of the parameter that `own_parameters` has under an attribute."""
    return attribute if attribute in module._parameters else f"parametrizations.{attribute}.original"
