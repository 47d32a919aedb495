"""Recipes of the sources: a table of norms in natural units, the same at every width."""

import math

from surefoot.geometry import RMS, Geometry, HeadRMS, MaxNorm, MeanOperator, RowMean, VectorMean
from surefoot.momentum import Momentum
from surefoot.recipes.recipe import Recipe, build
from surefoot.scaling import Constant


def beyond_mup() -> Recipe:
    """The natural role table: every role under its own norm (spectral, row RMS, head, sign, RMS).

    The momentum pair and the factors of head, gain and bias are tuned in natural units, the same at every width.

    Source: "Beyond MuP 2" and "3"; the tuned numbers from studies/defaults, see docs/other-recipes.md.

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
        bias_q: exponent of the mean that is the norm of biases; inf gives signs.

    Returns:
        The recipe `moga_row(<p>)`, named with arguments that are not the default.

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
        The recipe `moga_column(<q>)`, named with arguments that are not the default.

    >>> moga_column().role("embedding").geometry
    RowMean(q=2.0)
    """
    return _moga(f"moga_column({q:g}", MeanOperator(1, q), RowMean(q), head_p, bias_q)


def _moga(name: str, linear: Geometry, embedding: Geometry, head_p: float, bias_q: float) -> Recipe:
    others = {"head_p": (head_p, 2.0), "bias_q": (bias_q, math.inf)}
    changed = [f", {key}={value:g}" for key, (value, usual) in others.items() if value != usual]
    head = HeadRMS() if head_p == 2 else MeanOperator(head_p, math.inf)
    bias = RMS() if bias_q == 2 else MaxNorm() if math.isinf(bias_q) else VectorMean(bias_q)
    norms = {"linear": linear, "embedding": embedding, "head": head, "bias": bias}
    changes = {kind: {"geometry": norm} for kind, norm in norms.items()}
    return build("".join([name, *changed, ")"]), Momentum(0.95, 0.9), **changes)
