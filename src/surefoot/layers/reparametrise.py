"""Weights at a fixed norm: `f(x; tau w / |w|)`, under the norm that a plan gives each parameter."""

from collections.abc import Iterable
from dataclasses import replace

from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from surefoot.plan import Placement, Plan
from surefoot.stabilise.reparametrise import Reparametrised


def normalise_(model: nn.Module, plan: Plan, radius: float = 1.0, names: Iterable[str] | None = None) -> Plan:
    """Reparametrise weights as `tau w / |w|`: each has norm tau at every step, whatever the optimizer does to w.

    The norm is that of the weight's role, for each matrix that the role's layout separates (experts, gates, queries).
    The gradient includes that of the norm, so it is orthogonal to w. Steps still make |w| grow, and a step of the same
    size turns a larger weight less; the stabiliser `Normalise` instead rescales after each step.

    `torch.nn.utils.parametrize` renames parameters to `....parametrizations.weight.original`; `Plan.of` gives them the
    role of the weight, `state_dict` holds w, and `remove_parametrizations` leaves `tau w / |w|`. To load a checkpoint,
    make the model in the same way. Call `Plan.initialise_` first: it derives a parameter's values from its name.

    Cost: one norm per forward pass. For a linear layer it is an eigendecomposition of the smaller Gram matrix in
    float64, exact to 1e-7; with its backward pass, three msigns. `parametrize.cached()` shares it among passes.

    Args:
        model: written to.
        plan: of this model.
        radius: tau, in natural units, times the role's `radius_unit`: 1 for linear layers, log V for the LM head. With
            `plan.relative_to(model)` it is in units of the present norms.
        names: parameters to normalise; default all matrices and tables. Zeros (LoRA's B) stay until the first step.

    Returns:
        The same plan under the new names.

    Raises:
        ValueError: a name that the plan or the model lacks, a parameter that is already normalised, a radius that is
            not positive.

    Source: "Beyond MuP 4", initial thoughts.

    >>> import torch
    >>> from surefoot.geometry import Spectral
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> print(*normalise_(model, Plan.of(model), radius=2.0), sep=", ")
    0.bias, 0.parametrizations.weight.original, 2.bias, 2.parametrizations.weight.original
    >>> round(float(Spectral().norm(model[0].weight.detach())), 4)
    2.0
    """
    parameters = dict(model.named_parameters())
    if missing := [name for name in plan if name not in parameters]:
        raise ValueError(f"{missing[0]} is missing in the model; make the plan of this model")
    placements = {parameters[name]: plan[name] for name in plan}
    matrices = [name for name in plan if plan[name].role.weight_geometry.ndim == 2 and parameters[name].requires_grad]
    selected = {name: plan[name] for name in (matrices if names is None else names)}
    parts = {parameters[name]: _part(name, placement, radius) for name, placement in selected.items()}
    for module in list(model.modules()):
        for attribute, parameter in list(module.named_parameters(recurse=False)):
            if part := parts.get(parameter):  # a tied one in every module that owns it
                register_parametrization(module, attribute, part)
    return replace(plan, placements={name: placements[p] for name, p in model.named_parameters() if p in placements})


def _part(name: str, placement: Placement, radius: float) -> Reparametrised:
    """The parametrization of one parameter."""
    if "parametrizations" in name.split("."):
        raise ValueError(f"{name} is reparametrised already; leave it out of names")
    role = placement.role
    units = [each.radius_unit(block) for each, block in zip(placement.roles, placement.blocks, strict=True)]
    return Reparametrised(role.weight_geometry, role.view, tuple(radius * unit for unit in units))
