"""Recipes that were measured and do not pay, or only repeat a publication."""

import math

from surefoot.contrib.momentum import Whitened
from surefoot.geometry import Frobenius, MaxNorm, MeanOperator, RowMean, Spectral
from surefoot.momentum import Adam, Momentum
from surefoot.recipes import Recipe
from surefoot.recipes.published import MATRICES, NESTEROV, hidden, signs
from surefoot.recipes.recipe import build
from surefoot.scaling import FanIn, Moonlight
from surefoot.stabilise import DecoupledWeightDecay, Normalise


def sign_natural() -> Recipe:
    """Lion's pair under (1, inf) with its width factor: the step on a matrix is `sign / d_in`, on an embedding `sign`.

    An embedding's input is one-hot: its (1, inf) norm is the largest entry, and no width divides it.

    >>> sign_natural().role("linear").lr_scale
    Constant(value=1.0)
    """
    matrix, momentum = {"geometry": MeanOperator(1, math.inf)}, Momentum(0.99, 0.9)
    rows, entries = {"geometry": RowMean(math.inf)}, {"geometry": MaxNorm()}
    return build("sign_natural", momentum, linear=matrix, head=matrix, embedding=rows, bias=entries)


def signum(beta: float = 0.9, weight_decay: float = 0.1) -> Recipe:
    """The sign of one momentum, with decay: what MOGA's slides call Lion; no width factor.

    Args:
        beta: kept fraction of the momentum.
        weight_decay: a step takes `lr * weight_decay` of every matrix.

    Returns:
        The recipe `signum`.

    Source: J. Bernstein et al., "signSGD", 2018, arXiv:1802.04434; MOGA's slides, "Lion".

    >>> signum().role("linear").momentum
    Momentum(beta=0.9, lookahead=None)
    """
    return signs("signum", Momentum(beta), FanIn(), DecoupledWeightDecay(weight_decay, FanIn()))


def frobenius_sphere() -> Recipe:
    """Hyperball's sphere under steps in natural units: `W - eta d`, rescaled to its initial Frobenius norm.

    Here the step has norm eta in natural units; under `hyperball` it has Frobenius norm eta times the weight's.

    >>> frobenius_sphere().role("linear").stabiliser.promise
    'Frobenius norm = initial'
    """
    sphere = {"stabiliser": Normalise(norm=Frobenius())}
    return build("frobenius_sphere", NESTEROV, **dict.fromkeys(MATRICES, sphere))


def muon_squared(weight_decay: float = 0.1) -> Recipe:
    """Adam's step made orthogonal: hidden matrices by the sign of `m_hat / sqrt(v_hat)`; AdamW on the rest.

    Args:
        weight_decay: a step takes `lr * weight_decay` of every matrix.

    Returns:
        The recipe `muon_squared`.

    Source: "Muon^2": entries' second moments before the matrix sign.

    >>> muon_squared().role("linear").momentum
    Adam(beta1=0.9, beta2=0.95, eps=1e-08)
    """
    return hidden("muon_squared", Adam(), Spectral(), Moonlight(), weight_decay)


def shampoo_muon(weight_decay: float = 0.1) -> Recipe:
    """Shampoo's whitening before Muon's matrix sign on hidden matrices, see `Whitened`; AdamW on the rest.

    Args:
        weight_decay: a step takes `lr * weight_decay` of every matrix.

    Returns:
        The recipe `shampoo_muon`.

    Source: V. Gupta et al., "Shampoo", 2018, arXiv:1802.09568; "SOAP-Muon".

    >>> shampoo_muon().role("linear").momentum.memory
    0.95
    """
    return hidden("shampoo_muon", Whitened(0.95, 0.95**2), Spectral(), Moonlight(), weight_decay)
