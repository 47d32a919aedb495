"""What reports share: Markdown tables, half-widths of intervals, rates."""

from collections.abc import Iterable, Sequence

TRAINING = "training (gap)"
"""The title of a column of `training`."""


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
    lines = [f"| {' | '.join(line)} |" for line in (head, *rows)]
    return "\n".join([lines[0], f"|{'|'.join([rule] * len(head))}|", *lines[1:]])


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


def estimate(value: float | None, interval: Sequence[float] | None, form: str, none: str = "not known") -> str:
    """Format a value and half the width of its interval.

    Args:
        value: the value.
        interval: its two ends; None where there is none.
        form: of the value, with one digit for those after the decimal point.
        none: the text where there is no value.

    Returns:
        The text.

    >>> estimate(2.5, (2.25, 2.75), "+.2f"), estimate(None, None, ".3f")
    ('+2.50 ± 0.25', 'not known')
    """
    return none if value is None else f"{value:{form}}{plus_minus(interval, int(form[-2]))}"


def span(log2_lrs: Iterable[float]) -> str:
    """Format an interval of log2 rates as one of rates.

    >>> span((-4.0, -3.0))
    '0.0625 to 0.125'
    """
    return " to ".join(f"{lr(end):.3g}" for end in log2_lrs)


def training(loss: float | None, validation: float | None) -> str:
    """Format a training loss, and the validation loss minus it.

    >>> training(1.8, 1.75), training(None, 1.75)
    ('1.800 (-0.050)', 'not known')
    """
    return "not known" if loss is None or validation is None else f"{loss:.3f} ({validation - loss:+.3f})"
