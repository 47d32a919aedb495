"""Recipes of the sources, and published optimizers as points of one space."""

from __future__ import annotations

import math

from surefoot.geometry import RMS, Geometry, HeadRMS, Identity, MaxNorm, MeanOperator, RowMean, VectorMean
from surefoot.momentum import Adam, Momentum
from surefoot.recipes.recipe import Recipe, build
from surefoot.scaling import Constant, FanIn, Keller, Moonlight, Scale
from surefoot.stabilise import DecoupledWeightDecay, Free, Hyperball, Stabiliser, WeightDecay


def beyond_mup() -> Recipe:
    """The role table itself: spectral, row RMS, head, sign and RMS, each under its own norm.

    Momentum pair and the factors of head, gain and bias are tuned numbers in natural units, the same at every width.

    Source: "Beyond MuP 2" and "3"; the tuned numbers from studies/defaults, see docs/transfer.md.

    >>> beyond_mup().role("linear").geometry
    Spectral(method='auto')
    """
    quarter = {"lr_scale": Constant(0.25)}
    return build("beyond_mup", Momentum(0.9, 0.8), head={"lr_scale": Constant(16.0)}, gain=quarter, bias=quarter)


def moga_row(p: float = 2.0, head_p: float = 2.0, bias_q: float = math.inf) -> Recipe:
    """MOGA with the row geometry (p, inf) on linear layers; embedding by row RMS, head (2, inf), vectors by sign.

    Args:
        p: exponent of the input's mean, at least 1.
        head_p: the same for the LM head, whose rule is (head_p, inf).
        bias_q: exponent of the mean that biases are steepest under; inf is the sign.

    Returns:
        The recipe `moga_row(<p>)`, with the arguments that are not the default.

    Source: MOGA, Algorithm 1 with its look-ahead pair.

    >>> moga_row(1.5).role("linear").geometry
    MeanOperator(p=1.5, q=inf)
    """
    return _moga(f"moga_row({p:g}", MeanOperator(p, math.inf), RowMean(2.0), head_p, bias_q)


def moga_column(q: float = 2.0, head_p: float = 2.0, bias_q: float = math.inf) -> Recipe:
    """MOGA with the column geometry (1, q) on linear layers; embedding by the one-hot q rule, head (2, inf).

    Args:
        q: exponent of the output's mean, at least 1.
        head_p: as in `moga_row`.
        bias_q: as in `moga_row`; q is Algorithm 1's alternative to the sign.

    Returns:
        The recipe `moga_column(<q>)`, with the arguments that are not the default.

    >>> moga_column().role("embedding").geometry
    RowMean(q=2.0)
    """
    return _moga(f"moga_column({q:g}", MeanOperator(1, q), RowMean(q), head_p, bias_q)


def _moga(name: str, linear: Geometry, embedding: Geometry, head_p: float, bias_q: float) -> Recipe:
    others = {"head_p": (head_p, 2.0), "bias_q": (bias_q, math.inf)}
    changed = [f", {key}={value:g}" for key, (value, usual) in others.items() if value != usual]
    return build(
        "".join([name, *changed, ")"]),
        Momentum(0.95, 0.9),
        linear={"geometry": linear},
        embedding={"geometry": embedding},
        head={"geometry": HeadRMS() if head_p == 2 else MeanOperator(head_p, math.inf)},
        bias={"geometry": RMS() if bias_q == 2 else MaxNorm() if math.isinf(bias_q) else VectorMean(bias_q)},
    )


def muon(scale: Scale = Keller(), adam_lr: float | None = None) -> Recipe:  # noqa: B008
    """Muon as published: spectral on hidden matrices, Nesterov .95, decay `lr * 0.1`; AdamW on all the rest.

    The matrix sign is close to exact where the published one is five Newton-Schulz steps.

    Args:
        scale: `Keller()`, `Moonlight()` or `Natural()`.
        adam_lr: learning rate of the AdamW parts relative to the group's; default 0.015 (3e-4 beside 0.02 in
            Keller's release), and 1 for Moonlight, whose scale is made to share one rate.

    Returns:
        The recipe `muon(<scale>)`.

    Raises:
        ValueError: an `adam_lr` for Moonlight.

    Source: K. Jordan, "Muon", 2024; J. Liu et al., "Muon is scalable for LLM training", 2025.

    >>> muon().role("head").momentum
    Adam(beta1=0.9, beta2=0.95, eps=1e-08)
    """
    shares = isinstance(scale, Moonlight)
    if shares and adam_lr is not None:
        raise ValueError(f"Moonlight's scale shares one learning rate with AdamW: adam_lr={adam_lr} has no place")
    ratio = Constant(1.0 if shares else 0.015 if adam_lr is None else adam_lr)
    vector = {"geometry": Identity(), "momentum": Adam(), "lr_scale": ratio}
    matrix = vector | {"stabiliser": DecoupledWeightDecay(0.1, Constant())}
    hidden = {"lr_scale": scale, "momentum": Momentum(0.95, 0.95**2), "stabiliser": DecoupledWeightDecay(0.1, scale)}
    return build(
        f"muon({type(scale).__name__.lower()})",
        Momentum(0.95, 0.95**2),
        linear=hidden,
        **dict.fromkeys(("embedding", "head"), matrix),
        **dict.fromkeys(("gain", "bias", "scalar"), vector),
    )


def scion(radius: float = 50.0, head_radius: float = 3000.0) -> Recipe:
    """Scion as published: `(1 - lr) w - lr * radius * d` keeps each norm below max(initial, radius) for lr <= 1.

    Except that a row without gradient rests, as everywhere here, where the published one decays it.

    Spectral on hidden matrices, row RMS on the embedding, sign on the head, RMS on vectors; average .9.

    Args:
        radius: of all weights but the head's.
        head_radius: the head's.

    Returns:
        The recipe `scion`.

    Source: T. Pethick et al., "Training deep learning models with norm-constrained LMOs", 2025.

    >>> scion().role("linear").stabiliser.promise
    'norm <= max(initial, 50) by decay while eta <= 50'
    """
    body = {"lr_scale": Constant(radius), "stabiliser": WeightDecay(1 / radius)}
    head = {"lr_scale": Constant(head_radius), "stabiliser": WeightDecay(1 / head_radius)}
    return build(
        "scion",
        Momentum(0.9),
        linear=body,
        embedding=body,
        head=head | {"geometry": MeanOperator(1, math.inf), "radius_unit": Constant()},
        gain=body | {"geometry": RMS()},
        bias=body,
        scalar=body,
    )


def lion() -> Recipe:
    """Lion as published: the sign of the look-ahead, (0.99, 0.9), decay `lr * 0.1` on matrices; no width factor.

    Except that an entry whose gradient is exactly zero rests, where the published one moves by its momentum's sign.

    Source: X. Chen et al., "Symbolic discovery of optimization algorithms", 2023.

    >>> lion().role("gain").geometry
    MaxNorm()
    """
    return _signs("lion", Momentum(0.99, 0.9), FanIn(), DecoupledWeightDecay(0.1, FanIn()))


def sign_sgd() -> Recipe:
    """The sign of the gradient, as published: no momentum, no state, no width factor, no decay.

    >>> sign_sgd().role("linear").momentum
    Momentum(beta=0.0, lookahead=None)
    """
    return _signs("sign_sgd", Momentum(0.0), FanIn(), Free())


def _signs(name: str, momentum: Momentum, scale: Scale, stabiliser: Stabiliser) -> Recipe:
    matrix = {"geometry": MeanOperator(1, math.inf), "lr_scale": scale, "stabiliser": stabiliser}
    return build(name, momentum, **dict.fromkeys(("linear", "embedding", "head"), matrix), bias={"geometry": MaxNorm()})


def hyperball() -> Recipe:
    """Hyperball as published on the role table's directions: every matrix keeps its initial Frobenius norm R.

    `W <- R n(W - eta R n(d))`, `n(x) = x / |x|_F`: the learning rate is relative to each matrix. Nesterov .95.

    Source: K. Wen et al., "Fantastic pretraining optimizers and where to find them II: Hyperball", arXiv 2606.16899.

    >>> hyperball().role("linear").stabiliser.promise
    'Frobenius norm = initial, by steps of eta of it'
    """
    change = {"stabiliser": Hyperball()}
    return build("hyperball", Momentum(0.95, 0.95**2), **dict.fromkeys(("linear", "embedding", "head"), change))
