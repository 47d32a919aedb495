"""The GPU benchmark's command at toy size on a CPU: rows, ratios, files, the tables last."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def command(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=200)


def test_smoke(tmp_path: Path) -> None:
    done = command("--smoke", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    taken = {row["optimizer"] for row in found["steps"] if "median_ms" in row}
    assert taken == {"torch Muon", "surefoot", "surefoot, Post Clip"}
    assert {row["left_out"] for row in found["steps"] if "median_ms" not in row} == {"needs a GPU"}
    for row in found["signs"]:
        assert 0.7 < row["largest"] < 1.3, row
        assert 0.6 < row["alignment"] <= 1.001, row
    half = [row for row in found["signs"] if row["method"] == "polar_express_fp16, as chosen"]
    assert all(row["largest"] <= 1 + 5e-4 for row in half)
    assert len(half) == 2
    markdown = (tmp_path / "gpu.md").read_text()
    assert done.stdout.endswith(markdown)
    assert markdown.splitlines()[-1].startswith("| toy, 2 layers | surefoot, compiled |")
    assert "| torch Muon |" in markdown
    assert "1.00 |" in markdown


def test_out_of_time_is_said(tmp_path: Path) -> None:
    done = command("--smoke", "--minutes", "0", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "gpu.json").read_text())
    assert {row["left_out"] for row in rows["signs"]} == {"no time left"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_said() -> None:
    done = command()
    assert done.returncode == 2
    assert "torch finds no GPU here; --smoke" in done.stderr
