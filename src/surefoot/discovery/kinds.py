"""`Kind`, what a parameter is; `Search`, a model whose parameters are to be placed.

A weight that is reparametrised as `tau w / |w|`, by `normalise_` or by torch's weight norm, counts as its layer's own:
w has the kind that the weight would have. Weight norm's tau are parameters, a gain.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.nn.utils.weight_norm import WeightNorm

from surefoot.geometry import Spectral, TransposedConvSpectral
from surefoot.identity import plain_name
from surefoot.initialise import AsBuilt, Initial, LinearNormal, Scaled
from surefoot.roles import Role
from surefoot.scaling import Times
from surefoot.stabilise.decay import DecoupledWeightDecay
from surefoot.stabilise.reparametrise import Reparametrised
from surefoot.views import Shape, View

Change = str | Role | Callable[[Role], Role]

_LIBRARIES = ("transformers", "torchtitan")

UNSPLIT = "one norm for all heads"
"""Part of the reason for an attention matrix whose heads are not known."""

UNCLEAR = "but not clear which rows"
NO_VIEW = "but in an order that no view has"
"""The same where a forward pass does not show its heads, and where it does; in the second case names do not decide."""


@dataclass(frozen=True)
class Heads:
    """The heads of a matrix that gives an attention layer's queries, keys or values.

    Args:
        dim: rows of a head; 0 if unknown, or for values.
        parts: projections fused in the matrix, in order; the last of several is no query or key, and is left whole.
        why: how it is known.

    >>> Heads(64).dim
    64
    """

    dim: int
    parts: tuple[str, ...] = ()
    why: str = "queries and keys by type"

    def __str__(self) -> str:
        """The reason as a plan's table gives it."""
        whole = ", values one for all" if len(self.parts) > 1 and self.parts[-1] not in ("query", "key") else ""
        return f"{self.why}: heads of {self.dim} rows, a norm each{whole}"


class Stream(NamedTuple):
    """A residual stream: the number of branches that add up in it, and its width."""

    branches: int
    width: int


@dataclass(frozen=True)
class Kind:
    """What a parameter is, from which a recipe derives its role.

    Args:
        name: key of a recipe's role table, or of `roles.DERIVED`.
        why: reason, for the plan's table.
        view: layout; None takes the role's default.
        initial: initial values, or a function of the role's; None takes the role's default.
        stride: number of disjoint sets of columns of a transposed convolution, see `TransposedConvSpectral`.
        units: changes, applied in turn, to the units of the role's learning rate, initial values and radii.
        heads: those of a matrix that gives queries or keys of attention or, by a forward pass, values; else None.
        stream: the residual stream that the parameter writes into; else None.
        override: the user's change of the parameter's role, and its reason; None without one.

    >>> Kind("bias", "bias of Linear").name
    'bias'
    """

    name: str
    why: str
    view: View | None = None
    initial: Initial | Callable[[Initial], Initial] | None = None
    stride: int = 1
    units: tuple[Callable[[Role], Role], ...] = ()
    heads: Heads | None = None
    stream: Stream | None = None
    override: tuple[Change, str] | None = None

    @property
    def branches(self) -> int | None:
        """The number of branches that add up in the stream that the parameter writes into; else None."""
        return self.stream.branches if self.stream else None

    def adapt(self, role: Role) -> Role:
        """Adapt a recipe's role to this parameter: its layout, its initial values, its units and its stride.

        Args:
            role: the recipe's role of this kind.

        Returns:
            The role with this kind's view, initial values, units and stride in place of its defaults.

        Raises:
            ValueError: a stride above 1 and a role whose geometry is not spectral.
        """
        initial, stride = self.initial or role.initial, self.stride
        initial = initial if isinstance(initial, Initial) else initial(role.initial)
        role, geometry = replace(role, view=self.view or role.view, initial=initial), role.geometry
        for change in self.units:
            role = change(role)
        if stride == 1:
            return role
        if type(geometry) is not Spectral:
            what = f"the fan-in of a transposed convolution of stride {stride}"
            given = f"TransposedConvSpectral(stride={stride}), view=views.{role.view!r}, initial=LinearNormal({stride})"
            remedy = f"a recipe such as steady or muon, or override it with Role({role.name!r}, {given})"
            raise ValueError(f"only Spectral() knows {what}, not {geometry}: take {remedy}")
        return replace(role, geometry=TransposedConvSpectral(geometry.method, stride), initial=LinearNormal(stride))


def scaled(initial: Initial, factor: float) -> Initial:
    """Initial values times a factor; a model's own stay as they are."""
    return initial if isinstance(initial, AsBuilt) else Scaled(initial, factor)


def times(role: Role, factor: float) -> Role:
    """Multiply a role's learning rate, initial values and radii by factor; decay takes the same part of a weight."""
    initial = scaled(role.initial, factor)
    scale, unit, decay = Times(factor, role.lr_scale), Times(factor, role.radius_unit), role.stabiliser
    if isinstance(decay, DecoupledWeightDecay):
        decay = replace(decay, lr_scale=Times(factor, decay.lr_scale))
    return replace(role, lr_scale=scale, initial=initial, radius_unit=unit, stabiliser=decay)


class Guess(Kind):
    """The kind of a parameter by its shape alone; any other rule overrides it."""


class Tied(Kind):
    """The kind of a matrix that is both embedding and head."""


Kinds = dict[str, Kind | None]
"""Parameter name -> kind; None where no rule applies."""


@dataclass(frozen=True)
class Search:
    """A model whose parameters are to be placed, and what the user says of them.

    Args:
        model: any module.
        own: module -> attribute -> name and parameter, for the parameters that the module owns: one that several
            modules own has several names.
        parameters: the first name of each parameter to be placed -> the parameter.
        head: names of the modules that are LM heads; `()` for none; None infers the head from the wiring.
        changes: parameter name -> an override's change and its reason.
        tied: kind of a matrix that is embedding and head: "head", "embedding", "error" or None, see `Plan.of`.
        inputs: what the model is called with, or None.
    """

    model: nn.Module
    own: Mapping[nn.Module, Mapping[str, tuple[str, nn.Parameter]]]
    parameters: Mapping[str, nn.Parameter]
    head: str | Sequence[str] | None
    changes: Mapping[str, tuple[Change, str]]
    tied: str | None
    inputs: Any = None

    def name(self, module: object, attribute: str) -> str | None:
        """The name of a parameter that a module owns; None if it owns none, or is no module of the model."""
        return self.own.get(module, {}).get(attribute, (None,))[0]  # type: ignore[call-overload, no-any-return]

    def said(self, name: str) -> str | None:
        """The name of the kind that an override gives a parameter, "given" for a Role; None where it gives none."""
        change, _ = self.changes.get(name, (None, ""))
        return None if change is None or callable(change) else change if isinstance(change, str) else "given"


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """A module's children, without the wrappers of `torch.compile`, activation checkpointing and FSDP.

    >>> block = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> children_of(nn.ModuleDict({"0": nn.ModuleDict({"_orig_mod": block})}))["0"] is block
    True
    """
    return {name: unwrapped(child) for name, child in module.named_children()}


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of wrappers as in `children_of`, and of DDP."""
    inner = dict(module.named_children())
    name = next(iter(inner)) if len(inner) == 1 and not module._parameters else ""
    return unwrapped(inner[name]) if name and not plain_name(f"{name}.") else module


def blocks_of(view: View, x: Tensor) -> tuple[Shape, ...]:
    """The shapes of a tensor's blocks; empty where the view does not fit, which placing the role reports."""
    try:
        return view.blocks(tuple(x.shape))
    except ValueError:
        return ()


def class_names(module: nn.Module) -> list[str]:
    """Names of a module's class and its bases, in method resolution order, if transformers or torchtitan define them.

    Args:
        module: any module.

    Returns:
        `Conv1D`, `pytorch_utils.Conv1D`, `transformers.pytorch_utils.Conv1D` for one class, the longest first.
    """
    names = [f"{cls.__module__}.{cls.__qualname__}".split(".") for cls in type(module).__mro__]
    return [".".join(name[i:]) for name in names if name[0] in _LIBRARIES for i in range(len(name))]


def is_linear(layer: object) -> bool:
    """True for a linear layer, including Hugging Face's `Conv1D`, whose weight is stored `(in, out)`."""
    conv1d = isinstance(layer, nn.Module) and "transformers.pytorch_utils.Conv1D" in class_names(layer)
    return conv1d or isinstance(layer, nn.Linear)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """A module's own parameters by attribute; for a normalised weight, the w that it is made of.

    Args:
        module: any module.

    Returns:
        Attribute -> parameter, normalised ones last. The lengths that weight norm gives "weight" are "weight_g".

    >>> list(own_parameters(nn.Linear(2, 2)))
    ['weight', 'bias']
    """
    return {attribute: module.get_parameter(path) for attribute, path in _own_paths(module).items()}


def named_own(model: nn.Module) -> dict[nn.Module, dict[str, tuple[str, nn.Parameter]]]:
    """Each module's own parameters and their names, see `Search.own`."""
    return {
        module: {
            attribute: (f"{path}.{inner}".removeprefix("."), module.get_parameter(inner))
            for attribute, inner in _own_paths(module).items()
        }
        for path, module in model.named_modules()
    }


def _own_paths(module: nn.Module) -> dict[str, str]:
    """The attributes of `own_parameters` -> the paths below the module where these parameters are."""
    if is_normalised(module):
        return {}
    found = {name: name for name, _ in module.named_parameters(recurse=False)}
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            found[hook.name] = found.pop(f"{hook.name}_v")
    for name, part in module.get_submodule("parametrizations").named_children() if is_parametrized(module) else ():
        if is_normalised(part):
            path, two = f"parametrizations.{name}.original", "original1" in part._parameters
            found |= {name: f"{path}1", f"{name}_g": f"{path}0"} if two else {name: path}
    return found


def is_normalised(module: nn.Module) -> bool:
    """True for the child of a layer that torch makes for a weight `tau w / |w|`: by `normalise_`, or by weight norm."""
    known = Reparametrised, _WeightNorm
    return isinstance(module, ParametrizationList) and all(isinstance(part, known) for part in module)
