"""What to do about a parameter that no rule places."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList


def remedy(module: nn.Module, name: str, parameter: nn.Parameter) -> str:
    """Advice for the error about a parameter without a kind.

    Args:
        module: owner of the parameter.
        name: the parameter's name in the model.
        parameter: the parameter.

    Returns:
        One or more sentences: what is unknown, and which override or change resolves it.
    """
    frozen = "freeze it with requires_grad_(False)"
    if isinstance(module, ParametrizationList):
        made = ", ".join(type(part).__name__ for part in module)
        return (
            f"a parametrization ({made}) makes the layer's weight of it, so that no norm of it is the weight's. Take "
            "it away with torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight'): a stabiliser, "
            f"PostClip for one, bounds the weight itself; or {frozen}, or say overrides=[({name!r}, 'scalar')]"
        )
    hints = {2: "'linear' for an (out, in) matrix, 'positions' for a table of rows"}
    hint = hints.get(parameter.ndim, "'experts' for a stack (E, out, in), 'positions' for tables of rows")
    return (
        f"no rule knows the module. Say what it is, overrides=[({name!r}, {hint.split()[0]})] for"
        f"{hint.partition('for')[2]}, a Role with a view for other layouts; or {frozen}"
    )
