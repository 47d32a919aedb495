"""Upper bounds on the stability numbers of whole blocks, from their weights: MLPs, gated ones, attention, sequences.

A block is recognised by the layers that it consists of, and an MLP by what it does: its output for the batch at hand
must be that of the formula, else it has no bound. With `|W|` the norm of a matrix and `|W|_max` its largest
output entry, both for inputs of RMS 1, and L the activation's largest slope, over inputs of RMS at most 1:

- `f = W x + b`: forward `|W| + rms(b)`, dependency `|W|`, update `|dW| + rms(db)`.
- `down act(up x)`: the products. The update adds one term for each layer's change, the other at its norm.
- `down (act(gate x) * up x)`: the RMS of a product of two vectors is at most that of one times the largest entry of the
  other: `forward = L |down| min(|gate| |up|_max, |gate|_max |up|)`, dependency twice that. They grow as the root of the
  width, and so does the maximum itself: an input may be aligned with a row of both. Measured numbers are Theta(1).
- attention: each head's output is a mean of values, so that forward is `|W_o| sqrt(mean_h |W_v,h|^2)` with `W_v,h` a
  head's rows, at most `sqrt(heads) |W_o| |W_v|`, whatever the logits. Its dependency grows with the logits and with the
  number of positions, and has no bound here.
- RMSNorm, LayerNorm over one dimension: forward `max |gain| + rms(b)`, update `max |dgain| + rms(db)`, whatever the
  input; no dependency.
- `surefoot.layers`: In Norm is a norm without a gain and a linear layer; Out Norm and Post Norm have forward 1; the
  residual blocks that of the block, plus 1 of the skip connection.

Source: "Beyond MuP" 1 to 3, whose bounds of linear layers these are, composed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.layers import OutNormLinear, PostInNorm, PostNorm, PreNorm
from surefoot.monitor.attention_bound import forward_bound
from surefoot.monitor.linear_layers import Linear, linear
from surefoot.monitor.maxima import over_vectors, rms

GELU_SLOPE, SILU_SLOPE = 1.129, 1.100

LIPSCHITZ: dict[type[nn.Module], float] = {
    nn.ReLU: 1.0,
    nn.GELU: GELU_SLOPE,
    nn.SiLU: SILU_SLOPE,
    nn.Identity: 1.0,
    nn.Dropout: 1.0,  # in eval mode
}
"""Largest slope of an activation function that is 0 at 0."""

ACTIVATIONS: tuple[tuple[Callable[[Tensor], Tensor], float], ...] = (
    (F.gelu, GELU_SLOPE),
    (lambda x: F.gelu(x, approximate="tanh"), GELU_SLOPE),
    (F.silu, SILU_SLOPE),
    (F.relu, 1.0),
    (lambda x: x * torch.sigmoid(1.702 * x), SILU_SLOPE),
    (torch.tanh, 1.0),
)
"""Activation functions of MLPs, with their largest slopes."""

_PLAIN = (
    *(("up", "down"), ("up_proj", "down_proj"), ("fc1", "fc2"), ("c_fc", "c_proj"), ("fc_in", "fc_out")),
    *(("wi", "wo"), ("linear1", "linear2"), ("linear_fc1", "linear_fc2"), ("lin1", "lin2")),
    *(("dense_h_to_4h", "dense_4h_to_h"), ("intermediate_dense", "output_dense")),
)
_TWO_IN_ONE = (("gate_up_proj", "down_proj"), ("Wi", "Wo"))
_GATED = (("gate", "up", "down"), ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("wi_0", "wi_1", "wo"))
"""Names of the layers of MLPs."""

_COMPARED = 256
"""Vectors, at most, for which an MLP is compared with its formula."""

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
_LOOSE = 0.03
"""How far an MLP's output may be from its formula's, relatively: by dtype, and for all others."""


@dataclass(frozen=True)
class Bounds:
    """Upper bounds over the inputs of a block of RMS at most 1; infinite where unknown.

    Args:
        forward: on the RMS of the output.
        before: the same of the older block.
        dependency: on the RMS of two outputs' difference over that of their inputs'.
        update: on the RMS of the difference between the block's output and the older one's.
    """

    forward: float = 1.0
    before: float = 1.0
    dependency: float = 1.0
    update: float = 0.0

    def then(self, new: Linear, old: Linear) -> Bounds:
        """With a linear layer behind."""
        update = _times(new.slope(), self.update) + (new - old).rms(self.before)
        return Bounds(new.rms(self.forward), old.rms(self.before), _times(new.slope(), self.dependency), update)

    def times(self, slope: float) -> Bounds:
        """With a function behind that is 0 at 0 and has this slope at most."""
        return Bounds(*(_times(slope, bound) for bound in vars(self).values()))

    def normed(self, forward: float, before: float, change: float) -> Bounds:
        """With a norm behind, whose output has these RMS at most and changes by so much for one input."""
        return Bounds(forward, before, math.inf, math.inf if self.update else change)

    def added(self, other: Bounds) -> Bounds:
        """Of the sum of two functions of one input."""
        return Bounds(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def _times(slope: float, bound: float) -> float:
    """The product of which either factor may be infinite: 0 where the other is 0."""
    return slope * bound if slope and bound else 0.0


MLP = tuple[Linear | None, Linear, Linear]
"""The gate, or None; up; down."""


def block_bounds(module: nn.Module, old: nn.Module | None, x: Tensor | None, y: Tensor | None) -> dict[str, float]:
    """The bounds of a block whose formula is known.

    Args:
        module: any module.
        old: a copy from before some steps; adds the bound on the update.
        x: an input of the module.
        y: the output for it; an MLP has no bounds without them, nor if y is not what its formula gives.

    Returns:
        "forward_bound", "dependency_bound" and "update_bound", as far as they are known.

    >>> block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> _ = block[0].weight.data.copy_(torch.eye(2) * 3), block[0].bias.data.fill_(1.0)
    >>> {name: round(bound, 4) for name, bound in block_bounds(block, None, None, None).items()}
    {'forward_bound': 4.0, 'dependency_bound': 3.0}
    """
    before = module if old is None else old
    bounds = _sequence(Bounds(), module, before) or _mlp(module, before, x, y)
    if bounds is None:
        forward = forward_bound(module)
        return {} if forward is None else {"forward_bound": forward}
    numbers = {f"{name}_bound": value for name, value in vars(bounds).items()}
    unknown = {"before_bound", *(["update_bound"] if old is None else [])}
    return {name: value for name, value in numbers.items() if name not in unknown and math.isfinite(value)}


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
        return bounds.normed(_largest_normed(module), _largest_normed(old), _largest_normed(module, old))
    if isinstance(module, OutNormLinear | PostNorm):
        return Bounds(1.0, 1.0, math.inf, 2.0)
    if isinstance(module, PreNorm | PostInNorm):
        assert isinstance(old, PreNorm | PostInNorm)
        inside = _sequence(bounds.normed(1.0, 1.0, 0.0), module.block, old.block)
        skip = bounds if isinstance(module, PreNorm) else bounds.normed(1.0, 1.0, 0.0)
        return None if inside is None else skip.added(inside)
    return bounds.times(LIPSCHITZ[type(module)]) if type(module) in LIPSCHITZ else None


def _largest_normed(norm: nn.Module, old: nn.Module | None = None) -> float:
    """The largest RMS of a norm's output, or of its difference from the older norm's for the same input."""

    def of(name: str, missing: float) -> Tensor:
        values = [getattr(module, name, None) for module in (norm, old) if module is not None]
        new, *before = [torch.tensor([missing]) if x is None else x.detach() for x in values]
        return new - before[0] if before else new

    return float(of("weight", 1.0).abs().max()) + rms(of("bias", 0.0))


def _mlp(module: nn.Module, old: nn.Module, x: Tensor | None, y: Tensor | None) -> Bounds | None:
    """The bounds of an MLP."""
    new, before = _layers(module), _layers(old)
    slope = None if new is None or before is None else _slope(new, x, y)
    if new is None or before is None or slope is None:
        return None
    bounds = Bounds().then(new[1], before[1]) if new[0] is None else _product(new, before)
    return bounds.times(slope).then(new[2], before[2])


def _product(new: MLP, old: MLP) -> Bounds:
    """The bounds of `gate(x) * up(x)`."""
    (gate, up, _), (old_gate, old_up, _) = new, old
    assert gate is not None
    assert old_gate is not None

    def product(a: Linear, b: Linear) -> float:
        return min(a.rms() * b.largest(), a.largest() * b.rms())

    gate_alone, up_alone = (Linear(layer.weight, torch.zeros_like(layer.bias)) for layer in (gate, up))
    normed = gate.normed or up.normed
    dependency = math.inf if normed else product(gate, up_alone) + product(gate_alone, up)
    update = product(gate, up - old_up) + product(gate - old_gate, old_up)
    return Bounds(product(gate, up), product(old_gate, old_up), dependency, update)


def _layers(module: nn.Module) -> MLP | None:
    """The layers of an MLP, by their names."""
    for names in (*_GATED, *_PLAIN, *_TWO_IN_ONE):
        layers = [linear(getattr(module, name, None)) for name in names]
        if len(found := [layer for layer in layers if layer is not None]) == len(names):
            *gate, up, down = found
            if names in _TWO_IN_ONE:
                halves = zip(up.weight.chunk(2), up.bias.chunk(2), strict=True)
                gated, up = (Linear(*half, up.normed) for half in halves)
                return gated, up, down
            return gate[0] if gate else None, up, down
    return None


def _slope(mlp: MLP, x: Tensor | None, y: Tensor | None) -> float | None:
    """The slope of the activation function with which the formula of an MLP gives y; None if there is none."""
    gate, up, down = mlp
    fits = x is not None and y is not None and x.shape[:-1] == y.shape[:-1] and x.shape[-1] == up.weight.shape[1]
    if x is None or y is None or not fits or not x.numel() or y.shape[-1] != len(down.weight):
        return None
    tolerance = _TOLERANCES.get(x.dtype, _LOOSE)
    x, y = (z.flatten(0, -2)[:_COMPARED].to(up.weight.dtype) if z.ndim > 1 else z[None] for z in (x, y))
    for act, slope in ACTIVATIONS:
        expected = down(act(up(x)) if gate is None else act(gate(x)) * up(x))
        if rms(y - expected) <= tolerance * rms(expected):
            return slope
    return None
