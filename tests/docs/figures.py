"""Figures in prose and in the tables: what a page says, and the cells that say the same.

Tables are those between the marks `<!-- begin name -->` and `<!-- end name -->` of a page, which other tests hold to
the committed results; all else but code, links and formulas is prose.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from doc_pages import PAGES, ROOT

MARKED = re.compile(r"<!-- begin (\w+) -->\n(.*?)<!-- end \1 -->", re.DOTALL)
NOT_PROSE = (
    re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE),
    MARKED,
    re.compile(r"^ {4}.*$", re.MULTILINE),  # indented code
    re.compile(r"(?<=\])\([^)]*\)"),
    re.compile(r"\$\$.*?\$\$|\$[^$\n]+\$", re.DOTALL),
)
NUMBER = r"[-+]?\d*\.?\d+(?: ± \d*\.?\d+)?"
FIGURE = re.compile(
    r"(?<![\w^.,/-])[-+]?(?:\d*\.\d+(?: ± \d*\.\d+)?|\d+(?= %| ± \d)(?: ± \d+)?)(?![\d.]*\w)"  # .5, 1.5 ± 0.1, 5 %
    r"|2\^[-+]?[\d.]+ ± [\d.]+"
)


@dataclass(frozen=True)
class Value:
    """A number of a table.

    Args:
        value: the number.
        half: half of its interval, if it has one.
        slack: how far the digits that the table shows may be from it.
        shown: whether it is a cell as it stands, and not computed from several.
    """

    value: float
    half: float | None = None
    slack: float = 0.0
    shown: bool = False

    def __sub__(self, other: "Value | float") -> "Value":
        other = other if isinstance(other, Value) else Value(other)
        return Value(self.value - other.value, None, self.slack + other.slack)

    def __add__(self, other: "Value | float") -> "Value":
        return self - (other * -1 if isinstance(other, Value) else -other)

    def __mul__(self, factor: float) -> "Value":
        return Value(self.value * factor, None, self.slack * abs(factor))

    def __truediv__(self, other: "Value | float") -> "Value":
        other = other if isinstance(other, Value) else Value(other)
        quotient = self.value / other.value
        return Value(quotient, None, (self.slack + abs(quotient) * other.slack) / abs(other.value))


def parse(text: str) -> Value:
    """The first number of a cell, with its interval; `2^-3.1` is -3.1."""
    found = re.search(r"([-+]?(?:\d[\d,]*)?\.?\d+(?:e[-+]?\d+)?)(?: ± (\d*\.?\d+))?", text.replace("2^", ""))
    assert found, f"no number in {text!r}"
    digits = len(found[1].partition("e")[0].partition(".")[2])
    return Value(float(found[1].replace(",", "")), float(found[2]) if found[2] else None, 0.5 * 10**-digits, True)


@cache
def tables(mark: str) -> list[list[dict[str, str]]]:
    """The tables between two marks: rows from heads to cells."""
    (text,) = [each[2] for page in PAGES for each in MARKED.finditer(page.read_text("utf-8")) if each[1] == mark]
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in block.splitlines()]
        found.append([dict(zip(head, row, strict=True)) for row in rows])
    return found


def cells(mark: str, row: str, column: str) -> list[str]:
    """The cells that are not empty in the rows and columns that fit.

    Args:
        mark: the tables' mark; `sizes/1` is the second table between the marks.
        row: cells that a row has, `steady | 64`; one that ends in `...` is a beginning.
        column: a part of the head; a whole one if there is one.
    """
    name, _, number = mark.partition("/")
    found = []
    for table in [tables(name)[int(number)]] if number else tables(name):
        heads = [head for head in table[0] if head == column] or [head for head in table[0] if column in head]
        for each in table:
            wanted = [part.strip() for part in row.split(" | ")]
            if all(any(_fits(part, cell) for cell in each.values()) for part in wanted):
                found += [each[head] for head in heads if each[head]]
    assert found, f"{mark} has no cell {row!r}, {column!r}"
    return found


def _fits(part: str, cell: str) -> bool:
    return cell.startswith(part[:-3]) if part.endswith("...") else cell == part


def at(mark: str, row: str, column: str, after: str = "") -> Value:
    """The number of the one cell that fits, or the one that follows a pattern there."""
    (cell,) = cells(mark, row, column)
    found = re.search(after, cell)
    assert found, f"{cell!r} has no {after!r}"
    return parse(cell[found.end() :])


def column(mark: str, rows: Iterable[str], head: str) -> list[Value]:
    """The numbers of all cells that fit one of the rows."""
    return [parse(cell) for row in rows for cell in cells(mark, row, head)]


def beside(mark: str, first: str, second: str, head: str) -> list[Value]:
    """The ratios of two kinds of rows, in the order in which both come."""
    return [a / b for a, b in zip(column(mark, [first], head), column(mark, [second], head), strict=True)]


def stored(study: str, entry: str) -> list[Value]:
    """What the summary of a study's first recipe says, of each width."""
    summary = json.loads((ROOT / "studies" / study / "summary.json").read_text("utf-8"))
    return [Value(each) for each in summary["recipes"][0][entry]]


def losses(study: str, recipe: str) -> dict[int, Value]:
    """The losses of a recipe's runs in a study, by seed."""
    lines = (ROOT / "studies" / study / "results.jsonl").read_text("utf-8").splitlines()
    runs = [run for run in map(json.loads, lines) if run["recipe"] == recipe]
    return {run["seed"]: Value(run["val_loss"]) for run in runs}


def least(values: Iterable[Value]) -> Value:
    return min(values, key=lambda each: each.value)


def most(values: Iterable[Value]) -> Value:
    return max(values, key=lambda each: each.value)


def ends(values: Iterable[Value]) -> list[Value]:
    """The smallest and the largest."""
    values = list(values)
    return [least(values), most(values)]


def apart(values: Iterable[Value]) -> Value:
    """How far the smallest and the largest are apart."""
    low, high = ends(values)
    return high - low


def halves(mark: str, head: str, row: str = "...") -> list[Value]:
    """Half the intervals of the cells of a column."""
    values = (parse(cell) for cell in cells(mark, row, head))
    return [Value(each.half, None, each.slack) for each in values if each.half is not None]


def agrees(said: str, value: Value) -> bool:
    """Whether a figure of the prose is the value, to its own digits; without a sign it says a size."""
    sign, (number, *half) = said[0] in "+-", said.split(" ± ")
    size = value.value if sign else abs(value.value)
    own = 0.5 * 10 ** -len(number.partition(".")[2])
    near = (own if own > value.slack else 0.0) if value.shown else max(own, value.slack)
    if half and (value.half is None or abs(float(half[0]) - value.half) > near + 1e-9):
        return False
    return abs(float(number) - size) <= near + 1e-9


@dataclass(frozen=True)
class Sentence:
    """A sentence with figures, and where they are from.

    Args:
        page: the page's path.
        text: a part of the page that is there once, `{}` in place of each figure.
        figures: their values, in order.
    """

    page: str
    text: str
    figures: Callable[[], list[Value]]

    def found(self, prose: str) -> re.Match[str]:
        """Where the sentence is."""
        pattern = re.escape(" ".join(self.text.split())).replace(r"\{\}", f"({NUMBER})")
        matches = list(re.finditer(pattern, prose))
        assert len(matches) == 1, f"{self.page} has {len(matches)} times: {self.text}"
        return matches[0]

    def wrong(self, prose: str) -> list[str]:
        """The figures that are not what the tables say."""
        said, values = self.found(prose).groups(), self.figures()
        pairs = zip(said, values, strict=True)
        return [f"{self.text}: says {each}, the tables {value}" for each, value in pairs if not agrees(each, value)]


def prose(page: Path) -> str:
    """A page's prose, on one line; points in code are no decimal points."""
    text = page.read_text("utf-8")
    for pattern in NOT_PROSE:
        text = pattern.sub("", text)
    return " ".join(re.sub(r"`[^`]*`", lambda code: code[0].replace(".", "·"), text).split())


def uncovered(text: str, spans: Iterable[tuple[int, int]]) -> list[str]:
    """The figures of a prose that lie in none of the spans, with what stands around them."""
    spans = list(spans)
    free = [m for m in FIGURE.finditer(text) if not any(a <= m.start() and m.end() <= b for a, b in spans)]
    return [f"{m[0]} in: {text[max(0, m.start() - 60) : m.end() + 30]}" for m in free]


def of(page: str, sentences: dict[str, Callable[[], list[Value]]]) -> list[Sentence]:
    """The sentences of a page."""
    return [Sentence(page, text, figures) for text, figures in sentences.items()]
