"""Which combinations of a test's parameters run by default; the others are marked `slow`."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch


def combinations(
    default: Callable[..., bool] | None = None,
    *,
    pairs: bool = False,
    indirect: Sequence[str] = (),
    **values: Sequence[Any],
) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` over the product of some parameters, most of it marked `slow`.

    Args:
        default: whether a combination, given by keyword, runs by default. None: as few as have every value once.
        pairs: where default is None, as few (by greed) as have every pair of two parameters' values once.
        indirect: parameters that are fixtures, as in `parametrize`.
        **values: of each parameter.

    Returns:
        The decorator.

    >>> mark = combinations(a=["x", "y", "z"], b=[1, 2])
    >>> [x.id for x in mark.args[1] if not x.marks]
    ['x-1', 'y-2', 'z-1']
    >>> mark = combinations(lambda a, b: a == "y" or b == 2, a=["x", "y", "z"], b=[1, 2])
    >>> [x.id for x in mark.args[1] if x.marks]
    ['x-1', 'z-1']
    >>> mark = combinations(pairs=True, a=["x", "y"], b=[1, 2], c=[True, False])
    >>> [x.id for x in mark.args[1] if not x.marks]
    ['x-1-True', 'x-2-False', 'y-1-False', 'y-2-True']
    """
    everything = list(itertools.product(*(range(len(choice)) for choice in values.values())))
    if default:
        chosen = {c for c in everything if default(**_at(values, c))}
    else:
        chosen = _each_pair(everything) if pairs else _each_value([len(choice) for choice in values.values()])
    rows = []
    for c in everything:
        row = _at(values, c).values()
        rows.append(pytest.param(*row, marks=() if c in chosen else pytest.mark.slow, id="-".join(map(label, row))))
    return pytest.mark.parametrize(tuple(values), rows, indirect=list(indirect))


def label(value: Any) -> str:
    """A value's part of a test's id: its name if it has one; of a tuple, its values'."""
    if isinstance(value, tuple):
        return "+".join(map(label, value))
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, str):
        return value
    return str(getattr(value, "name", None) or getattr(value, "__name__", None) or repr(value))


def _at(values: dict[str, Sequence[Any]], indices: tuple[int, ...]) -> dict[str, Any]:
    return {name: choice[i] for (name, choice), i in zip(values.items(), indices, strict=True)}


def _each_value(sizes: list[int]) -> set[tuple[int, ...]]:
    """The first values together, the second, and so on; shorter lists begin again."""
    return {tuple(i % size for size in sizes) for i in range(max(sizes))}


def _each_pair(everything: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Greedily, the combination with the most pairs that none before it has."""
    chosen, missing = set(), {pair for c in everything for pair in _pairs(c)}
    while missing:
        best = max(everything, key=lambda c: len(missing & _pairs(c)))
        chosen.add(best)
        missing -= _pairs(best)
    return chosen


def _pairs(combination: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(combination), 2))
