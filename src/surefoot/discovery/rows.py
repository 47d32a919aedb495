"""Which rows of which matrices make the queries, keys and values of every head: from one forward pass, not names.

The pass runs on a copy, on shapes alone. Each entry that a matrix has made is labelled with the first and the last row
that it comes from: operations that move entries move the labels, elementwise operations merge them, matrix products
start new ones. Attention is an operation of that name, or a softmax of a product of two activations times a third; the
labels that reach it are read off head by head.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

Source = tuple[str, int]
"""Origin of an entry: "entry" of a parameter, made by a "row" of one, one of the "logits" or the "weights" of a
product; and the index of that parameter or product."""
Labels = dict[Source, tuple[Tensor, Tensor]]
"""Origin -> each entry's first and last row, or column of the logits; for entries of a parameter, row and column."""
Reached = tuple[Labels, int]
"""An input of attention (queries, keys or values): its labels and its feature dimension."""

_ROWS = "_surefoot_rows"
"""The attribute in which a tensor carries its labels."""
_PARTS = ("query", "key", "value")
_NONE = 2**62, -1
"""First and last row of an entry that no row made."""
_MOVES = ("_unsafe_view", "cat", "stack", "repeat", "flip", "roll")
_SCALES = ("mul", "div", "mul_", "div_")
_KEEP_ENTRIES = (*_SCALES, "clone", "_to_copy")
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""Matrix products -> the position of the first factor among the arguments."""
_STREAM = 4
"""A tensor made by more matrices than this is a residual stream and no projection."""


@dataclass
class Use:
    """How a forward pass uses a matrix.

    Args:
        shape: of the parameter.
        transposed: for each product with it, True if a column makes an output, False if a row does.
        heads: "query", "key", "value" -> first row, last row and number of rows of each head.
        clear: whether all inputs of the attention that these heads reach are traced to rows.

    >>> Use((8, 4)).heads
    {}
    """

    shape: tuple[int, ...]
    transposed: set[bool] = field(default_factory=set)
    heads: dict[str, set[tuple[int, int, int]]] = field(default_factory=dict)
    clear: bool = True


def uses_of(model: nn.Module, weights: Iterable[nn.Parameter], inputs: Any) -> dict[nn.Parameter, Use]:
    """Run a model once and see how its matrices are used.

    Args:
        model: any module; the pass is on a copy, and computes nothing.
        weights: parameters of 2 dimensions or more that may be matrices of linear layers.
        inputs: what the model is called with: a tuple is its arguments, a dictionary its named ones.

    Returns:
        Parameter -> its use, for those that are multiplied with activations.

    Raises:
        ValueError: the model cannot be copied, or run on shapes alone.

    >>> layer = nn.Linear(4, 8)
    >>> uses_of(layer, [layer.weight], torch.ones(1, 4))[layer.weight].transposed
    {False}
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a while to import

    model, weights = _bare(model), [*weights]
    state = [*model.parameters(), *model.buffers()]
    with FakeTensorMode(allow_non_fake_inputs=True):  # a meta model is run as if on a CPU, where its constants are
        fake = {id(x): torch.empty_like(x, device="cpu" if x.is_meta else x.device) for x in state}
    device = next((x.device for x in fake.values()), torch.device("cpu"))
    inputs = {**inputs} if isinstance(inputs, Mapping) else inputs

    def made(x: Tensor) -> Tensor:
        return torch.zeros_like(x, device=device) if x.is_meta else x.to(device, copy=True)

    given = tree_map_only(Tensor, made, inputs)
    arguments, named = ((), given) if isinstance(given, dict) else (given, {})
    rows, fast = _Rows([fake[id(p)] for p in weights]), torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it is one operation, with the projections inside
    try:
        run = copy.deepcopy(model, {**fake})
        devices = [device] if device.type == "cuda" else []
        with rows, torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
            run(*(arguments if isinstance(arguments, tuple) else (arguments,)), **named)
    except Exception as error:  # whatever a model of the user's raises
        what = f"a forward pass on shapes alone failed ({type(error).__name__}: {error})"
        remedy = "give the arguments of the model's forward, several as a tuple, and plan before fully_shard; "
        remedy += "or leave inputs out and name missing roles by overrides"
        raise ValueError(f"inputs=...: {what}; {remedy}") from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return {p: use for p, use in zip(weights, rows.uses, strict=True) if use.transposed}


def _bare(model: nn.Module) -> nn.Module:
    """The model inside of `torch.compile` or data parallelism, which takes the same arguments."""
    if hasattr(model, "_orig_mod"):
        return _bare(model._orig_mod)  # type: ignore[arg-type]
    return _bare(model.module) if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel) else model


def _labels(x: Any) -> Labels:
    labels: Labels = getattr(x, _ROWS, {})
    return labels


def _side(x: Tensor, source: Source, side: int) -> Tensor:
    """The first (side 0) or last (1) row from one source, for each entry of a tensor."""
    both = _labels(x).get(source)
    return torch.tensor(_NONE[side]).expand(x.shape) if both is None else both[side]


class _Rows(TorchDispatchMode):
    """Dispatch mode that labels tensors while a model runs, and records how weights are used."""

    supports_higher_order_operators = True  # flex_attention

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses, self.products = [Use(tuple(x.shape)) for x in weights], list[tuple[Reached, Reached]]()
        self.sums = list[list[int]]()  # the products that each softmax sums
        for i, x in enumerate(weights):
            *lead, rows, columns = x.shape
            matrix = torch.arange(x[..., 0, 0].numel()).reshape(*lead, 1, 1)  # its index in a stack
            row, column = matrix * rows + torch.arange(rows)[:, None], matrix * columns + torch.arange(columns)
            setattr(x, _ROWS, {("entry", i): (row.expand(x.shape), column.expand(x.shape))})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name, made = func(*args, **(kwargs or {})), getattr(func, "overloadpacket", func).__name__, list[Labels]()
        given = [x for x in tree_leaves(args) if _labels(x)]
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if not given or not outputs or name.endswith("_like"):
            return out
        if name in _PRODUCTS:
            left, right = map(_labels, args[_PRODUCTS[name] :][:2])
            made = [self._multiplied(left, right, outputs[0].shape)]
        elif "attention" in name or "attn" in name:
            self._attends(*([(_labels(x), -1)] for x in args[:3]))
        elif func.is_view or name in _MOVES:
            made = _moved(func, name, args, kwargs or {})
        else:
            made = [_joined(name, [_labels(x) for x in given if x.shape == outputs[0].shape])]
            if "softmax" in name:
                made = [self._softmax(made[0], args[1])]
        for x, labels in zip(outputs, made, strict=False):
            stream = sum(kind == "row" for kind, _ in labels) > _STREAM
            kept = {s: both for s, both in labels.items() if both[0].shape == x.shape and (s[0] != "row" or not stream)}
            setattr(x, _ROWS, kept)
        return out

    def _multiplied(self, left: Labels, right: Labels, shape: torch.Size) -> Labels:
        """The labels of a matrix product: with a weight, or of two activations."""
        of_left, of_right = ({s: both for s, both in x.items() if s[0] == "entry"} for x in (left, right))
        if of_left or of_right:
            made, summed = Labels(), -2 if of_right else -1
            for (_, i), sides in (of_left or of_right).items() if not (of_left and of_right) else ():
                same = [torch.equal(x.select(summed, 0), x.select(summed, -1)) for x in sides]
                if any(same):  # one row, or else one column, along the summed dimension
                    label = sides[not same[0]].narrow(summed, 0, 1)
                    made["row", i] = (label.expand(shape),) * 2
                    self.uses[i].transposed.add(not same[0])
            return made
        for weights, value in ((left, (right, -1)), (right, (left, -2))):
            if found := [i for kind, i in weights if kind == "weights"]:
                for i in found:  # one per softmax
                    queries, keys = zip(*(self.products[j] for j in self.sums[i]), strict=True)
                    self._attends(queries, keys, [value])
                return {}
        self.products.append(((left, -1), (right, -2)))
        return {("logits", len(self.products) - 1): (torch.arange(shape[-1]).expand(shape),) * 2}

    def _softmax(self, labels: Labels, dim: int) -> Labels:
        """The labels of a softmax; in a product under it, keys are the factor that runs along its dimension."""
        logits = {i: both for (kind, i), both in labels.items() if kind == "logits"}
        for i, both in logits.items():
            if both[0].shape[dim] > 1 and torch.equal(both[0].select(dim, 0), both[0].select(dim, -1)):
                self.products[i] = self.products[i][::-1]
        self.sums += [[*logits]] if logits else []
        return {("weights", len(self.sums) - 1): both for both in logits.values()}

    def _attends(self, *parts: Sequence[Reached]) -> None:
        """Record the heads of queries, keys and values, each given by one tensor per summed product."""
        clear = all(any(kind == "row" for kind, _ in labels) for reached in parts for labels, _ in reached)
        for part, reached in zip(_PARTS, parts, strict=True):
            spans = dict[tuple[int, torch.Size], Tensor]()
            for labels, dim in reached:
                for i, first, last in ((i, *both) for (kind, i), both in labels.items() if kind == "row"):
                    span = torch.stack([first.amin(dim), last.amax(dim), (last >= 0).sum(dim)], -1)
                    known = spans.get((i, span.shape), span)
                    spans[i, span.shape] = span if torch.equal(known, span) else _both(known, span)
            for (i, _), span in spans.items():
                found = {(a, b, size) for a, b, size in span.flatten(0, -2).tolist() if size}
                self.uses[i].heads.setdefault(part, set()).update(found)
                self.uses[i].clear &= clear


def _both(one: Tensor, other: Tensor) -> Tensor:
    """Merge the first row, last row and number of rows of two parts of a head."""
    (a, b, n), (c, d, m) = one.unbind(-1), other.unbind(-1)
    return torch.stack([torch.minimum(a, c), torch.maximum(b, d), n + m], -1)


def _moved(func: Any, name: str, args: Any, kwargs: Any) -> list[Labels]:
    """The labels of each output of an operation that moves entries."""
    made = list[Labels]()
    for source in dict.fromkeys(source for x in tree_leaves(args) for source in _labels(x)):
        sides = []
        for side in (0, 1):
            x, *rest = tree_map_only(Tensor, partial(_side, source=source, side=side), args)
            if name == "view_as_complex":
                sides.append([x.amax(-1) if side else x.amin(-1)])
            elif name == "view_as_real":
                sides.append([torch.stack([x, x], -1)])
            else:
                reshapes = name in ("view", "_unsafe_view")
                sides.append(tree_leaves(x.reshape(*rest) if reshapes else func(x, *rest, **kwargs)))
        made += [{} for _ in sides[0][len(made) :]]
        for labels, first, last in zip(made, *sides, strict=True):
            labels[source] = first, last
    return made


def _joined(name: str, given: list[Labels]) -> Labels:
    """The labels of the output of an elementwise operation, merged from its inputs."""
    if name in _SCALES and any(labels.keys() != given[0].keys() for labels in given):
        return {}  # a gate is no part of what it multiplies
    joined = Labels()
    for labels in given:
        for source, (first, last) in labels.items():
            if source[0] != "entry" or name in _KEEP_ENTRIES:
                before = joined.get(source)  # alone, labels stay views, which take no memory
                both = (torch.minimum(before[0], first), torch.maximum(before[1], last)) if before else (first, last)
                joined[source] = both
    return joined
