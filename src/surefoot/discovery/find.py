"""The kind of every parameter of a model: by module type, class, wiring and shape; by names where these are silent.

Discovery is a series of passes, each from kinds to kinds. Those `OF_MODULES` look at every module once: what a class of
another library says of it, its type or its shape, what stands beside it, whether it gives queries and keys. Those
`OF_PARAMETERS` follow for the parameters that are to be placed together: uses of one parameter that are tied, what is
added to a tied table, what writes into a residual stream, and the user's overrides.

Names of attributes decide which layers give queries and keys (`discovery.heads`), what is the gain of a norm of another
library, and the layout of stacked experts. Wherever they do, the reason in the plan says so.

The LM head is what `get_output_embeddings()` returns, else the Linear that shares its weight with an embedding, else
the only Linear(d, V) beside an Embedding(V, d), else what the user names; a model whose `get_output_embeddings()`
returns None has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from surefoot.discovery.heads import heads
from surefoot.discovery.kinds import Change, Kind, Kinds, Search, named_own, own_parameters
from surefoot.discovery.known_classes import kinds_by_class
from surefoot.discovery.overrides import overrides
from surefoot.discovery.residual import residual
from surefoot.discovery.tied import added, tied
from surefoot.discovery.torch_layers import kind_by_shape, kinds_by_type


def find_kinds(
    model: nn.Module,
    head: str | Sequence[str] | None = None,
    changes: Mapping[str, tuple[Change, str]] | None = None,
    tied: str | None = None,
) -> Kinds:
    """Kind of every parameter of a model; a frozen one has the kind that it has once all are trained, if any.

    Args:
        model: any module, on any device.
        head: names of the modules that are LM heads; `()` for none; None infers the head from the wiring.
        changes: parameter name -> an override's change and its reason; a change that is a name is the kind, a Role
            stands for itself: no rule follows. Any change resolves conflicting kinds.
        tied: kind of a matrix that is embedding and head: "head", "embedding", "error" or None, see `Plan.of`.

    Returns:
        Name -> kind in the order of `model.named_parameters()`; None where no rule applies.

    Raises:
        ValueError: two kinds for one trainable parameter and no override, two over one memory, an unclear head.

    >>> {name: kind.name for name, kind in find_kinds(nn.LayerNorm(4)).items()}
    {'weight': 'gain', 'bias': 'bias'}
    """
    if tied not in (None, "head", "embedding", "error"):
        raise ValueError(f"tied={tied!r}: choose 'head', 'embedding' or 'error'")
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad or p.is_floating_point()}
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    search = Search(model, named_own(model), trainable, head, changes or {}, tied)
    uses = _run(OF_MODULES, search, {})
    kinds = _run(OF_PARAMETERS, search, uses)
    if len(parameters) == len(trainable):
        return kinds
    try:
        return _run(OF_PARAMETERS, replace(search, parameters=parameters), uses) | kinds
    except ValueError:  # of a parameter that need never be trained; the optimizer names it if it is
        return kinds


def by_class(search: Search, kinds: Kinds) -> Kinds:
    """What the class of a module, or of the module that owns it, says; nothing of what hooks make weights of."""
    kinds = dict(kinds)
    for module, own in search.own.items():
        kinds |= {own[attribute][0]: None for attribute in made_by_hooks(module) if attribute in own}
    for owner in search.own:
        for path, kind in kinds_by_class(owner).items():
            child, _, attribute = path.rpartition(".")
            if name := search.name(getattr(owner, child, None) if child else owner, attribute):
                kinds.setdefault(name, kind)
    return kinds


def by_type(search: Search, kinds: Kinds) -> Kinds:
    """What the type or the structure of a module says of the other parameters, and then their shape."""
    kinds = dict(kinds)
    for module, own in search.own.items():
        found = kinds_by_type(module) if own else {}
        if "bias" not in found and kinds.get(search.name(module, "weight") or ""):
            found["bias"] = Kind("bias", f"bias of {type(module).__name__}")
        for attribute, (name, parameter) in own.items():
            if name not in kinds:
                kinds[name] = found.get(attribute) or kind_by_shape(module, parameter)
    return kinds


def wiring(search: Search, kinds: Kinds) -> Kinds:
    """What stands beside or behind other modules: routers beside a stack of as many experts, LM heads."""
    found = dict(kinds)
    for owner in search.own:
        children = [search.own[child] for child in owner.children() if search.own[child]]
        stacks = [p for own in children for name, p in own.values() if (k := kinds[name]) and k.name == "experts"]
        for module in owner.children() if stacks else ():
            name, weight = search.own[module].get("weight", ("", None))
            free = isinstance(module, nn.Linear) or not kinds.get(name)
            if weight is not None and free and weight.ndim == 2 and weight.shape[0] in {p.shape[0] for p in stacks}:
                why = f"router {type(module).__name__} beside {weight.shape[0]} experts"
                found[name] = Kind("router", why)
                if (bias := search.name(module, "bias")) and not isinstance(module, nn.Linear):
                    found[bias] = Kind("bias", f"bias of {type(module).__name__}")
    for module, why in _lm_heads(search.model, search.head).items():
        if table := search.name(module, "weight"):
            found[table] = Kind("head", why)
    return found


Pass = Callable[[Search, Kinds], Kinds]
OF_MODULES: tuple[Pass, ...] = (by_class, by_type, wiring, heads)
OF_PARAMETERS: tuple[Pass, ...] = (tied, added, residual, overrides)


def _run(passes: Sequence[Pass], search: Search, kinds: Kinds) -> Kinds:
    for each in passes:
        kinds = each(search, kinds)
    return kinds


def describe_unplaced(model: nn.Module, names: list[str]) -> str:
    """The error text for parameters without a role: their names and shapes, and the remedy for the first."""
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
    shapes = {name: tuple(model.get_parameter(name).shape) for name in names}
    each = ", ".join(f"{name} {shapes[name]} of {type(owner).__name__}" for name, owner in owners.items())
    return f"cannot place {each}: {remedy(owners[names[0]], names[0], model.get_parameter(names[0]))}"


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


def _lm_heads(model: nn.Module, head: str | Sequence[str] | None) -> dict[nn.Module, str]:
    """LM heads of a model: module -> reason. Raises ValueError if the wiring leaves the head ambiguous."""
    modules, given = dict(model.named_modules()), dict[str, nn.Module]()
    declared = getattr(model, "get_output_embeddings", None)
    if head is not None:
        names, why = (head,) if isinstance(head, str) else tuple(head), "LM head, as given"
        if unknown := [name for name in names if name not in modules]:
            raise ValueError(f"head={unknown[0]!r} names no module of the model")
        given = {f"head={name!r}": modules[name] for name in names}
    elif declared and (module := declared()) is not None:
        given, why = {"get_output_embeddings()": module}, "LM head, by get_output_embeddings()"
    if without := [source for source, module in given.items() if "weight" not in own_parameters(module)]:
        raise ValueError(
            f"{without[0]} is a {type(given[without[0]]).__name__} without a weight of its own; name the layer inside "
            "it with head='path.to.layer'"
        )
    if given or head is not None:
        return dict.fromkeys(given.values(), why)
    linears = {name: m for name, m in modules.items() if isinstance(m, nn.Linear)}
    tables = [m for m in modules.values() if isinstance(m, nn.Embedding)]
    weights = {id(own_parameters(table).get("weight")) for table in tables} - {id(None)}
    tied: dict[nn.Module, str] = {
        m: "LM head, tied" for m in linears.values() if id(own_parameters(m).get("weight")) in weights
    }
    if tied or declared or not tables or not linears:
        return tied
    shapes = {(t.num_embeddings, t.embedding_dim) for t in tables}
    candidates = [name for name, m in linears.items() if (m.out_features, m.in_features) in shapes]
    if len(candidates) == 1:
        return {modules[candidates[0]]: "LM head: Linear(d, V) beside Embedding(V, d)"}
    problem = (
        f"{', '.join(candidates)} could each be" if candidates else "no Linear(d, V) beside the Embedding(V, d) is"
    )
    raise ValueError(
        f"{problem} the LM head; name it with head='path.to.module', or head=() if this is no language model "
        "(on the command line --head), or give the model a get_output_embeddings() that returns it"
    )
