"""What reports share: Markdown tables, half-widths of intervals, colours, axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a table needs no matplotlib
    from matplotlib.axes import Axes

INK, GREY, PALE, RED = "#222222", "#8a8a8a", "#b0b0b0", "#c0392b"
_GRID = "#e6e6e6"


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


def frame(panel: Axes, label_size: int = 9, ticks: str = PALE) -> None:
    """Give a panel pale ticks, horizontal grid lines behind its curves, and no line at the top and on the right.

    Args:
        panel: the axes, changed in place.
        label_size: of the tick labels, in points.
        ticks: the ticks' colour.
    """
    panel.tick_params(labelsize=label_size, color=ticks, labelcolor=INK)
    panel.grid(axis="y", color=_GRID, linewidth=0.6)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
