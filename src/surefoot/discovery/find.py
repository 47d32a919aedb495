"""Finding every parameter's kind: by module type, by how the model is wired, never by a parameter's name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace

from torch import nn

from surefoot.discovery.known_classes import by_class, kinds_below, layouts_of
from surefoot.discovery.torch_layers import Kind, by_shape, by_type, linear
from surefoot.views import View


def find_kinds(
    model: nn.Module,
    head: str | Sequence[str] | None = None,
    settled: Container[str] = (),
    tied: str | None = None,
) -> dict[str, Kind | None]:
    """Every trainable parameter's kind, by name, in the model's order; None where none can be told.

    Args:
        model: any module.
        head: names of the modules that are LM heads; `()` says there is none; None finds it by the wiring.
        settled: names that an override decides, whatever is found.
        tied: the kind of a matrix that is embedding and head, see `Plan.of`.

    Raises:
        ValueError: a parameter with two kinds, two parameters at one address, an ambiguous or missing head.
    """
    if tied not in (None, "head", "embedding", "error"):
        raise ValueError(f"tied={tied!r}: choose 'head', 'embedding' or 'error'")
    heads, wiring = _find_heads(model, head), _Wiring()
    uses: dict[int, list[tuple[str, Kind | None]]] = defaultdict(list)
    for path, module in model.named_modules():
        wiring.visit(module)
        table = wiring.table(module)
        for name, parameter in module.named_parameters(recurse=False):
            kind = table[name] if name in table else by_shape(module, parameter)
            if name == "weight" and module in heads:
                kind = Kind("head", heads[module])
            uses[id(parameter)].append((f"{path}.{name}" if path else name, kind))
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    _refuse_overlaps(trainable)
    return {name: _one_kind(model, uses[id(p)], name in settled, tied) for name, p in trainable.items()}


class _Wiring:
    """What the modules above tell of those below; `named_modules` gives owners first."""

    def __init__(self) -> None:
        self.layouts: dict[nn.Module, View | None] = {}
        self.told: dict[nn.Module, dict[str, Kind]] = defaultdict(dict)

    def visit(self, owner: nn.Module) -> None:
        """Note what an owner tells."""
        for attribute, view in layouts_of(owner).items():
            child = getattr(owner, attribute, None)
            if isinstance(child, nn.Module):
                self.layouts[child] = view
        for path, kind in kinds_below(owner):
            below, _, name = path.rpartition(".")
            module = getattr(owner, below, None) if below else owner
            if isinstance(module, nn.Module):
                self.told[module][name] = kind
        for module, kind in _routers(owner):
            self.told[module]["weight"] = kind

    def table(self, module: nn.Module) -> dict[str, Kind | None]:
        """Parameter name -> kind; what is not listed goes by its shape."""
        layout = self.layouts.get(module)
        if module in self.layouts and layout is None:
            return {"weight": None, "bias": None}
        if isinstance(module, nn.Linear) and layout:
            found = linear(module, layout)
        else:
            found = by_class(module, layout) or by_type(module)
        if "weight" in self.told[module] and "bias" not in found:
            found = {**found, "bias": Kind("bias", f"bias of {type(module).__name__}")}
        return {**found, **self.told[module]}


def _routers(owner: nn.Module) -> Iterator[tuple[nn.Module, Kind]]:
    """Matrices `(E, d)` that stand beside a stack of E experts."""
    children = [module for module in owner.children() if next(module.parameters(recurse=False), None) is not None]
    stacks = {module: _experts_in(module) for module in children}
    counts = {count for count in stacks.values() if count}
    for module in children if counts else ():
        weight = module._parameters.get("weight") if isinstance(module, nn.Linear) or not by_type(module) else None
        if weight is not None and weight.ndim == 2 and weight.shape[0] in counts:
            yield module, Kind("router", f"router {type(module).__name__} beside {weight.shape[0]} experts")


def _experts_in(module: nn.Module) -> int:
    """How many experts a module stacks."""
    table = by_class(module) or by_type(module)
    own = module.named_parameters(recurse=False)
    return next((p.shape[0] for name, p in own if name in table and table[name].name == "experts"), 0)


def _one_kind(model: nn.Module, uses: list[tuple[str, Kind | None]], settled: bool, tied: str | None) -> Kind | None:
    names = ", ".join(name for name, _ in uses)
    known_uses = [(name, kind) for name, kind in uses if kind and not kind.weak] or uses
    kinds = {(kind.name, kind.view) if kind else None: kind for _, kind in known_uses}
    if len(kinds) == 1:
        kind = known_uses[0][1]
        return replace(kind, why=f"{kind.why}; shared by {names}") if kind and len(uses) > 1 else kind
    if {key[0] if key else None for key in kinds} == {"embedding", "head"}:
        return _tied_kind(model, names, None if settled else tied)
    if settled:
        return None
    found = ", ".join(f"{name}: {kind.name if kind else 'unknown'}" for name, kind in uses)
    raise ValueError(f"one parameter has two roles ({found}); give it one with an override")


def _tied_kind(model: nn.Module, names: str, policy: str | None) -> Kind:
    """The kind of a matrix that is embedding and head; `Plan.of` says why each."""
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
    if not isinstance(getattr(module, "weight", None), nn.Parameter):
        raise ValueError(
            f"{source} is a {type(module).__name__} without a weight of its own; name the layer inside it with "
            "head='path.to.layer'"
        )


def _find_heads(model: nn.Module, head: str | Sequence[str] | None) -> dict[nn.Module, str]:
    """The LM heads and the reason for each."""
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
    weights = {id(table.weight) for table in tables}
    tied: dict[nn.Module, str] = {m: "LM head, tied" for m in linears.values() if id(m.weight) in weights}
    if tied or declared or not tables or not linears:
        return tied
    shapes = {(t.num_embeddings, t.embedding_dim) for t in tables}
    found = [name for name, m in linears.items() if (m.out_features, m.in_features) in shapes]
    if len(found) == 1:
        return {modules[found[0]]: "LM head: Linear(d, V) beside Embedding(V, d)"}
    problem = f"{', '.join(found)} could each be" if found else "no Linear(d, V) beside the Embedding(V, d) is"
    raise ValueError(
        f"{problem} the LM head; name it with head='path.to.module', or head=() if this is no language model "
        "(on the command line --head), or give the model a get_output_embeddings() that returns it"
    )
