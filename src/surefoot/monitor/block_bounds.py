"""Upper bounds on the stability numbers of whole blocks, from their weights: MLPs, gated ones, attention, sequences.

A sequence is recognised by its layers, an MLP by the code of its `forward`, which `torch.fx` follows without data. An
MLP must consist of linear layers and activations known by their class or function, else it has no bound: no batch can
show an activation's slope. Hooks that change what a layer returns are not seen, nor is rounding in half precision. With
`|W|` the norm of a matrix and `|W|_max` its largest output entry, both for inputs of RMS 1, and L the activation's
largest slope, over inputs of RMS at most 1:

- `f = W x + b`: forward `|W| + rms(b)`, dependency `|W|`, update `|dW| + rms(db)`.
- `down act(up x)`: the products. The update adds one term for each layer's change, the other at its norm.
- `down (act(gate x) * up x)`: the RMS of a product of two vectors is at most that of one times the largest entry of the
  other: `forward = L |down| min(|gate| |up|_max, |gate|_max |up|)`, dependency twice that. They grow as the root of the
  width, and so does the maximum itself: an input may be aligned with a row of both. Measured numbers are Theta(1).
- attention: each head's output is a mean of values, so forward is `|W_o| sqrt(mean_h |W_v,h|^2)` with `W_v,h` a head's
  rows, at most `sqrt(heads) |W_o| |W_v|`, whatever the logits. The largest dependency at matrices of norm 1 grows as
  the largest logit, and as the root of the number of positions that attend to one: it has no bound here.
- RMSNorm, LayerNorm over one dimension: forward `max |gain| + rms(b)`, update `max |dgain| + rms(db)`, whatever the
  input; no dependency.
- `surefoot.layers`: In Norm is a norm without a gain and a linear layer; Out Norm and Post Norm have forward 1; the
  residual blocks have that of the block, plus 1 for the skip connection.

Source: "Beyond MuP" 1 to 3, whose bounds of linear layers these are, composed.
"""

from __future__ import annotations

import copy
import math
import operator
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from surefoot.layers import OutNormLinear, PostInNorm, PostNorm, PreNorm
from surefoot.linalg.device import whole_of
from surefoot.monitor.layer_bounds import Linear, forward_bound, linear
from surefoot.monitor.maxima import over_vectors, rms

_SLOPES = dict.fromkeys(("relu", "relu6", "tanh", "softsign"), 1.0)
_SLOPES |= {"gelu": 1.129, "silu": 1.100, "mish": 1.089, "hardswish": 1.5}
"""Largest slope of an activation function that is 0 at 0, by its name in `torch.nn.functional`."""

_FUNCTIONS: dict[object, float] = {getattr(F, name): slope for name, slope in _SLOPES.items()}
_FUNCTIONS |= dict.fromkeys((torch.relu, torch.tanh, "relu", "tanh"), 1.0)
"""The same of functions, and of methods of tensors by name."""

_CLASSES = (nn.ReLU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.ReLU6, nn.Tanh, nn.Softsign)
LIPSCHITZ: dict[type[nn.Module], float] = {kind: _SLOPES[kind.__name__.lower()] for kind in _CLASSES}
LIPSCHITZ |= {nn.Identity: 1.0, nn.Dropout: 1.0}  # in eval mode
"""The same of layers."""

_FOREIGN = dict.fromkeys(("GELUTanh", "GELUActivation", "NewGELUActivation", "FastGELUActivation"), _SLOPES["gelu"])
_FOREIGN |= dict.fromkeys(("QuickGELUActivation", "SiLUActivation"), _SLOPES["silu"])
_FOREIGN |= {"AccurateGELUActivation": _SLOPES["gelu"], "MishActivation": _SLOPES["mish"], "LinearActivation": 1.0}
"""The same of classes of `transformers.activations`."""

_Gate = tuple[float, Linear, Linear]
"""A factor of a gated MLP: the slope of its activation, 1 without one, and the linear layer of the input, the present
one and the older one."""


class Bounds(NamedTuple):
    """Upper bounds over the inputs of a block of RMS at most 1; infinite where unknown.

    Args:
        forward: on the RMS of the output.
        before: the same of the older block.
        dependency: on the RMS of two outputs' difference over that of their inputs'.
        update: on the RMS of the difference between the block's output and the older one's.
        gate: the layer, where the output is an activation function of one layer of the input.
    """

    forward: float = 1.0
    before: float = 1.0
    dependency: float = 1.0
    update: float = 0.0
    gate: _Gate | None = None

    def then(self, new: Linear, old: Linear) -> Bounds:
        """Followed by a linear layer."""
        update = _times(new.slope(), self.update) + (new - old).rms(self.before)
        gate = (1.0, new, old) if self is _INPUT else None
        dependency = _times(new.slope(), self.dependency)
        return Bounds(new.rms(self.forward), old.rms(self.before), dependency, update, gate)

    def times(self, slope: float) -> Bounds:
        """Followed by a function that is 0 at 0, with at most this slope."""
        gate = self.gate and (slope * self.gate[0], *self.gate[1:])
        return Bounds._make([*(_times(slope, bound) for bound in self[:4]), gate])

    def normed(self, forward: float, before: float, change: float) -> Bounds:
        """Followed by a norm whose output has at most these RMS and changes by so much for one input."""
        return Bounds(forward, before, math.inf, math.inf if self.update else change)

    def added(self, other: Bounds) -> Bounds:
        """Of the sum of two functions of one input."""
        return Bounds._make([*(a + b for a, b in zip(self[:4], other[:4], strict=True)), None])


_INPUT = Bounds()


def _times(slope: float, bound: float) -> float:
    """The product of which either factor may be infinite: 0 where the other is 0."""
    return slope * bound if slope and bound else 0.0


def block_bounds(module: nn.Module, old: nn.Module | None = None) -> dict[str, float]:
    """The bounds of a block whose formula is known, in eval mode.

    Args:
        module: any module.
        old: a copy from before some steps; adds the bound on the update.

    Returns:
        "forward_bound", "dependency_bound" and "update_bound", as far as they are known; empty if a weight is not
        finite, or if the `forward` of a module inside is not its class's.

    >>> block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> _ = block[0].weight.data.copy_(torch.eye(2) * 3), block[0].bias.data.fill_(1.0)
    >>> {name: round(bound, 4) for name, bound in block_bounds(block).items()}
    {'forward_bound': 4.0, 'dependency_bound': 3.0}
    """
    before = module if old is None else old
    if not all(_as_its_class(part) for root in (module, before) for part in root.modules()):
        return {}
    bounds = _sequence(_INPUT, module, before) or _mlp(module, before)
    if bounds is None:
        forward = forward_bound(module)
        return {} if forward is None else {"forward_bound": forward}
    names = ("forward", "dependency", *(() if old is None else ("update",)))
    return {f"{name}_bound": value for name in names if math.isfinite(value := getattr(bounds, name))}


def _sequence(bounds: Bounds, module: nn.Module, old: nn.Module) -> Bounds | None:
    """The bounds with a layer, an activation function, a norm or a sequence of them behind."""
    if type(module) is nn.Sequential:
        assert isinstance(old, nn.Sequential)
        reached: Bounds | None = bounds
        for part, before in zip(module, old, strict=True):
            reached = None if reached is None else _sequence(reached, part, before)
        return reached
    layer, old_layer = linear(module), linear(old)
    if layer is not None and old_layer is not None:
        return bounds.then(layer, old_layer)
    if type(module) in (nn.LayerNorm, nn.RMSNorm) and over_vectors(module):
        gain, bias, old_gain, old_bias = (_vector(norm, name) for norm in (module, old) for name in ("weight", "bias"))
        pairs = ((gain, bias), (old_gain, old_bias), (gain - old_gain, bias - old_bias))
        return bounds.normed(*(float(gain.abs().max()) + rms(bias) for gain, bias in pairs))
    if isinstance(module, OutNormLinear | PostNorm):
        return Bounds(1.0, 1.0, math.inf, 2.0)
    if isinstance(module, PreNorm | PostInNorm):
        assert isinstance(old, PreNorm | PostInNorm)
        inside = _sequence(bounds.normed(1.0, 1.0, 0.0), module.block, old.block)
        skip = bounds if isinstance(module, PreNorm) else bounds.normed(1.0, 1.0, 0.0)
        return None if inside is None else skip.added(inside)
    slope = _slope(module)
    return None if slope is None or repr(module) != repr(old) else bounds.times(slope)


def _as_its_class(module: nn.Module) -> bool:
    """Whether a module computes what its class does, with finite numbers."""
    own = module.parameters(recurse=False)
    return "forward" not in vars(module) and all(bool(p.double().isfinite().all()) for p in own)


def _slope(module: nn.Module) -> float | None:
    """The largest slope of an activation function; None of any other module."""
    foreign = type(module).__module__ == "transformers.activations"
    return _FOREIGN.get(type(module).__name__) if foreign else LIPSCHITZ.get(type(module))


def _vector(norm: nn.Module, name: str) -> Tensor:
    """The gain ("weight") or the bias of a norm, which may have none."""
    own = getattr(norm, name, None)
    return torch.tensor([float(name == "weight")], device="cpu") if own is None else whole_of(own.detach()).double()


class _Tracer(fx.Tracer):
    """Follows a module's code down to the layers and the activations that are known."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._known = {id(part) for part in module.modules() if linear(part) or _slope(part)}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is not looked into."""
        return id(m) in self._known or super().is_leaf_module(m, module_qualified_name)


def _mlp(module: nn.Module, old: nn.Module) -> Bounds | None:
    """The bounds of an MLP, a module of two or three linear layers whose code is one of the formulas."""
    plain = [linear(part) is not None for part in module.children()]
    others = [part for part in module.children() if linear(part) is None and any(True for _ in part.parameters())]
    if sum(plain) not in (2, 3) or others:
        return None
    graphs: list[fx.Graph] = []
    with suppress(Exception):  # of any code that asks for values or shapes
        graphs = [_Tracer(part).trace(copy.copy(part)) for part in (module, old)]
    if not graphs or str(graphs[0]) != str(graphs[1]) or _overwrites(module, graphs[0]):
        return None
    bounds = _traced(next(iter(reversed(graphs[0].nodes))).args[0], module, old)  # of the output
    return bounds if bounds is not None and math.isfinite(bounds.forward) else None


def _overwrites(module: nn.Module, graph: fx.Graph) -> bool:
    """Whether a tensor may be written to: by a call whose result is not used, or by a layer where others read it."""
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    shared = any(len(node.users) > 1 for node in graph.nodes)
    in_place = any(getattr(part, "inplace", False) for part in module.modules())
    return not all(node.users for node in calls) or (shared and in_place)


def _traced(node: object, module: nn.Module, old: nn.Module) -> Bounds | None:
    """The bounds of a value in a module's code; None where it is not known how it comes from the input."""
    if not isinstance(node, fx.Node):
        return None
    if node is next(iter(node.graph.nodes)):
        return _INPUT
    if node.target in (operator.mul, torch.mul) and len(node.args) == 2:
        a, b = (_traced(factor, module, old) for factor in node.args)
        return _product(a.gate, b.gate) if a and b and a.gate and b.gate else None
    if node.target is operator.getitem:
        return _half(node, module, old)
    if len(node.args) != 1 or (inner := _traced(node.args[0], module, old)) is None:
        return None
    if node.op == "call_module" and not node.kwargs:
        return _sequence(inner, module.get_submodule(str(node.target)), old.get_submodule(str(node.target)))
    plain = node.op in ("call_function", "call_method") and not node.kwargs.get("inplace")
    known = plain and node.target in _FUNCTIONS and not node.kwargs.keys() - {"approximate", "inplace"}
    return inner.times(_FUNCTIONS[node.target]) if known else None


def _half(node: fx.Node, module: nn.Module, old: nn.Module) -> Bounds | None:
    """One of the two halves of a linear layer's output, which is bounded as a factor alone."""
    halves, index = node.args
    if not isinstance(halves, fx.Node) or halves.target not in ("chunk", torch.chunk) or not isinstance(index, int):
        return None
    if (*halves.args[1:], *halves.kwargs.values()) != (2, -1) or halves.kwargs.keys() - {"dim"}:
        return None
    whole = _traced(halves.args[0], module, old)
    if whole is None or whole.gate is None or len(whole.gate[1].weight) % 2:
        return None
    slope, *layers = whole.gate
    new, before = (Linear(x.weight.chunk(2)[index], x.bias.chunk(2)[index], x.normed) for x in layers)
    return Bounds(math.inf, math.inf, math.inf, math.inf, (slope, new, before))


def _product(a: _Gate, b: _Gate) -> Bounds:
    """The bounds of `gate(x) * up(x)`."""
    (slope, gate, old_gate), (up_slope, up, old_up) = a, b

    def product(a: Linear, b: Linear) -> float:
        return min(a.rms() * b.largest(), a.largest() * b.rms())

    gate_alone, up_alone = (Linear(layer.weight, torch.zeros_like(layer.bias)) for layer in (gate, up))
    dependency = math.inf if gate.normed or up.normed else product(gate, up_alone) + product(gate_alone, up)
    update = product(gate, up - old_up) + product(gate - old_gate, old_up)
    return Bounds(product(gate, up), product(old_gate, old_up), dependency, update).times(slope * up_slope)
