"""Every row of docs/sources.md names something that can be imported and a test that exists."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "sources.md").read_text(encoding="utf-8")
BLOCK = TEXT.split("<!-- begin sources -->")[1].split("<!-- end sources -->")[0]
ROWS = [re.split(r" \| ", line.strip("| ")) for line in BLOCK.strip().splitlines()[2:]]


def resolve(name):
    """The object of a dotted name: the longest importable module, then attributes."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            value = getattr(value, part)
        return value
    raise AssertionError(name)


def test_the_table_covers_all_sources():
    assert {"Beyond MuP 1, 2", "Beyond MuP 2", "Beyond MuP 3", "Beyond MuP 4", "MOGA", "related"} <= {
        r[0] for r in ROWS
    }
    assert len(ROWS) > 50


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1][:40])
def test_a_row_is_complete_and_true(row):
    assert len(row) == 4
    assert all(cell.strip() for cell in row)
    name, test = (cell.strip().strip("`") for cell in row[2:])
    assert resolve(name) is not None
    path, _, function = test.partition("::")
    text = (ROOT / path).read_text(encoding="utf-8")
    assert f"def {function}(" in text if function else "def test_" in text
