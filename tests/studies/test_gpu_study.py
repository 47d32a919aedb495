"""The GPU study's command, end to end at toy size: stops on time, goes on, ends in a table and a picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "studies" / "transfer" / "gpu.py"


def command(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_smoke_stops_on_time_and_goes_on(tmp_path: Path) -> None:
    options = ("--smoke", "--out", str(tmp_path))
    stopped = command(*options, "--minutes", "0")
    assert stopped.returncode == 0, stopped.stderr
    assert "0 minutes are over: 1 of about 18 runs are finished" in stopped.stdout
    assert not (tmp_path / "summary.json").exists()
    first = (tmp_path / "results.jsonl").read_text()
    done = command(*options)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "results.jsonl").read_text().startswith(first)
    assert "drift in octaves" in done.stdout
    assert (tmp_path / "transfer.png").stat().st_size > 10_000
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [entry["recipe"] for entry in summary["recipes"]] == ["steady", "moonlight_tuned", "adamw"]
    assert all(loss < 6 for entry in summary["recipes"] for loss in entry["best_loss"])
