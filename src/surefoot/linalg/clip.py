"""`mclip`: clip the singular values of a matrix at a threshold; `mshrink` and `spectral_norm` by the same means."""

from collections.abc import Callable

import torch
from torch import Tensor

from surefoot.linalg.bounds import gram_is_below, is_below, max_abs_or_one, unit_gram
from surefoot.linalg.device import full_precision
from surefoot.linalg.polar import msign, require_matrices
from surefoot.linalg.small_eigh import finite_only

EIGH_DEVICES = frozenset({"cpu"})
"""Device types on which `auto` takes eigendecompositions only; elsewhere `msign` where it is accurate enough."""

PIECE = 1 << 16
"""Entries of the matrices clipped at a time on a CPU, where LAPACK takes them one by one: twenty copies of those
are alive at once."""


def mclip(x: Tensor, threshold: float | Tensor, method: str = "auto") -> Tensor:
    """Singular value clipping `U min(S, t) Vᵀ`: the nearest matrix (Frobenius) with `sigma_max <= t`.

    A matrix whose singular values are all at most t is returned bit for bit (by `msign`: if `is_below` proves it).

    | method | how | error of the result, relative to t, at any rank and condition | time, in msigns |
    |---|---|---|---|
    | `svd` | float64 SVD | one rounding to x's dtype | 4 |
    | `gram` | float64 eigendecomposition of the smaller Gram matrix | one rounding, plus `1e-16 (sigma_max/t)²` | 2 |
    | `msign` | two msigns: products only; float32 and float64 | `2e-5 sigma_max/t` | 8 |

    | matrices | method that `auto` takes |
    |---|---|
    | those that a float64 Cholesky factor proves to be below t (half an msign for all) | none: x itself |
    | on a CPU, any shape: the others | `gram`, and `svd` where `sigma_max > 1e4 t` |
    | on an accelerator: others in float32 with `sigma_max <= 2 t` | `msign` |
    | on an accelerator: the rest | as on a CPU |

    The times are for a CPU at 768 x 768; on accelerators they are not measured. `auto` and `gram` synchronise.

    Args:
        x: `(..., out, in)`, floating point.
        threshold: t >= 0, a number or a tensor that broadcasts against x (`(..., 1, 1)`).
        method: `svd`, `gram`, `msign` or `auto`.

    Returns:
        A new tensor of x's shape and dtype.

    Raises:
        ValueError: no real matrix, an unknown method, a threshold below 0 as a number, or `msign` in half precision.

    Source: J. Su, "Computing singular value clipping via msign"; spec of the nearest point: "Beyond MuP 4", eq. 5.

    >>> mclip(torch.tensor([[3.0, 0.0], [0.0, 1.0]]), 2.0).tolist()
    [[2.0, 0.0], [0.0, 1.0]]
    """
    require_matrices(x, "mclip")
    if method not in METHODS:
        raise ValueError(f"unknown mclip method {method!r}; choose one of {', '.join(METHODS)}")
    if not isinstance(threshold, Tensor) and not threshold >= 0:
        raise ValueError(f"mclip's threshold must be at least 0, not {threshold}")
    if x.numel() == 0:
        return x.clone()
    wide = x if x.shape[-2] <= x.shape[-1] else x.mT
    limit = torch.as_tensor(threshold, dtype=torch.float64, device=x.device).expand(*x.shape[:-2], 1, 1)
    batch, limits = wide.reshape(-1, *wide.shape[-2:]), limit.reshape(-1, 1, 1)
    at_once = max(1, PIECE // batch[0].numel()) if x.device.type in EIGH_DEVICES else len(batch)
    pieces = zip(torch.split(batch, at_once), torch.split(limits, at_once), strict=True)
    clipped = torch.cat([METHODS[method](*piece) for piece in pieces]).reshape(wide.shape)
    return clipped if wide is x else clipped.mT


def spectral_norm(x: Tensor) -> Tensor:
    """The largest singular value of each matrix, from the float64 Gram matrix, with a relative error below 1e-7.

    Args:
        x: `(..., out, in)`, floating point.

    Returns:
        `(...)`, in x's dtype (float32 for half precision).

    >>> spectral_norm(torch.tensor([[3.0, 0.0], [0.0, -4.0]]))
    tensor(4.)
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.numel() == 0:
        return x.new_zeros(x.shape[:-2], dtype=dtype)
    _, gram, peak = unit_gram(x)
    norm: Tensor = finite_only(torch.linalg.eigvalsh, gram)[..., -1].clamp_min(0).sqrt() * peak[..., 0, 0]
    return norm.to(dtype)


def mshrink(x: Tensor, factor: float | Tensor) -> tuple[Tensor, Tensor]:
    """`mclip(x, factor * sigma_max(x))` and `sigma_max(x)`, from one eigendecomposition of the float64 Gram matrix.

    Args:
        x: `(..., out, in)`, floating point.
        factor: in [0, 1], a number or a tensor that broadcasts against x (`(..., 1, 1)`); 1 returns x bit for bit.

    Returns:
        The clipped matrices, a new tensor like x, to one rounding; and `sigma_max`, `(...)`, in x's dtype (float32 for
        half precision).

    >>> shrunk, top = mshrink(torch.tensor([[3.0, 0.0], [0.0, 1.0]]), 0.5)
    >>> shrunk.tolist(), top
    ([[1.5, 0.0], [0.0, 1.0]], tensor(3.))
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.numel() == 0:
        return x.clone(), x.new_zeros(x.shape[:-2], dtype=dtype)
    wide = (x if x.shape[-2] <= x.shape[-1] else x.mT).reshape(-1, *sorted(x.shape[-2:]))
    factor = torch.as_tensor(factor, dtype=torch.float64, device=x.device).expand(*x.shape[:-2], 1, 1).reshape(-1, 1, 1)
    unit, gram, peak = unit_gram(wide)
    values, q = finite_only(torch.linalg.eigh, gram)
    s = values.clamp_min(0).sqrt()[:, None, :]
    limit = factor * s[..., -1:]
    excess = (q * torch.where(s > limit, 1 - limit / s, 0)) @ (q.mT @ unit) * peak
    shrunk = torch.where(factor < 1, (wide - excess).to(x.dtype), wide)
    top = (s[..., -1:] * peak).to(dtype).reshape(x.shape[:-2])
    return (shrunk if x.shape[-2] <= x.shape[-1] else shrunk.mT).reshape(x.shape), top


# Each method takes wide matrices `(b, m, n)`, m <= n, and limits `(b, 1, 1)` in float64, and returns a new tensor.


def _auto(x: Tensor, limit: Tensor) -> Tensor:
    unit, gram, peak = unit_gram(x)
    above = ~gram_is_below(gram, limit / peak, x.shape[-1])
    clipped = x.clone()
    if x.device.type not in EIGH_DEVICES and x.dtype == torch.float32:
        near = above & gram_is_below(gram, 2 * limit / peak, x.shape[-1])
        clipped[near] = _two_signs(x[near], limit[near])
        above = above & ~near
    if bool(above.any()):
        result, top = _shrink(x[above], limit[above], unit[above], gram[above], peak[above])
        far = (top > 1e4 * limit[above])[:, 0, 0]
        if bool(far.any()):
            result[far] = _by_svd(x[above][far], limit[above][far])
        clipped[above] = result
    return clipped


def _by_svd(x: Tensor, limit: Tensor) -> Tensor:
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    clipped = (u * torch.minimum(s[..., None, :], limit)) @ vh
    return torch.where(s[..., :1, None] > limit, clipped.to(x.dtype), x)


def _shrink(x: Tensor, limit: Tensor, unit: Tensor, gram: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
    """`x - Q (1 - t/s) Qᵀ x` over the eigenvectors Q of x xᵀ with s > t, given `unit_gram(x)`; and the largest s."""
    values, q = finite_only(torch.linalg.eigh, gram)
    s = values.clamp_min(0).sqrt()[:, None, :] * peak
    first = s.shape[-1] - int((s > limit).sum(-1).amax())  # usually few columns, in both products
    q, top, s = q[..., first:], s[..., -1:], s[..., first:]
    excess = (q * torch.where(s > limit, 1 - limit / s, 0)) @ (q.mT @ unit) * peak
    clipped = (x - excess) * (limit > 0)  # exactly zero for t = 0
    return torch.where(top > limit, clipped.to(x.dtype), x), top


def _by_msign(x: Tensor, limit: Tensor) -> Tensor:
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"mclip by msign loses the bound in {x.dtype}: convert to float32, or take gram")
    return torch.where(is_below(x, limit)[:, None, None], x, _two_signs(x, limit))


def _two_signs(x: Tensor, limit: Tensor) -> Tensor:
    """`(x + t m - sign(t I - H) (t m - x))/2` for x = H m: the sign is -1 above t, 1 below, whatever m is there.

    The published form, `(t I - x mᵀ) msign(t m - x)` in the last term, needs m exactly orthogonal: a singular value
    that is too small for m to have reached 1 comes back wrong by up to t/2. Here m must be right only near t and above.
    """
    peak = max_abs_or_one(x)
    unit = x / peak
    t = (limit / peak).to(x.dtype)
    with full_precision(x.device):
        m = msign(unit, "polar_express")
        h = unit @ m.mT
        side = msign(t * torch.eye(x.shape[-2], dtype=x.dtype, device=x.device) - (h + h.mT) / 2, "polar_express")
        clipped = (unit + t * m - side @ (t * m - unit)) / 2
    return clipped * peak * (limit > 0)


METHODS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "auto": _auto,
    "svd": _by_svd,
    "gram": lambda x, limit: _shrink(x, limit, *unit_gram(x))[0],
    "msign": _by_msign,
}
