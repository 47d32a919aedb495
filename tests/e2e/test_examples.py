"""The examples run, and the README shows them as they are."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from surefoot.cli import main

ROOT = Path(__file__).parents[2]


def test_own_model_learns(capsys: pytest.CaptureFixture[str]) -> None:
    names = runpy.run_path(str(ROOT / "examples" / "own_model.py"))
    assert names["loss"].item() < 1.0  # from log 256 = 5.5
    assert "SteepestDescent" not in capsys.readouterr().out  # the plan is a table, not a repr


def test_a_model_of_ones_own_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    sizes = [
        "--widths",
        "16",
        "64",
        "--steps",
        "4",
        "--rates",
        "-5",
        "-4",
        "-3",
        "--context",
        "8",
        "--batch-size",
        "2",
        "--workers",
        "1",
    ]
    model = ["--model", "examples.own_width:build", "--recipe", "beyond_mup"]
    assert main(["transfer", *model, *sizes, "--out", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["config"]["settings"]["model"] == "examples.own_width:build"
    assert all(loss < 6 for loss in summary["recipes"][0]["best_loss"])


def test_readme_shows_the_example() -> None:
    code = (ROOT / "examples" / "own_model.py").read_text().split('"""\n', 1)[1].strip()
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert code in [block.strip() for block in blocks]
