"""Finding every parameter's kind: by module type, by how the model is wired, never by a parameter's name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from torch import nn

from surefoot.views import Convolution, Fused, View


@dataclass(frozen=True)
class Kind:
    """What a parameter was found to be, its layout (None: the kind's own), and why."""

    name: str
    why: str
    view: View | None = None


def _linear(module: nn.Linear) -> dict[str, Kind]:
    shape = f"Linear({module.in_features}, {module.out_features})"
    return {"weight": Kind("linear", f"weight of {shape}"), "bias": Kind("bias", f"bias of {shape}")}


def _embedding(module: nn.Embedding | nn.EmbeddingBag) -> dict[str, Kind]:
    name = f"{type(module).__name__}({module.num_embeddings}, {module.embedding_dim})"
    return {"weight": Kind("embedding", f"table of {name}")}


def _recurrent(module: nn.RNNBase | nn.RNNCellBase) -> dict[str, Kind]:
    """Gates are stacked along dimension 0; `weight_hr` is the projection of an LSTM that has one."""
    name = type(module).__name__
    gates = 4 if isinstance(module, nn.LSTM | nn.LSTMCell) else 3 if isinstance(module, nn.GRU | nn.GRUCell) else 1
    found = {}
    for key, parameter in module.named_parameters(recurse=False):
        if key.startswith("weight_hr"):
            found[key] = Kind("linear", f"projection of {name}")
        elif parameter.ndim == 2:
            found[key] = Kind("linear", f"gates of {name}, a norm each", Fused(gates))
        else:
            found[key] = Kind("bias", f"biases of the gates of {name}", Fused(gates))
    return found


def _norm(module: nn.Module) -> dict[str, Kind]:
    name = type(module).__name__
    return {"weight": Kind("gain", f"gain of {name}"), "bias": Kind("bias", f"bias of {name}")}


def _conv(module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> dict[str, Kind]:
    name = f"{type(module).__name__}, groups={module.groups}"
    kernel = Kind("conv", f"kernel of {name}", Convolution(module.groups))
    return {"weight": kernel, "bias": Kind("bias", f"bias of {name}")}


def _attention(module: nn.MultiheadAttention) -> dict[str, Kind]:
    fused = {
        "in_proj_weight": Kind("linear", "q, k, v fused in MultiheadAttention, a norm each", Fused(3)),
        "in_proj_bias": Kind("bias", "biases of q, k, v fused in MultiheadAttention", Fused(3)),
    }
    single = {f"{x}_proj_weight": Kind("linear", f"{x} projection of MultiheadAttention") for x in "qkv"}
    extra = {f"bias_{x}": Kind("bias", f"extra {x} token of MultiheadAttention") for x in "kv"}
    return fused | single | extra


_RULES: tuple[tuple[tuple[type[nn.Module], ...], Callable[..., dict[str, Kind]]], ...] = (
    ((nn.Linear,), _linear),
    ((nn.Embedding, nn.EmbeddingBag), _embedding),
    ((nn.RNNBase, nn.RNNCellBase), _recurrent),
    ((nn.Conv1d, nn.Conv2d, nn.Conv3d), _conv),
    ((nn.MultiheadAttention,), _attention),
    ((nn.LayerNorm, nn.RMSNorm, nn.GroupNorm), _norm),
    ((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), _norm),
    ((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _norm),
)
"""Module types and what their parameters are; the first match wins."""


def find_kinds(
    model: nn.Module, head: str | Sequence[str] | None = None, settled: Container[str] = ()
) -> dict[str, Kind | None]:
    """Every trainable parameter's kind, by name, in the model's order; None where none can be told.

    Args:
        model: any module.
        head: names of the modules that are LM heads; `()` says there is none; None finds it by the wiring.

    Raises:
        ValueError: a parameter with two kinds, two parameters at one address, an ambiguous or missing head.
    """
    heads = _find_heads(model, head)
    uses: dict[int, list[tuple[str, Kind | None]]] = defaultdict(list)
    for path, module in model.named_modules():
        table = next((rule(module) for types, rule in _RULES if isinstance(module, types)), {})
        for name, parameter in module.named_parameters(recurse=False):
            kind = table.get(name) or _bare(module, parameter)
            if name == "weight" and module in heads:
                kind = Kind("head", heads[module])
            uses[id(parameter)].append((f"{path}.{name}" if path else name, kind))
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    _refuse_overlaps(trainable)
    return {name: _one_kind(model, uses[id(p)], name in settled) for name, p in trainable.items()}


def _bare(module: nn.Module, parameter: nn.Parameter) -> Kind | None:
    """A vector or scalar that a module of unknown type owns acts entry by entry; a bare matrix has no known side."""
    owner = type(module).__name__
    return Kind("scalar", f"{parameter.ndim}-D parameter of {owner}") if parameter.ndim <= 1 else None


def _one_kind(model: nn.Module, uses: list[tuple[str, Kind | None]], settled: bool) -> Kind | None:
    names = ", ".join(name for name, _ in uses)
    kinds = {(kind.name, kind.view) if kind else None: kind for _, kind in uses}
    if len(kinds) == 1:
        kind = uses[0][1]
        return Kind(kind.name, f"{kind.why}; shared by {names}", kind.view) if kind and len(uses) > 1 else kind
    if {key[0] if key else None for key in kinds} == {"embedding", "head"}:
        if getattr(model, "output_multiplier", None) is not None:
            return Kind("embedding", f"tied ({names}); output_multiplier gives the head its width factor")
        return Kind("head", f"tied ({names}); the head's rule, since its outputs are the logits")
    if settled:
        return None
    found = ", ".join(f"{name}: {kind.name if kind else 'unknown'}" for name, kind in uses)
    raise ValueError(f"one parameter has two roles ({found}); give it one with an override")


def _refuse_overlaps(parameters: dict[str, nn.Parameter]) -> None:
    owners: dict[int, str] = {}
    for name, parameter in parameters.items():
        if parameter.is_meta or parameter.numel() == 0 or isinstance(parameter, nn.UninitializedParameter):
            continue
        other = owners.setdefault(parameter.data_ptr(), name)
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
