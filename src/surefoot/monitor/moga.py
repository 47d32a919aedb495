"""MOGA's theorem: the block norm of a model, its dual, and a Lipschitz constant of the loss that no width enters.

The block norm of `x -> W_K act(... act(W_1 x + b_1) ...) + b_K` is the largest of

- `|W_1|_{1 -> (q, mean)} = max_c mean_q(W_1[:, c])`: inputs of bounded l1 norm, a token's one-hot vector for example;
- `|W_i|_{(p, mean) -> (q, mean)}`, `1 < i < K`: `MeanOperator(p, q)`;
- `|W_K|_{(p, mean) -> inf} = d**(1/p) max_r |W_K[r]|_p'`: `MeanOperator(p, inf)`;
- `max |b_i|`.

Source: Y. Lu, R. Xu, J. Li, "On the Width Scaling of Neural Optimizers: A Matrix Operator Norm Perspective", 2026, the
theorem on Lipschitz bounds; the constant is derived in `lipschitz_bound`.
"""

import math
from collections.abc import Iterator
from functools import reduce

import torch
from torch import Tensor, nn

from surefoot.geometry import Geometry, MaxNorm, MeanOperator, RowMean, TransposedConvSpectral, dual_norm
from surefoot.linalg.device import whole_of, widened
from surefoot.monitor.maxima import larger
from surefoot.plan import Plan
from surefoot.recipes import beyond_mup


@torch.no_grad()
def block_norm(model: nn.Module, p: float, q: float, plan: Plan | None = None) -> float:
    """The block norm of a model's weights.

    The plan says which matrix is which: embeddings and positions are `W_1`, LM heads and routers `W_K`, all other
    matrices are hidden, and vectors are biases. In a plain `nn.Sequential` whose plan has neither embedding nor head,
    the first matrix is `W_1` and the last `W_K`. For fused and stacked matrices the largest block counts.

    Args:
        model: any module; the theorem is about MLPs.
        p: exponent of a hidden matrix's input mean, at least 1.
        q: exponent of its output mean, at least p.
        plan: of the model; default `Plan.of(model, recipes.beyond_mup())`, a norm for each projection.

    Returns:
        The norm, to a relative error of 1e-6; not finite if a weight is not. Cost: one pass, and the singular values of
        hidden matrices for (2, 2).

    Raises:
        ValueError: exponents out of order, or a pair without a closed form (see `MeanOperator`); a transposed
            convolution, which is not such an operator.

    >>> model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
    >>> _ = model[0].weight.data.fill_(3.0), model[2].weight.data.copy_(torch.tensor([[1.0, -5.0]]))
    >>> block_norm(model, 1, 2)  # max(mean_2(3, 3), 2 * 5)
    10.0
    """
    plan = plan or Plan.of(model, beyond_mup())
    norms = [norm.norm(block) for norm, block in _blocks(model, plan, p, q, gradients=False)]
    return reduce(larger, (float(each.max()) for each in norms if each.numel()), 0.0)


@torch.no_grad()
def block_dual_norm(model: nn.Module, p: float, q: float, plan: Plan | None = None) -> float:
    """The dual of the block norm, of a model's gradients: the sum of the blocks' dual norms.

    It is the rate at which the loss can change when parameters move by block norm 1, so its largest value is the loss's
    Lipschitz constant under that norm. A parameter without a gradient adds nothing.

    Args:
        model: after `loss.backward()`.
        p: as in `block_norm`.
        q: as in `block_norm`.
        plan: as in `block_norm`.

    Returns:
        The dual norm, to a relative error of 1e-5. Cost: as `block_norm`.

    Raises:
        ValueError: as in `block_norm`.

    >>> model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
    >>> for weight in model.parameters(): weight.grad = torch.ones_like(weight)
    >>> round(block_dual_norm(model, 1, 2), 4)  # 2 + (1 + 1) / 2: steps of ones, and of 1/2 for the head
    3.0
    """
    plan = plan or Plan.of(model, beyond_mup())
    duals = [dual_norm(norm, block) for norm, block in _blocks(model, plan, p, q, gradients=True)]
    return sum(float(each.sum()) for each in duals)


def lipschitz_bound(radius: float, layers: int, inputs: float = 1.0, slope: float = 1.0) -> float:
    """Lipschitz constant of the cross entropy of an MLP under the block norm, on the ball `block norm <= radius`.

    For all parameters w, v in the ball: `|loss(w) - loss(v)| <= bound * block_norm(w - v)`, hence
    `block_dual_norm` is at most the bound. Neither a width nor p and q enters.

    With `h_1 = W_1 x + b_1`, `h_i = W_i act(h_(i-1)) + b_i`, C the radius, X the inputs, L the slope:

    1. `mean_q(h_1) <= C X + C`, since `mean_q(W_1 x) <= |W_1| |x|_1` and `mean_q(b) <= max |b|`.
    2. `|act(u)| <= L |u|` and `mean_p <= mean_q` for p <= q, so `mean_p(act(h_i)) <= L mean_q(h_i)`: with
       `H_1 = C (X + 1)`, `H_i = C (L H_(i-1) + 1)`, all `mean_q(h_i) <= H_i`. For the logits, i = K, it is `max |h_K|`.
    3. A change of the parameters of block norm t changes h_1 by `t (X + 1)` at most, and h_i, to first order, by its
       own layer's `t (L H_(i-1) + 1)` and by what comes through, `C L` times the change of `h_(i-1)`: the change of
       h_i is at most `t D_i` with `D_1 = X + 1`, `D_i = C L D_(i-1) + L H_(i-1) + 1`.
    4. The gradient of the cross entropy, `softmax - one_hot`, has l1 norm at most 2, so the loss changes by `2 t D_K`
       at most, and so does a mean over samples. The ball is convex: the bound on the derivative is one on differences.

    Args:
        radius: C.
        layers: K, the number of linear layers.
        inputs: X, bound on the l1 norm of an input; 1 for one-hot inputs.
        slope: L, the activation's largest slope: 1 for ReLU and tanh, 1.129 for GELU. It is 0 at 0.

    Returns:
        `2 D_K`.

    Raises:
        ValueError: a number that is negative or not finite, or no layer.

    Source: the theorem of the module's page, whose constant is not published; this one by the steps above.

    >>> lipschitz_bound(1.0, layers=2)  # D_1 = 2, H_1 = 2, D_2 = 2 + 2 + 1
    10.0
    """
    if layers < 1 or min(radius, inputs, slope) < 0 or not math.isfinite(radius + inputs + slope):
        given = f"radius={radius}, layers={layers}, inputs={inputs}, slope={slope}"
        raise ValueError(f"a bound needs at least one layer and finite numbers that are not negative, not {given}")
    size, change = radius * (inputs + 1), inputs + 1
    for _ in range(layers - 1):
        size, change = radius * (slope * size + 1), radius * slope * change + slope * size + 1
    return 2.0 * change


def _blocks(model: nn.Module, plan: Plan, p: float, q: float, gradients: bool) -> Iterator[tuple[Geometry, Tensor]]:
    """Each block of each parameter, or of its gradient, with its part of the norm."""
    hidden, out = MeanOperator(p, q), MeanOperator(p, math.inf)
    first, last = _ends(model, plan)
    for name, placement in plan.placements.items():
        role, parameter = placement.role, model.get_parameter(name)
        if isinstance(role.geometry, TransposedConvSpectral):
            raise ValueError(f"{name} is a transposed convolution: its matrix is not the layer's operator")
        values = parameter.grad if gradients else parameter.detach()
        if values is None:
            continue
        for block in role.view.split(widened(whole_of(values))):
            if block.ndim < 3:
                yield MaxNorm(), block
            elif role.name in ("embedding", "positions"):
                yield RowMean(q), block
            elif name == first:
                yield RowMean(q), block.mT
            else:
                yield out if name == last or role.name in ("head", "router", "tied_positions") else hidden, block


def _ends(model: nn.Module, plan: Plan) -> tuple[str, str]:
    """The first and the last matrix of an `nn.Sequential` without embedding and head; else two names that are none."""
    roles = {placement.role.name for placement in plan.placements.values()}
    matrices = [name for name, placement in plan.placements.items() if len(placement.blocks[0]) > 2]
    plain = type(model) is nn.Sequential and not roles & {"embedding", "head"} and len(matrices) > 1
    return (matrices[0], matrices[-1]) if plain else ("", "")
