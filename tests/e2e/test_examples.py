"""The examples run, and the README shows them as they are."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_own_model_learns(capsys: pytest.CaptureFixture[str]) -> None:
    names = runpy.run_path(str(ROOT / "examples" / "own_model.py"))
    assert names["loss"].item() < 1.0  # from log 256 = 5.5
    assert "SteepestDescent" not in capsys.readouterr().out  # the plan is a table, not a repr


def test_readme_shows_the_example() -> None:
    code = (ROOT / "examples" / "own_model.py").read_text().split('"""\n', 1)[1].strip()
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert code in [block.strip() for block in blocks]
