"""The tables of docs/performance.md and docs/scaling.md from the committed results, in seconds.

python benchmarks/report.py            # rewrite the marked parts of the pages
python benchmarks/report.py --check    # exit code 1 if a page differs from the results
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import bounds
import elementwise
import gpu
import layers
import loop
import memory
import msign
import process
import share
import step
from common import Columns, table
from surefoot.experiment.files import write_atomic

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "studies"))
from paired import run as paired  # noqa: E402
from scaling import run as scaling  # noqa: E402
from streaming import run as streaming  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "docs" / name for name in ("performance.md", "scaling.md")]
MARK = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)

TABLES: dict[str, tuple[str, str, Columns]] = {
    "step_without_units": ("step-no-bf16-units.json", "rows", step.COLUMNS),
    "step_with_units": ("step-bf16-units.json", "rows", step.COLUMNS),
    "small_without_units": ("step-small-no-bf16-units.json", "rows", step.COLUMNS),
    "small_with_units": ("step-small-bf16-units.json", "rows", step.COLUMNS),
    "post_clip_small": ("step-small-bf16-units.json", "post_clip", bounds.COLUMNS),
    "post_clip": ("step-bf16-units.json", "post_clip", bounds.COLUMNS),
    "bounds": ("bounds.json", "rows", bounds.COLUMNS),
    "msign": ("msign.json", "rows", msign.COLUMNS),
    "msign_streaming": ("streaming.json", "rows", msign.COLUMNS),
    "elementwise": ("elementwise.json", "rows", elementwise.COLUMNS),
    "share": ("share.json", "rows", share.COLUMNS),
    "layers": ("layers.json", "rows", layers.COLUMNS),
    "loop": ("loop.json", "rows", loop.COLUMNS),
    "start": ("start.json", "rows", process.COLUMNS),
    "memory": ("memory.json", "rows", memory.COLUMNS),
    "gpu_steps": ("gpu.json", "steps", gpu.STEPS_SHOWN),
    "gpu_signs": ("gpu.json", "signs", gpu.SIGNS_SHOWN),
}
"""Marked part of the page -> results file, key in it, columns."""


def about(env: dict[str, Any]) -> str:
    """Format a run's command, machine, versions and date."""
    if "gpu" in env:
        return (
            f"`python benchmarks/gpu.py`; {env['gpu']}, CUDA {env['cuda']}, torch {env['torch']}, "
            f"Python {env['python']}, {env['date']}."
        )
    units = "with" if env["bf16_units"] else "without"
    return (
        f"`{env['command']}`; {env['cpu']} ({env['cores']} cores, {env['torch_isa']}, {units} bfloat16 units), "
        f"torch {env['torch']}, Python {env['python']}, {env['date']}."
    )


def rivals(env: dict[str, Any]) -> str:
    """Format the versions of the other packages' optimizers, and which are absent and why."""
    versions = [f"{name} {version}" for name, version in env["packages"].items()]
    absent = [f"Absent: {name} ({reason})." for name, reason in env["absent"].items()]
    return "\n".join([f"{', '.join(versions)}.", *absent])


def part(mark: str) -> str:
    """Format a marked part: the table and the conditions of its run."""
    if mark in paired.STUDIES:
        return paired.table(mark) + "\n"
    if mark == "scaling":
        return scaling.table() + "\n"
    if mark == "streaming":
        return streaming.table() + "\n"
    file, key, columns = TABLES[mark]
    results = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    env = results["environment"]
    lines = [table(results[key], columns), "", about(env)]
    if columns is step.COLUMNS:
        lines.append(rivals(env))
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """Return the page with every marked part rewritten."""
    return MARK.sub(lambda m: f"{m[1]}\n{part(m[2])}\n{m[3]}", text)


def main() -> int:
    """Rewrite or check the pages; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--page", type=Path, action="append", help="another page with marked parts")
    options = parser.parse_args()
    wrong = 0
    for path in options.page or PAGES:
        old = path.read_text(encoding="utf-8")
        new = page(old)
        if not options.check:
            write_atomic(path, new)
        elif new != old:
            wrong = 1
            print(f"{path} is not what the results say: run benchmarks/report.py")
    if options.check and not wrong:
        print("up to date")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
