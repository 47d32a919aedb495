"""The pages that the studies write say what the committed results say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def report(*options):
    command = [sys.executable, str(ROOT / "studies" / "report.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_pages_are_what_the_results_say():
    found = report("--check")
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_page_that_was_edited_by_hand_is_noticed(tmp_path):
    text = (ROOT / "docs" / "transfer.md").read_text(encoding="utf-8")
    edited = tmp_path / "transfer.md"
    edited.write_text(text.replace("| beyond_mup |", "| beyond_mup! |"), encoding="utf-8")
    found = report("--check", "--page", str(edited))
    assert found.returncode == 1
    assert "run studies/report.py" in found.stdout
