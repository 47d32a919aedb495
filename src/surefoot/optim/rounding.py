"""Stochastic rounding, right on average, to bfloat16 or to 8 bits with one scale per 32 entries."""

import hashlib
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from surefoot.identity import plain_name
from surefoot.linalg import device
from surefoot.linalg.bounds import max_abs

Index = int | Tensor
"""Positions in the flattened whole parameter: the first entry's if all are consecutive, else every entry's."""

BLOCK = 32
"""Number of neighbouring entries along the last dimension that share a scale."""

PIECE = 1 << 17
"""Entries that are rounded at once on a CPU: every pass over them is in its cache, and takes little memory."""

F = TypeVar("F", bound=Callable[..., Any])


def in_pieces(round_: F) -> F:
    """The rounding of a large tensor on a CPU, some of its rows at a time, to the same bits."""

    @wraps(round_)
    def run(x: Tensor, seed: Tensor | None = None, index: Index = 0) -> Any:
        if x.ndim < 2 or x.numel() <= PIECE or isinstance(index, Tensor) or not device.on_cpu(x):
            return round_(x, seed, index)
        width, whole = x[0].numel(), list[Tensor]()
        rows = max(1, PIECE // width)
        for start in range(0, len(x), rows):
            part = round_(x[start : start + rows], seed, index + start * width)
            parts = part if isinstance(part, tuple) else (part,)
            whole = whole or [y.new_empty(len(x), *y.shape[1:]) for y in parts]
            for place, y in zip(whole, parts, strict=True):
                place[start : start + rows] = y
        return tuple(whole) if len(whole) > 1 else whole[0]

    return cast(F, run)


def noise_key(name: str) -> int:
    """A 31-bit key of a parameter's own rounding noise: a hash of its name without wrapper prefixes.

    >>> noise_key("module.layer._orig_mod.weight") == noise_key("layer.weight")
    True
    """
    return int.from_bytes(hashlib.sha256(plain_name(name).encode()).digest()[:4], "big") >> 1


def noise_seed(rounds: Tensor) -> Tensor:
    """The seed of one rounding, int32, from the state's `rounds`, int64: `noise_key << 32`, plus a count of roundings.

    >>> noise_seed(torch.tensor(5 << 32)).dtype
    torch.int32
    """
    low, high = rounds << 32 >> 32, rounds >> 32
    return _hash(high.to(torch.int32)).bitwise_xor_(_hash(low.to(torch.int32)))


@in_pieces
def stochastic(x: Tensor, seed: Tensor, index: Index = 0) -> Tensor:
    """x in bfloat16, rounded up or down at random so that the mean over seeds is x.

    `P(up) = (x - down) / (up - down)`; numbers that bfloat16 represents, and those that are not finite, are unchanged.
    The noise is a hash of (index, seed): the same on every device, and no generator is consumed. Given its index, a
    part of a tensor is rounded as within the whole.

    Args:
        x: float32, any shape.
        seed: int32 scalar, another one for every rounding.
        index: the position of x's first entry in the whole parameter, or the positions of all, in x's shape.

    Returns:
        bfloat16, within one unit in the last place (2**-7 relatively). Cost: ten passes over integers of x's size.

    Source: the hash is "lowbias32", C. Wellons, https://nullprogram.com/blog/2018/07/31/.

    >>> seeds = torch.arange(1000, dtype=torch.int32)
    >>> rounded = torch.stack([stochastic(torch.tensor([1 + 2**-9]), seed) for seed in seeds])
    >>> rounded.unique().tolist(), round(float(rounded.float().mean() - 1) * 2**9, 1)
    ([1.0, 1.0078125], 1.0)
    """
    bits = _noise(x, seed, index).add_(x.contiguous().view(torch.int32))
    rounded = bits.bitwise_and_(-0x10000).view(torch.float32)  # an infinity has no low bits to carry from
    return torch.where(x.isnan(), x, rounded).to(torch.bfloat16)


@in_pieces
def to_int8(x: Tensor, seed: Tensor | None = None, index: Index = 0) -> tuple[Tensor, Tensor]:
    """x as integers below 128 times a power of two that `BLOCK` entries share: 1.03 bytes an entry.

    `P(up)` is as in `stochastic`, but for the largest entries of a block, at most 1/128 of theirs too small. Numbers
    that this format represents are unchanged, also if rounded again.

    Args:
        x: float32, at least one dimension.
        seed: int32 scalar, another one for every rounding; None: to nearest.
        index: as for `stochastic`.

    Returns:
        Integers of x's shape and exponents `(..., ceil(n / BLOCK))`, both int8. Cost: some 15 passes over x.

    Source: the format is MXINT8 of "OCP Microscaling Formats (MX)", version 1.0, 2023.

    >>> to_int8(torch.tensor([1.0, -0.5, 0.0]))
    (tensor([ 64, -32,   0], dtype=torch.int8), tensor([-6], dtype=torch.int8))
    """
    blocks = torch.nn.functional.pad(x, (0, -x.shape[-1] % BLOCK)).reshape(*x.shape[:-1], blocks_of(x.shape[-1]), BLOCK)
    exponents = (torch.frexp(max_abs(blocks, -1)[..., 0]).exponent - 7).clamp_(-126, 126)
    scaled = x / _powers(exponents, x.shape[-1])
    part = 0.5 if seed is None else _noise(x, seed, index) / 65536
    return scaled.add_(part).floor_().clamp_(-127, 127).to(torch.int8), exponents.to(torch.int8)


def from_int8(x: Tensor, exponents: Tensor) -> Tensor:
    """The numbers that `to_int8` has stored, exactly, float32.

    >>> from_int8(*to_int8(torch.tensor([1.0, -0.5, 0.0])))
    tensor([ 1.0000, -0.5000,  0.0000])
    """
    return x * _powers(exponents, x.shape[-1])


def blocks_of(size: int) -> int:
    """How many blocks a dimension of this size has."""
    return -(-size // BLOCK)


def _powers(exponents: Tensor, size: int) -> Tensor:
    """Two to the exponent of each entry's block, `(..., size)`; built from bits, so equal on every device."""
    return (exponents.to(torch.int32) + 127 << 23).view(torch.float32).repeat_interleave(BLOCK, -1)[..., :size]


def _noise(x: Tensor, seed: Tensor, index: Index) -> Tensor:
    """A hash of each entry's position and the seed, uniform in 0 ... 65535, int32."""
    if isinstance(index, Tensor):  # a hash serves two neighbours, 16 bits each
        hashes = _hash((index // 2).to(torch.int32).add_(_hash(seed)))
        return (hashes >> 16 * (index % 2).to(torch.int32)).bitwise_and_(0xFFFF)
    first, last = index // 2, (index + x.numel() + 1) // 2
    hashes = _hash(torch.arange(first, last, dtype=torch.int32, device=x.device).add_(_hash(seed)))
    noise = hashes.view(torch.int16)[index % 2 : index % 2 + x.numel()].to(torch.int32).bitwise_and_(0xFFFF)
    return noise.view(x.shape)


def _hash(x: Tensor) -> Tensor:
    """A bijection of int32 whose low bits look random; a shift keeps the sign, hence the masks."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32))):
        x = (x >> shift).bitwise_and_((1 << 32 - shift) - 1).bitwise_xor_(x).mul_(factor)
    return (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x)
