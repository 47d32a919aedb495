"""What reports share: Markdown tables, half-widths of intervals, rates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], rule: str = " --- ") -> str:
    """Format a Markdown table; cells are not padded, and the last line has no line break.

    Args:
        head: the columns' titles.
        rows: one cell per column.
        rule: a column's part of the line below the titles.

    Returns:
        The table's lines.

    >>> print(markdown(["recipe", "loss"], [["muon", "2.1"]]))
    | recipe | loss |
    | --- | --- |
    | muon | 2.1 |
    """
    return _table(head, [rule] * len(head), rows)


def aligned(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table whose columns are padded to an even width, for a terminal.

    Args:
        head: the columns' titles.
        rows: one cell per column.

    Returns:
        The table's lines.

    >>> print(aligned(["recipe", "loss"], [["muon", "2.1"]]))
    | recipe | loss |
    |--------|------|
    | muon   | 2.1  |
    """
    lines = [list(head), *map(list, rows)]
    sizes = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[*map(str.ljust, line, sizes)] for line in lines]
    return _table(padded[0], ["-" * (size + 2) for size in sizes], padded[1:])


def _table(head: Sequence[str], rules: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [f"| {' | '.join(line)} |" for line in (head, *rows)]
    return "\n".join([cells[0], f"|{'|'.join(rules)}|", *cells[1:]])


def plus_minus(interval: Sequence[float] | None, digits: int) -> str:
    """Format half the width of an interval, to be written behind its middle.

    Args:
        interval: its two ends; None where there is none.
        digits: after the decimal point.

    Returns:
        The text, which begins with a space; empty for None.

    >>> f"2.50{plus_minus((2.25, 2.75), 2)}"
    '2.50 ± 0.25'
    """
    return "" if interval is None else f" ± {(interval[1] - interval[0]) / 2:.{digits}f}"


def lr(log2_lr: float) -> float:
    """Return the learning rate of its log2, within the range of a float, which a noisy interval may leave.

    >>> lr(-4.0), lr(5e6) == 2.0**1000
    (0.0625, True)
    """
    return float(2.0 ** max(-1000.0, min(1000.0, log2_lr)))
