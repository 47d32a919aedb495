"""Tensors the laws are tried on: shapes and families, each from its own seeded generator."""

from collections.abc import Iterator

import numpy as np
import torch

SHAPES = {
    2: ((6, 3), (3, 6), (4, 4), (1, 5), (5, 1), (1, 1), (3, 4, 6), (2, 2, 5, 3)),
    1: ((7,), (1,), (3, 5), (2, 2, 4)),
}
EMPTY = {2: ((0, 3), (3, 0), (0, 3, 4), (2, 0, 3), (2, 3, 0)), 1: ((0,), (0, 3), (3, 0))}

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = tuple(TOLERANCE)


def generator(*key: int) -> np.random.Generator:
    return np.random.default_rng([20240607, *key])


def gaussian(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(generator(seed, *shape).standard_normal(shape)).to(dtype)


def families(shape: tuple[int, ...], ndim: int, seed: int = 0) -> Iterator[tuple[str, np.ndarray]]:
    """Named float64 arrays of one shape: none of them is all zero."""
    rng = generator(seed, *shape)
    w = rng.standard_normal(shape)
    yield "gaussian", w
    yield "tiny", w * 1e-30
    yield "huge", w * 1e30
    yield "rank one", np.ones(shape) * rng.standard_normal((*shape[:-1], 1)) + np.zeros(shape)
    yield "uneven", w * 10.0 ** rng.uniform(-6, 6, size=shape)
    yield "equal entries", np.sign(w)
    if ndim == 2:
        rows = w.copy()
        rows[..., 1:, :] = rows[..., :1, :]
        yield "equal rows", rows
        gap = w.copy()
        gap[..., shape[-2] // 2, :] = 0 if shape[-2] > 1 else gap[..., 0, :]
        yield "zero row", gap


def stacked(shape: tuple[int, ...], ndim: int, dtype: torch.dtype) -> tuple[list[str], torch.Tensor]:
    """All families of a shape as one batch `(families, *shape)`, tiny and huge ones side by side."""
    names, arrays = zip(*families(shape, ndim), strict=True)
    return list(names), torch.tensor(np.stack(arrays)).to(dtype)


def exact(x: torch.Tensor) -> np.ndarray:
    """The tensor's very values in float64."""
    return x.detach().to(torch.float64).numpy()


def inner(a: np.ndarray, b: np.ndarray, ndim: int) -> np.ndarray:
    """<a, b> per block of the trailing ndim dimensions."""
    return (a * b).sum(axis=tuple(range(-ndim, 0)))
