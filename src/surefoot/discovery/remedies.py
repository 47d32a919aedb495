"""What to do about a parameter that no rule places."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm


def made_by_hooks(module: nn.Module) -> dict[str, tuple[str, str]]:
    """Parameters of which `torch.nn.utils.weight_norm` or `spectral_norm` make another one before each forward pass.

    Args:
        module: any module.

    Returns:
        Name of the parameter -> the function that made it, and the name of what is made.

    >>> made_by_hooks(nn.utils.spectral_norm(nn.Linear(2, 2)))
    {'weight_orig': ('spectral_norm', 'weight')}
    """
    found: dict[str, tuple[str, str]] = {}
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            found |= dict.fromkeys((f"{hook.name}_g", f"{hook.name}_v"), ("weight_norm", hook.name))
        if isinstance(hook, SpectralNorm):
            found[f"{hook.name}_orig"] = ("spectral_norm", hook.name)
    return found


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
    hooks, maker = made_by_hooks(module), None
    if isinstance(module, ParametrizationList):
        maker = f"a parametrization ({', '.join(type(part).__name__ for part in module)})"
        remove = "parametrize.remove_parametrizations(layer, 'weight')"
    elif made := hooks.get(name.rpartition(".")[2]):
        maker, remove = made[0], f"remove_{made[0]}(layer, {made[1]!r})"
    if maker:
        return (
            f"{maker} makes the layer's weight of it, so that no norm of it is the weight's. Take it away with "
            f"torch.nn.utils.{remove}: a stabiliser, PostClip for one, bounds the weight itself; or {frozen}, or say "
            f"overrides=[({name!r}, 'scalar')]"
        )
    rows = "rows, 'tied_positions' if they are added to those of a table that is the head, too"
    hints = {2: f"'linear' for an (out, in) matrix, 'positions' for a table of {rows}"}
    stack = "'experts' for a stack (E, out, in), and then 'router' for the matrix (E, d) beside it"
    hint = hints.get(parameter.ndim, f"{stack}; 'positions' for tables of {rows}")
    return (
        f"no rule knows the module. Say what it is, overrides=[({name!r}, {hint.split()[0]})] for"
        f"{hint.partition('for')[2]}, a Role with a view for other layouts; or {frozen}"
    )
