"""Which parameters write into a residual stream, and how many branches add up in it.

A stack of blocks `x <- x + F_1(x)`, ..., `x <- x + F_L(x)` sums L branches. The matrix at the end of a branch, an
attention layer's output projection or an MLP's projection down, writes into the stream; all others are inside one
branch. `Recipe.depth` makes the learning rate and initial values of those that write fall with L.
"""

import re
from collections import Counter
from collections.abc import Set
from dataclasses import replace

from torch import nn

from surefoot.discovery.heads import projections
from surefoot.discovery.kinds import Kinds, Search, Stream, blocks_of, children_of, own_parameters
from surefoot.views import Matrix, Stack, View

_MATRICES: dict[str, View] = {"linear": Matrix(), "experts": Stack()}
"""Kinds of matrices that may write into a stream, and their usual layouts."""

_INSIDE = re.compile("(^|_)gate|^in_")
"""In the names of gates and input projections, which write into no stream where another matrix may."""

Matrices = dict[nn.Parameter, tuple[int, int]]
"""Parameter -> (outputs of all its matrices, inputs of each); 0 outputs if they are queries, keys or values,
0 of both if the layout does not fit."""


def residual(search: Search, kinds: Kinds) -> Kinds:
    """Add to the kinds of weights that write into a residual stream, and their biases, the number of its branches.

    A stack is an `nn.ModuleList` or `nn.Sequential` of two blocks or more, the outermost one where they are nested. A
    list of as many modules as a router beside it has outputs holds experts and is no stack. A block is a module of at
    least two matrices that reads and writes one width d, the same for all blocks: the width that most of its children
    with two matrices or more read first and write last (in a tie, that of a norm), else the width of two norms or more
    among its children, else that of its first matrix's inputs. In each module of a block, the last matrix with d
    outputs writes, unless it gives queries, keys or values, alone or in a wrapper; one named a gate or an input only if
    no other writes. A branch is a child of a block in which a matrix writes; a child that alone in its block reads and
    writes another width mixes tokens, or channels, of the same stream. A tree of modules shows no additions, so that an
    override, `DepthRule().of(branches)` or a role's name, has the last word.
    """
    model, parameters = search.model, search.parameters
    named = [(part.layer, owner) for owner in model.modules() for _, part in projections(owner)]
    inside = {p for layer, owner in named if layer is not owner for p in layer.parameters()}
    matrices: Matrices = {}
    for name, kind in kinds.items():
        if kind and kind.name in _MATRICES and (p := parameters[name]).ndim > 1:
            blocks = blocks_of(kind.view or _MATRICES[kind.name], p)
            reads_only = kind.heads and p not in inside  # by a forward pass, or by type
            rows = sum((block[0] if p.ndim == 2 else 1) * block[-2] for block in blocks)
            matrices[p] = 0 if reads_only else rows, blocks[0][-1] if blocks else 0
    without = {p: (0 if p in inside else out, width) for p, (out, width) in matrices.items()}
    experts = _experts(model, {parameters[name] for name, kind in kinds.items() if kind and kind.name == "router"})
    counted, unnamed = (_counted(model, each, experts) for each in (without, matrices))
    found = dict(kinds)
    for name, kind in kinds.items():
        stream = counted.get(parameters[name])
        count, other = (x[parameters[name]].branches if parameters[name] in x else 0 for x in (counted, unnamed))
        if kind and (count or other):
            why = f"adds to a residual stream, one of {count} branches" if count else "adds to no residual stream"
            names = "" if count == other else f", by the names of queries, keys and values; without them {other}"
            found[name] = replace(kind, stream=stream, why=f"{kind.why}; {why}{names}")
    return found


def _experts(model: nn.Module, routers: Set[nn.Parameter]) -> set[nn.Module]:
    """Lists of experts: those with as many modules as a router beside them has outputs."""
    found = set[nn.Module]()
    for owner in model.modules():
        beside = [[p for p in child.parameters() if p.ndim > 1] for child in owner.children()]
        counts = {len(own[0]) for own in beside if own and all(p in routers for p in own)}
        found |= {m for m in children_of(owner).values() if isinstance(m, nn.ModuleList) and len(m) in counts}
    return found


def _counted(module: nn.Module, matrices: Matrices, experts: Set[nn.Module]) -> dict[nn.Parameter, Stream]:
    """Parameter that writes -> its stream, for the outermost stacks in a module."""
    if module in experts:
        return {}
    if isinstance(module, nn.ModuleList | nn.Sequential):
        blocks = {child: width for child in children_of(module).values() if (width := _stream(child, matrices))}
        if len(blocks) > 1 and len(set(blocks.values())) == 1:
            written = [each for block, width in blocks.items() for each in _branches(block, matrices, width, experts)]
            stream = Stream(len(written), max(blocks.values()))  # all widths are the same
            return {parameter: stream for branch in written for parameter in branch}
    below = (_counted(child, matrices, experts) for child in children_of(module).values())
    return {parameter: count for counts in below for parameter, count in counts.items()}


def _stream(block: nn.Module, matrices: Matrices) -> int:
    """The width of a block's stream, if it has two matrices or more, one of which writes it; else 0."""
    children = [*children_of(block).values()]
    sides, *inner = ([matrices[p] for p in x.parameters() if p in matrices] for x in (block, *children))
    back = Counter(own[0][1] for own in inner if len(own) > 1 and own[0][1] == own[-1][0])
    norms = [x[0].numel() for c in children if (x := [*c.parameters()]) and all(p.ndim == 1 for p in x)]
    by_norms = len(norms) > 1 and len({*norms}) == 1
    if len(sides) < 2:
        return 0
    last = next((out for out, _ in reversed(sides) if out), 0)  # 0: queries, keys or values
    if not back and not by_norms and last not in {width for _, width in sides}:
        return 0  # ends in another width, as a regressor
    width = max(back, key=lambda w: (back[w], w in norms), default=norms[0] if by_norms else sides[0][1])
    return width if any(out == width for out, _ in sides) else 0


def _branches(block: nn.Module, matrices: Matrices, width: int, experts: Set[nn.Module]) -> list[set[nn.Parameter]]:
    """For each branch of a block, the parameters at its end that write into the stream."""
    widths = _widths(block, matrices, width)
    found = {child: written for child, own in widths.items() if (written := _written(child, matrices, own))}
    own, first = _last(block, matrices, width), next(iter(found), None)
    if len(found) == 1 and not own and isinstance(first, nn.ModuleList) and first not in experts:
        return _branches(first, matrices, width, experts)  # a block's branches in a list
    return [*found.values(), own] if own else [*found.values()]


def _written(child: nn.Module, matrices: Matrices, width: int) -> set[nn.Parameter]:
    """The parameters that write in a child of a block; those of a gate of several layers only if no others do."""
    last = {name: _last(m, matrices, width) for name, m in child.named_modules()}
    gates = {name for name in last if any(map(_INSIDE.search, name.split(".")))}
    return set().union(*(last[name] for name in last.keys() - gates)) or set().union(*last.values())


def _widths(block: nn.Module, matrices: Matrices, width: int) -> dict[nn.Module, int]:
    """The width that each child of a block writes: its own if it mixes another dimension of the stream, as tokens."""
    sides = {child: [matrices[p] for p in child.parameters() if p in matrices] for child in children_of(block).values()}
    counts = Counter(x for own in sides.values() for x in {width, *(x for pair in own for x in pair)})
    alone = {c: own[-1][0] for c, own in sides.items() if len(own) > 1 and own[0][1] == own[-1][0]}
    return dict.fromkeys(sides, width) | {child: own for child, own in alone.items() if counts[own] == 1}


def _last(owner: nn.Module, matrices: Matrices, width: int) -> set[nn.Parameter]:
    """The last matrix with `width` outputs among those of a module and of its child layers, with its bias.

    Not the first of two if it alone has these outputs and reads another width, as in an MLP beside the stream. A child
    layer that has two matrices or more, of which one writes, is judged by itself. The lengths of a matrix under weight
    norm belong to the branch, too.
    """
    names = {c: name for name, c in children_of(owner).items() if _is_layer(c) and not _last(c, matrices, width)}
    layers = [owner, *names]
    candidates = [(layer, p) for layer in layers for p in own_parameters(layer).values() if p in matrices]
    writing = [each for each in candidates if matrices[each[1]][0] == width]
    beside = len(writing) == 1 and len(candidates) == 2 and writing[0] is candidates[0]
    if not writing or (beside and matrices[writing[0][1]][1] != width) or (len(layers) == 1 and len(candidates) < 2):
        return set()  # a single layer is judged in the module that holds it
    layer, weight = max(reversed(writing), key=lambda each: not _INSIDE.search(names.get(each[0], "")))
    own = own_parameters(layer)
    biases = [p for p in own.values() if p.ndim == weight.ndim - 1 and p.shape[-1] == width]
    return {weight, *biases, *(own[f"{name}_g"] for name, p in own.items() if p is weight and f"{name}_g" in own)}


def _is_layer(module: nn.Module) -> bool:
    """True for a module without children, parametrizations aside."""
    return all(name == "parametrizations" for name, _ in module.named_children())
