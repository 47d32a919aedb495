"""Optimizers of other publications: each a point of the same space, or a direction of its own."""

import math
from dataclasses import replace

from surefoot.geometry import RMS, Frobenius, HeadRMS, Identity, MaxNorm, MeanOperator, NormalisedRows, Oblique
from surefoot.geometry.base import Geometry
from surefoot.geometry.spectral import Spectral
from surefoot.momentum import Adam, Momentum, Smoothing
from surefoot.recipes.natural import beyond_mup
from surefoot.recipes.recipe import Recipe, build
from surefoot.scaling import Constant, FanIn, Keller, LongerSide, Moonlight, RootFanIn, Scale
from surefoot.stabilise import DecoupledWeightDecay, Free, Hyperball, PostClip, StreamingPostClip, WeightDecay
from surefoot.stabilise.base import Stabiliser

ONE = Constant()
MATRICES, VECTORS = ("linear", "embedding", "head"), ("gain", "bias", "scalar")

NESTEROV = Momentum(0.95, 0.95**2)
"""`u = g + b buffer` with `buffer = b buffer + g`, up to its length."""


def muon(scale: Scale = Keller(), adam_lr: float | None = None) -> Recipe:  # noqa: B008
    """Muon as published: spectral on hidden matrices, Nesterov .95, decay `lr * 0.1`; AdamW on all the rest.

    The matrix sign is close to exact here; the published one is five Newton-Schulz steps.

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
        raise ValueError(f"Moonlight's scale gives AdamW the same learning rate: leave out adam_lr={adam_lr}")
    ratio = Constant(1.0 if shares else 0.015 if adam_lr is None else adam_lr)
    return hidden(f"muon({type(scale).__name__.lower()})", NESTEROV, Spectral(), scale, 0.1, adam=ratio)


def scion(radius: float = 50.0, head_radius: float = 3000.0) -> Recipe:
    """Scion as published: `(1 - lr) w - lr * radius * d` keeps each norm below max(initial, radius) for lr <= 1.

    The published one decays a row without gradient; here it rests.

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
    head = {"geometry": MeanOperator(1, math.inf), "radius_unit": Constant(), "lr_scale": Constant(head_radius)}
    head["stabiliser"] = WeightDecay(1 / head_radius)
    others = dict.fromkeys(("linear", "embedding", "bias", "scalar"), body)
    return build("scion", Momentum(0.9), head=head, gain=body | {"geometry": RMS()}, **others)


def lion() -> Recipe:
    """Lion as published: the sign of the look-ahead, (0.99, 0.9), decay `lr * 0.1` on matrices; no width factor.

    The published one moves an entry whose gradient is exactly zero by its momentum's sign; here it rests.

    Source: X. Chen et al., "Symbolic discovery of optimization algorithms", 2023.

    >>> lion().role("gain").geometry
    MaxNorm()
    """
    return signs("lion", Momentum(0.99, 0.9), FanIn(), DecoupledWeightDecay(0.1, FanIn()))


def sign_sgd() -> Recipe:
    """The sign of the gradient, as published: no momentum, no state, no width factor, no decay.

    >>> sign_sgd().role("linear").momentum
    Momentum(beta=0.0, lookahead=None)
    """
    return signs("sign_sgd", Momentum(0.0), FanIn(), Free())


def signs(name: str, momentum: Momentum, scale: Scale, stabiliser: Stabiliser) -> Recipe:
    """Signs of the momentum for every entry; of matrices with a scale and a stabiliser."""
    matrix = {"geometry": MeanOperator(1, math.inf), "lr_scale": scale, "stabiliser": stabiliser}
    return build(name, momentum, **dict.fromkeys(MATRICES, matrix), bias={"geometry": MaxNorm()})


def hyperball() -> Recipe:
    """Hyperball as published on the role table's directions: every matrix keeps its initial Frobenius norm R.

    `W <- R n(W - eta R n(d))`, `n(x) = x / |x|_F`: the learning rate is relative to each matrix. Nesterov .95.

    Source: K. Wen et al., "Fantastic pretraining optimizers and where to find them II: Hyperball", arXiv 2606.16899.

    >>> hyperball().role("linear").stabiliser.promise
    'Frobenius norm = initial, by steps of eta of it'
    """
    return build("hyperball", NESTEROV, **{kind: {"stabiliser": Hyperball()} for kind in MATRICES})


def moonlight() -> Recipe:
    """Muon under Moonlight's scale, as published: `muon(Moonlight())`.

    Source: J. Liu et al., "Muon is scalable for LLM training", 2025, arXiv:2502.16982.

    >>> moonlight().role("linear").lr_scale
    Moonlight()
    """
    return Recipe("moonlight", muon(Moonlight()).table)


def scale() -> Recipe:
    """SCALE: every output's gradient divided by its RMS, momentum on the LM head alone, matrices otherwise stateless.

    The paper's columns are rows here, its matrices being `(d_in, d_out)`; an embedding's are its features. Vectors use
    AdamW (.9, .999).

    Source: A. Glentis et al., "A minimalist optimizer design for LLM pretraining", 2025, arXiv:2506.16659; its
    code.

    >>> scale().role("linear").momentum, scale().role("head").momentum
    (Momentum(beta=0.0, lookahead=None), Momentum(beta=0.9, lookahead=None))
    """
    rows = {"geometry": MeanOperator(2, math.inf), "lr_scale": FanIn()}
    tables = {"embedding": rows | {"geometry": MeanOperator(1, 2)}}
    tables["head"] = rows | {"geometry": HeadRMS(), "momentum": Momentum(0.9)}
    vector = {"geometry": Identity(), "momentum": Adam(beta2=0.999)}
    return build("scale", Momentum(0.0), linear=rows, **tables, **dict.fromkeys(VECTORS, vector))


def mano(weight_decay: float = 0.1) -> Recipe:
    """Mano: hidden matrices by columns and rows in turn, tangent to the weight, see `Oblique`; AdamW on the rest.

    Args:
        weight_decay: a step takes `lr * weight_decay` of every parameter.

    Returns:
        The recipe `mano`.

    Source: Y. Gu, Z. Xie, "Mano: restriking manifold optimization for LLM training", 2026, arXiv:2601.23000, and its
    code.

    >>> mano().role("linear").momentum
    Momentum(beta=0.95, lookahead=None)
    """
    return hidden("mano", Momentum(0.95), Oblique(), ONE, weight_decay, vectors=True)


def rmnp(weight_decay: float = 0.1) -> Recipe:
    """RMNP: Muon with each row of the momentum normalised in place of the matrix sign; AdamW on the rest.

    The step of a hidden matrix is `lr sqrt(max(1, d_out/d_in)) u_i / |u_i|` for each row, u by Nesterov .95.

    Args:
        weight_decay: a step takes `lr * weight_decay` of every matrix.

    Returns:
        The recipe `rmnp`.

    Source: S. Deng et al., "RMNP: row-momentum normalized preconditioning for scalable matrix-based optimization",
    2026, arXiv:2603.20527; its code.

    >>> rmnp().role("linear").geometry
    MeanOperator(p=2.0, q=inf)
    """
    return hidden("rmnp", NESTEROV, MeanOperator(2.0, math.inf), LongerSide(), weight_decay)


def normalised_sgd(beta: float = 0.9) -> Recipe:
    """Every parameter's momentum divided by its RMS: `w - lr m / rms(m)`, no decay.

    Args:
        beta: kept fraction of the momentum.

    Returns:
        The recipe `normalised_sgd`.

    Source: the RMS norm on everything in "Beyond MuP"; E. Hazan, K. Levy, S. Shalev-Shwartz, "Beyond convexity", 2015.

    >>> normalised_sgd().role("head").geometry
    Frobenius()
    """
    whole, vector = {"geometry": Frobenius(), "lr_scale": RootFanIn()}, {"geometry": RMS()}
    return build("normalised_sgd", Momentum(beta), **dict.fromkeys(MATRICES, whole), gain=vector, scalar=vector)


def wion(radius: float = 5.0, vectors: int = 1) -> Recipe:
    """`beyond_mup` with the leading singular value of each hidden matrix clipped to about radius after every step.

    Embeddings, heads and vectors are clipped whole, to radius in their units.

    Args:
        radius: in natural units; 5 is the article's example.
        vectors: how many singular values of a matrix are tracked.

    Returns:
        The recipe `wion(<radius>)`.

    Source: "Beyond MuP 4", Post Clip of the leading term, which names R. Anil's "Wion".

    >>> wion(2.0).role("linear").stabiliser
    StreamingPostClip(radius=2.0, vectors=1)
    """
    table = {kind: replace(role, stabiliser=PostClip(radius)) for kind, role in beyond_mup().table.items()}
    table["linear"] = replace(table["linear"], stabiliser=StreamingPostClip(radius, vectors))
    return Recipe(f"wion({radius:g})", table)


def normuon(weight_decay: float = 0.1) -> Recipe:
    """NorMuon: rows of Muon's step divided by their own history, entries of RMS 0.2 lr; AdamW on the rest.

    The published step has RMS 0.2 lr exactly; this one only where the momentum has full rank.

    Args:
        weight_decay: a step takes `lr * weight_decay` of every matrix.

    Returns:
        The recipe `normuon`.

    Source: Z. Li et al., "NorMuon: making Muon more efficient and scalable", 2025, arXiv:2510.05491.

    >>> normuon().role("linear").geometry
    NormalisedRows(norm_of=Spectral(method='auto'), beta=0.95)
    """
    return hidden("normuon", Momentum(0.95), NormalisedRows(), Moonlight(), weight_decay)


def hidden(
    name: str, momentum: Smoothing, norm: Geometry, scale: Scale, decay: float, adam: Scale = ONE, vectors: bool = False
) -> Recipe:
    """A geometry and a scale for hidden matrices, AdamW on all the rest; decay of all matrices, or of vectors, too."""
    linear = {"geometry": norm, "lr_scale": scale, "stabiliser": DecoupledWeightDecay(decay, scale)}
    adamw = {"geometry": Identity(), "momentum": Adam(), "lr_scale": adam}
    table = adamw | {"stabiliser": DecoupledWeightDecay(decay, ONE)}
    others = dict.fromkeys(VECTORS, table if vectors else adamw)
    return build(name, momentum, linear=linear, embedding=table, head=table, **others)
