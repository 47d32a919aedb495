"""The kind of every parameter of a model: by module type, class, wiring and shape; by names where these are silent.

Names of attributes decide which layers give queries and keys (`discovery.heads`), what is the gain of a norm of another
library, and the layout of stacked experts. Wherever they do, the reason in the plan says so.

The LM head is what `get_output_embeddings()` returns, else the Linear that shares its weight with an embedding, else
the only Linear(d, V) beside an Embedding(V, d), else what the user names; a model whose `get_output_embeddings()`
returns None has none.

A matrix `W (V, d)` that is both embedding and head ("tied") has one norm, and its two roles want different ones: an
embedding's rows `x = W_i` have RMS 1, a head's logits `<W_i, x>` are Theta(1) where its rows have RMS `1/d`. Under the
head's rule inputs have RMS `1/d`, which the first norm layer undoes, and what is added to them (positions, token types)
follows; a model whose logits are `<W_i, x> / d` has rows of RMS 1 in both. Hence the choices of `Plan.of(tied=...)`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from surefoot.discovery.added_tables import added_kinds
from surefoot.discovery.heads import found_heads
from surefoot.discovery.known_classes import descendant_kinds, kinds_by_class, layouts_of
from surefoot.discovery.normalised import own_parameters, path_of
from surefoot.discovery.overrides import Change
from surefoot.discovery.remedies import made_by_hooks, remedy
from surefoot.discovery.residual import residual_kinds
from surefoot.discovery.torch_layers import Heads, Kind, kind_by_shape, kinds_by_type, linear
from surefoot.views import Matrix, View


def find_kinds(
    model: nn.Module,
    head: str | Sequence[str] | None = None,
    changes: Mapping[str, tuple[Change, str]] | None = None,
    tied: str | None = None,
    frozen: bool = False,
) -> dict[str, Kind | None]:
    """Kind of every trainable parameter, or of every one that could be trained.

    Args:
        model: any module, on any device.
        head: names of the modules that are LM heads; `()` for none; None infers the head from the wiring.
        changes: parameter name -> an override's change and its reason; a change that is a name is the kind, a Role
            stands for itself: no rule follows. Any change resolves conflicting kinds.
        tied: kind of a matrix that is embedding and head: "head", "embedding", "error" or None, see `Plan.of`.
        frozen: whether frozen parameters count as trainable.

    Returns:
        Name -> kind in the order of `model.named_parameters()`; None where no rule applies.

    Raises:
        ValueError: two kinds for one parameter and no override, two parameters over one memory, an unclear head.

    >>> {name: kind.name for name, kind in find_kinds(nn.LayerNorm(4)).items()}
    {'weight': 'gain', 'bias': 'bias'}
    """
    if tied not in (None, "head", "embedding", "error"):
        raise ValueError(f"tied={tied!r}: choose 'head', 'embedding' or 'error'")
    heads, wiring, changes = _find_heads(model, head), _Wiring(), changes or {}
    uses: dict[int, list[tuple[str, Kind | None]]] = defaultdict(list)
    for path, module in model.named_modules():
        wiring.register(module)
        kinds = wiring.kinds_of(module) | dict.fromkeys(made_by_hooks(module))
        for name, parameter in own_parameters(module).items():
            kind = kinds[name] if name in kinds else kind_by_shape(module, parameter)
            if name == "weight" and module in heads:
                kind = Kind("head", heads[module])
            uses[id(parameter)].append((f"{path}.{path_of(module, name)}".removeprefix("."), kind))
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad or (frozen and p.is_floating_point())}
    changes = {name: change for name, change in changes.items() if name in trainable}
    _refuse_overlaps(trainable)
    settled = {name for name, (change, _) in changes.items() if not callable(change)}
    policies = {name: None if name in settled else tied for name in trainable}
    alone = {n: _resolve_uses(model, uses[id(p)], n in changes, policies[n]) for n, p in trainable.items()}
    found = alone | {name: _overridden(alone[name], *override) for name, override in changes.items()}
    heads_of = {name: p for name, p in trainable.items() if (kind := found[name]) and kind.name == "head"}
    tables = {n: p for n, p in heads_of.items() if {"embedding", "head"} <= {k.name for _, k in uses[id(p)] if k}}
    wired = {name: found[name] if name not in settled else kind or found[name] for name, kind in alone.items()}
    follows = added_kinds(model, tables, wired) | residual_kinds(model, wired)  # an override moves no other parameter
    return found | {name: kind for name, kind in follows.items() if name not in settled}


def frozen_kinds(
    model: nn.Module, head: str | Sequence[str] | None, changes: Mapping[str, tuple[Change, str]], tied: str | None
) -> dict[str, Kind | None]:
    """Kind that each frozen parameter has once all are trained, arguments as of `find_kinds`; none where that fails."""
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad and p.is_floating_point()]
    try:
        kinds = find_kinds(model, head, changes, tied, frozen=True) if frozen else {}
    except ValueError:  # of a parameter that need never be trained; the optimizer names it if it is
        return {}
    return {name: kinds[name] for name in frozen}


def _overridden(kind: Kind | None, change: Change, why: str) -> Kind | None:
    """The kind of a parameter with an override: its name, or none of the rules' for a Role; else the one found."""
    if not callable(change):
        return Kind(change if isinstance(change, str) else "given", why)
    return kind and replace(kind, why=f"{why}, a function of what was found: {kind.why}")


def describe_unplaced(model: nn.Module, names: list[str]) -> str:
    """The error text for parameters without a role: their names and shapes, and the remedy for the first."""
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
    shapes = {name: tuple(model.get_parameter(name).shape) for name in names}
    each = ", ".join(f"{name} {shapes[name]} of {type(owner).__name__}" for name, owner in owners.items())
    return f"cannot place {each}: {remedy(owners[names[0]], names[0], model.get_parameter(names[0]))}"


class _Wiring:
    """Kinds and layouts that a module determines for its descendants; owners are registered before their children."""

    def __init__(self) -> None:
        self._layouts: dict[nn.Module, tuple[View | None, str]] = {}
        self._assigned: dict[nn.Module, dict[str, Kind]] = defaultdict(dict)
        self._heads: dict[nn.Module, tuple[int | None, str]] = {}

    def register(self, owner: nn.Module) -> None:
        """Record the kinds and layouts that a module determines for its descendants."""
        for attribute, view in layouts_of(owner).items():
            child = getattr(owner, attribute, None)
            if isinstance(child, nn.Module):
                self._layouts[child] = view, f"by the class {type(owner).__name__} and the name `{attribute}`"
        for path, kind in descendant_kinds(owner):
            child_name, _, name = path.rpartition(".")
            module = getattr(owner, child_name, None) if child_name else owner
            if isinstance(module, nn.Module):
                why = f"{kind.why}, by the class {type(owner).__name__} and the name `{path}`"
                self._assigned[module][name] = replace(kind, why=why)
        for module, kind in _routers(owner):
            self._assigned[module]["weight"] = kind
        self._heads |= found_heads(owner)

    def kinds_of(self, module: nn.Module) -> dict[str, Kind | None]:
        """Parameter name -> kind for one module; a parameter that is absent is to be judged by its shape."""
        layout, how = self._layouts.get(module, (None, ""))
        if module in self._layouts and layout is None:
            return {"weight": None, "bias": None}
        if isinstance(module, nn.Linear) and layout:
            kinds = linear(module, layout)
        else:
            kinds = kinds_by_class(module, layout) or kinds_by_type(module)
        if layout:
            kinds = {name: replace(kind, why=f"{kind.why}, {how}") for name, kind in kinds.items()}
        if "weight" in self._assigned[module] and "bias" not in kinds:
            kinds = {**kinds, "bias": Kind("bias", f"bias of {type(module).__name__}")}
        found: dict[str, Kind | None] = {**kinds, **self._assigned[module]}
        kind, weight = found.get("weight"), own_parameters(module).get("weight")
        if kind and kind.name == "linear" and weight is not None and module in self._heads:
            size, how = self._heads[module]
            heads = size and _heads(kind, weight, size)
            how += f", whose rows are no whole number of heads of {size}" if size and not heads else ""
            known = replace(kind, heads=replace(heads, why=how)) if heads else None
            found["weight"] = known or replace(kind, why=f"{kind.why}; {how}")
        return found


def _heads(kind: Kind, weight: nn.Parameter, size: int) -> Heads | None:
    """The heads of a weight, if the rows of every projection in it are a whole number of them."""
    try:
        blocks = (kind.view or Matrix()).blocks(tuple(weight.shape))
    except ValueError:  # the view does not fit: said where the role is placed
        return None
    _, rows, width = blocks[-1]
    several = sum(block[0] * block[-2] for block in blocks) > rows + size  # heads before the values
    whole = all(block[-2] % size == 0 for block in blocks)
    return Heads(size, apart=several and (rows == size or rows != width)) if whole else None


def _routers(owner: nn.Module) -> Iterator[tuple[nn.Module, Kind]]:
    """Sibling modules of a stack of E experts whose weight is a matrix `(E, d)`, with the kind of that weight."""
    children = [module for module in owner.children() if own_parameters(module)]
    counts = {_expert_count(module) for module in children} - {0}
    for module in children if counts else ():
        other_kind = not isinstance(module, nn.Linear) and kinds_by_type(module)
        weight = None if other_kind else own_parameters(module).get("weight")
        if weight is not None and weight.ndim == 2 and weight.shape[0] in counts:
            yield module, Kind("router", f"router {type(module).__name__} beside {weight.shape[0]} experts")


def _expert_count(module: nn.Module) -> int:
    """Number of experts whose matrices a module stacks; 0 if it stacks none."""
    kinds = kinds_by_class(module) or kinds_by_type(module)
    own = own_parameters(module).items()
    return next((p.shape[0] for name, p in own if name in kinds and kinds[name].name == "experts"), 0)


def _resolve_uses(
    model: nn.Module, uses: list[tuple[str, Kind | None]], overridden: bool, tied: str | None
) -> Kind | None:
    """The one kind of a parameter from its uses, `(name, kind)` for every module that owns it."""
    names = ", ".join(name for name, _ in uses)
    confident: list[Kind | None] = [kind for _, kind in uses if kind and not kind.low_confidence]
    candidates = confident or [kind for _, kind in uses]
    kinds = {(kind.name, kind.view) if kind else None for kind in candidates}
    if len(kinds) == 1:
        kind = candidates[0]
        return replace(kind, why=f"{kind.why}; shared by {names}") if kind and len(uses) > 1 else kind
    if {key[0] if key else None for key in kinds} == {"embedding", "head"}:
        return _tied_kind(model, names, tied)
    if overridden:
        return None
    described = ", ".join(f"{name}: {kind.name if kind else 'unknown'}" for name, kind in uses)
    raise ValueError(f"one parameter has two roles ({described}); give it one with an override")


def _tied_kind(model: nn.Module, names: str, policy: str | None) -> Kind:
    """Kind of a matrix that is embedding and head; `Plan.of` explains the policies."""
    multiplied = getattr(model, "output_multiplier", None) is not None
    if policy == "error":
        raise ValueError(f"{names} are one matrix, tied, and tied='error'; untie them, or say tied='head'")
    if policy == "embedding" and not multiplied:
        raise ValueError(
            f"tied='embedding' for {names}: rows of RMS 1 make logits of size d, so the model must multiply them by "
            "1/d and say so in an attribute output_multiplier, which it lacks; say tied='head'"
        )
    if policy == "embedding" or (policy is None and multiplied):
        return Kind("embedding", f"tied ({names}); output_multiplier gives the head its width factor")
    return Kind("head", f"tied ({names}); the head's rule, since its outputs are the logits")


def _refuse_overlaps(parameters: dict[str, nn.Parameter]) -> None:
    """Raise ValueError if two parameters start at the same address."""
    owners: dict[int, str] = {}
    for name, parameter in parameters.items():
        address = 0 if isinstance(parameter, nn.UninitializedParameter) else parameter.data_ptr()
        if address == 0:  # on the meta device, empty, or a subclass around another tensor, as DTensor
            continue
        other = owners.setdefault(address, name)
        if other != name:
            raise ValueError(
                f"{other} and {name} are two parameters over one memory; tie them by assigning one to both"
            )


def _require_weight(source: str, module: nn.Module) -> None:
    """Raise ValueError if the module that `source` gives as the head has no weight of its own."""
    if "weight" not in own_parameters(module):
        raise ValueError(
            f"{source} is a {type(module).__name__} without a weight of its own; name the layer inside it with "
            "head='path.to.layer'"
        )


def _find_heads(model: nn.Module, head: str | Sequence[str] | None) -> dict[nn.Module, str]:
    """LM heads of a model: module -> reason. Raises ValueError if the wiring leaves the head ambiguous."""
    modules = dict(model.named_modules())
    if head is not None:
        names = (head,) if isinstance(head, str) else tuple(head)
        if unknown := [name for name in names if name not in modules]:
            raise ValueError(f"head={unknown[0]!r} names no module of the model")
        for name in names:
            _require_weight(f"head={name!r}", modules[name])
        return {modules[name]: "LM head, as given" for name in names}
    declared = getattr(model, "get_output_embeddings", None)
    if declared and (module := declared()) is not None:
        _require_weight("get_output_embeddings()", module)
        return {module: "LM head, by get_output_embeddings()"}
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
