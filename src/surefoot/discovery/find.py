"""The kind of every parameter of a model: by module type, class, wiring and shape; by names where these are silent.

Discovery is a series of passes, each from kinds to kinds. `OF_MODULES` look at every module once: its class if it is
another library's, its type or shape, its neighbours, whether it gives queries and keys. `OF_PARAMETERS` then look at
all parameters to be placed together: which are tied, added to a tied table, or write into a residual stream, and the
user's overrides.

With inputs, a forward pass shows which weights feed attention (`discovery.feeding`). Without, names of attributes
decide which layers give queries and keys (`discovery.heads`). Names also decide which parameter is the gain of another
library's norm, and the layout of stacked experts. Wherever names decide, the reason in the plan says so.

The LM head is what `get_output_embeddings()` returns, else the Linear that shares its weight with an embedding, else
the only Linear(d, V) beside an Embedding(V, d) whose outputs no Linear in the same module takes, else what the user
names; a model whose `get_output_embeddings()` returns None has none. A head that is itself a table is tied,
unless another table of its shape serves the inputs. In a model without tables or that method, a module named `head`,
`mlp_head` or `classifier` is a head if it ends with a Linear behind a norm: the rule is for features of RMS 1.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm

from surefoot.discovery.heads import heads
from surefoot.discovery.kinds import Change, Kind, Kinds, Search, children_of, is_normalised, named_own, own_parameters
from surefoot.discovery.known_classes import kinds_by_class
from surefoot.discovery.multiplied import lengths, multiplied
from surefoot.discovery.overrides import overrides
from surefoot.discovery.residual import residual
from surefoot.discovery.routers import routers
from surefoot.discovery.tied import added, last_gain, small_rows, tied, tied_kind
from surefoot.discovery.torch_layers import kind_by_shape, kinds_by_type
from surefoot.identity import by_plain_name, plain_name


def find_kinds(
    model: nn.Module,
    head: str | Sequence[str] | None = None,
    changes: Mapping[str, tuple[Change, str]] | None = None,
    tied: str | None = None,
    inputs: Any = None,
) -> Kinds:
    """Find the kind of every parameter; a frozen one gets the kind that it has once all are trained, if any.

    Args:
        model: any module, on any device.
        head: names of the modules that are LM heads; `()` for none; None infers the head from the wiring.
        changes: parameter name -> an override's change and its reason; a name is taken as the kind, a Role as it is,
            and no rule follows. Any change resolves conflicting kinds.
        tied: kind of a matrix that is embedding and head: "head", "embedding", "error" or None, see `Plan.of`.
        inputs: what the model is called with, see `Plan.of`.

    Returns:
        Name -> kind in the order of `model.named_parameters()`; None where no rule applies.

    Raises:
        ValueError: two kinds for one trainable parameter and no override, two over one memory, an unclear head, inputs
            on which the model cannot be run, a parameter of a lazy module that has no shape yet.

    >>> {name: kind.name for name, kind in find_kinds(nn.LayerNorm(4)).items()}
    {'weight': 'gain', 'bias': 'bias'}
    """
    if tied not in (None, "head", "embedding", "error"):
        raise ValueError(f"tied={tied!r}: choose 'head', 'embedding' or 'error'")
    for name, p in model.named_parameters():
        if isinstance(p, nn.UninitializedParameter):
            raise ValueError(f"{name} has no shape before the first forward pass: call the model on a batch, then plan")
    placed = {name: p for name, p in model.named_parameters() if p.requires_grad or p.is_floating_point()}
    trainable = {name: p for name, p in placed.items() if p.requires_grad}
    search = Search(model, named_own(model), trainable, head, changes or {}, tied, inputs)
    uses = _run(OF_MODULES, search, {})
    kinds = _run(OF_PARAMETERS, search, uses)
    if len(placed) > len(trainable):
        with suppress(ValueError):  # of a frozen one that need never be trained; the optimizer names it if it is
            return _run(OF_PARAMETERS, replace(search, parameters=placed), uses)
    return kinds


def by_class(search: Search, kinds: Kinds) -> Kinds:
    """Kinds by the class of a module or of its owner; None for parameters from which hooks make a weight."""
    hooked = [own[made][0] for module, own in search.own.items() for made in made_by_hooks(module) if made in own]
    found = {**kinds, **dict.fromkeys(hooked)}
    for owner in search.own:
        for path, kind in kinds_by_class(owner).items():
            child, _, attribute = path.rpartition(".")
            if name := search.name(getattr(owner, child, None) if child else owner, attribute):
                found.setdefault(name, kind)
    return found


def by_type(search: Search, kinds: Kinds) -> Kinds:
    """Kinds of the other parameters by their module's type or structure, else by their shape."""
    kinds = dict(kinds)
    for module, own in search.own.items():
        found = kinds_by_type(module) if own else {}
        if "bias" not in found and kinds.get(search.name(module, "weight") or ""):
            found["bias"] = Kind("bias", f"bias of {type(module).__name__}")
        for attribute, (name, parameter) in own.items():
            if name not in kinds:
                kinds[name] = found.get(attribute) or kind_by_shape(module, attribute, parameter)
    return kinds


def wiring(search: Search, kinds: Kinds) -> Kinds:
    """Kinds by position before or behind all other modules: LM heads, tables that are heads."""
    found, lm_heads = dict(kinds), _lm_heads(search.model, search.head, "head" in map(search.said, search.changes))
    lm_heads = lm_heads or (_called_head(search) if search.head is None else {})
    named = {table: why for module, why in lm_heads.items() if (table := search.name(module, "weight"))}
    weights = {name: weight for own in search.own.values() for name, weight in own.values()}
    tables = {name for name, kind in kinds.items() if kind and kind.name == "embedding"}
    of_inputs = {weights[name].shape for name in tables - named.keys()}
    for name, why in named.items():
        twice = name in tables and weights[name].shape not in of_inputs
        plain = Kind("head", why, known.view if (known := kinds[name]) else None)  # of a kernel, or stored (in, out)
        found[name] = tied_kind(search, name, f"{name} as table and as head") if twice else plain
    return found


_HEADS = {"head", "mlp_head", "classifier"}

Pass = Callable[[Search, Kinds], Kinds]
OF_MODULES: tuple[Pass, ...] = (by_class, by_type, routers, wiring, heads, routers, lengths)  # routers after heads, too
OF_PARAMETERS: tuple[Pass, ...] = (tied, added, residual, small_rows, last_gain, multiplied, overrides)


def _run(passes: Sequence[Pass], search: Search, kinds: Kinds) -> Kinds:
    return reduce(lambda found, each: each(search, found), passes, kinds)


def describe_unplaced(model: nn.Module, names: list[str], ran: bool) -> str:
    """The error text for parameters without a role (ran: a forward pass): their shapes, and a remedy for the first."""
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
    shapes = {name: tuple(model.get_parameter(name).shape) for name in names}
    each = ", ".join(f"{name} {shapes[name]} of {type(owner).__name__}" for name, owner in owners.items())
    name, owner = next(iter(owners.items()))
    maker, undo = made_by_hooks(owner).get(name.rpartition(".")[2], ("", ""))
    if isinstance(owner, ParametrizationList) and not is_normalised(owner):
        maker = f"a parametrization ({', '.join(type(part).__name__ for part in owner)})"
        undo = "parametrize.remove_parametrizations(layer, 'weight')"
    if maker:
        remedy = f"{maker} computes the layer's weight from it, so its norm is not the weight's. Undo it, torch."
        remedy += f"nn.utils.{undo}: a stabiliser bounds the weight itself; or give overrides=[({name!r}, 'scalar')]"
    else:
        stack = "'experts')] for a stack (E, out, in), and then 'router' for the matrix (E, d) beside it"
        kind = "'linear')] for an (out, in) matrix" if len(shapes[name]) == 2 else stack
        seen = "Plan.of(model, inputs=...) sees how a matrix is multiplied; or "
        if ran:
            seen = "The forward pass does not multiply it, multiplies it from both sides, feeds attention heads with "
            seen += "its matrices one by one, or it may be the head, 'head': "
        remedy = f"no rule knows the module. {seen}name its role, overrides=[({name!r}, {kind}, "
        remedy += "'scalar' if it acts entry by entry, 'bias' if it is added, 'positions' for a table of rows, "
        remedy += "'tied_positions' if these are added to rows of a table that is also the head; or a Role"
    return f"cannot place {each}: {remedy}; or freeze it with requires_grad_(False)"


def made_by_hooks(module: nn.Module) -> dict[str, tuple[str, str]]:
    """Parameters from which spectral norm or pruning makes the weight before each forward pass.

    Args:
        module: any module.

    Returns:
        Name of the parameter -> the function that made it, and the call that undoes it.

    >>> made_by_hooks(nn.utils.spectral_norm(nn.Linear(2, 2)))
    {'weight_orig': ('spectral_norm', "remove_spectral_norm(layer, 'weight')")}
    """
    found: dict[str, tuple[str, str]] = {}
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm):
            found[f"{hook.name}_orig"] = "spectral_norm", f"remove_spectral_norm(layer, {hook.name!r})"
        if isinstance(hook, BasePruningMethod):
            found[f"{hook._tensor_name}_orig"] = "pruning", f"prune.remove(layer, {hook._tensor_name!r})"
    return found


def _lm_heads(model: nn.Module, head: str | Sequence[str] | None, said: bool) -> dict[nn.Module, str]:
    """LM heads: module -> reason. ValueError if the wiring leaves the head ambiguous, unless an override says one."""
    modules, declaring = dict(model.named_modules()), "get_output_embeddings"
    unwrapped = [module for name, module in modules.items() if plain_name(f"{name}.") in (".", "")]
    declared = next((getattr(module, declaring) for module in unwrapped if hasattr(module, declaring)), None)
    given, why = dict[str, nn.Module | None](), "LM head, as given"
    if isinstance(head, nn.Module):
        raise ValueError(f"head must be a layer's name, or names, not the {type(head).__name__}")
    if head is not None:
        names = (head,) if isinstance(head, str) else head
        given = {f"head={name!r}": by_plain_name(modules, name) for name in names}
    elif declared and (module := declared()) is not None:
        given, why = {"get_output_embeddings()": module}, "LM head, by get_output_embeddings()"
    for source, module in given.items():
        if module is None or "weight" not in own_parameters(module):
            what = "names no module" if module is None else f"is a {type(module).__name__} without a weight of its own"
            raise ValueError(f"{source} {what}; name the layer that is the LM head, head='path.to.layer'")
    if given or head is not None:
        return {module: why for module in given.values() if module is not None}
    linears = {name: m for name, m in modules.items() if isinstance(m, nn.Linear)}
    tables = [m for m in modules.values() if isinstance(m, nn.Embedding)]
    weights = {own_parameters(table).get("weight") for table in tables} - {None}
    tied = [m for m in linears.values() if own_parameters(m).get("weight") in weights]
    if tied or declared or not tables or not _matrices_beside(model, tables):
        return dict.fromkeys(tied, "LM head, tied")
    shapes = {(t.num_embeddings, t.embedding_dim) for t in tables}
    shapes = {(words, d) for words, d in shapes if words != d} or shapes  # a square one beside others has positions
    sizes = {name: (m.out_features, m.in_features) for name, m in linears.items()}
    alike = [name for name, size in sizes.items() if size in shapes]
    candidates = [name for name in alike if not _read_beside(model, name)]
    candidates = candidates or [name for name in alike if not _read_beside(model, name, behind=True)]
    lists = tuple(f"{name}." for name, m in modules.items() if isinstance(m, nn.ModuleList))
    outside = [name for name in candidates if not name.rpartition(".")[0].startswith(lists)]  # in no block
    unlisted = {sizes[name] for name in outside if not name.startswith(lists)}
    candidates = [name for name in outside if sizes[name] in unlisted] or outside
    if len(candidates) == 1:
        return {modules[candidates[0]]: "LM head: Linear(d, V) beside Embedding(V, d)"}
    if said:
        return {}
    problem = f"{', '.join(candidates)} could each be" if candidates else "no Linear(d, V) beside Embedding(V, d) is"
    remedy = "give the model a get_output_embeddings() that returns it, or head=() if this is no language model"
    name = "name it with head='path.to.module' (surefoot audit --head)"
    raise ValueError(f"{problem} the LM head; {name}, {remedy}")


def _called_head(search: Search) -> dict[nn.Module, str]:
    """Heads by name in a model without tables: the last layer of such a module, a `Linear` behind its input's norm."""
    found: dict[nn.Module, str] = {}
    if any(hasattr(module, "get_output_embeddings") for module in search.own):
        return found
    before = dict(pairwise(reversed([module for module, own in search.own.items() if own])))
    for name, module in search.model.named_modules():
        if name.rpartition(".")[2] not in _HEADS:
            continue
        last = [each for each in module.modules() if search.own.get(each)][-1:]
        match [before.get(each) for each in last] + last:
            case [(nn.LayerNorm() | nn.RMSNorm()) as norm, nn.Linear(in_features=d) as linear]:
                if tuple(norm.normalized_shape) == (d,):
                    found[linear] = f"head by the name `{name}`, behind {type(norm).__name__}({d})"
    return found


def _matrices_beside(model: nn.Module, tables: list[nn.Embedding]) -> bool:
    """Whether a model has matrices or 1-D convolution kernels besides tables; image kernels are no sign of words."""
    rows = {p for table in tables for p in table.parameters()}
    return any(1 < p.ndim < 4 and p not in rows for p in model.parameters())


def _read_beside(model: nn.Module, name: str, behind: bool = False) -> bool:
    """Whether a sibling of a linear layer (behind: a later one) has as many inputs as it has outputs, as in an MLP.

    A head with as many words as an MLP beside it has features has no such sibling behind it.
    """
    layer, owner = model.get_submodule(name), model.get_submodule(name.rpartition(".")[0])
    siblings = list(children_of(owner).values())
    beside = [m for m in siblings[siblings.index(layer) * behind :] if isinstance(m, nn.Linear) and m is not layer]
    return any(m.in_features == layer.out_features != layer.in_features for m in beside)
