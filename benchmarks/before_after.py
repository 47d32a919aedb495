"""What did a change cost? Whole steps of this tree and of another one, alternating in one process.

    git worktree add ../before COMMIT; python benchmarks/before_after.py ../before/src/surefoot

The other package is imported under a name of its own. Rates, shapes and schemes are those of `step.py`.
"""

from __future__ import annotations

import importlib
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import surefoot
from common import MODELS, Columns, Row, at_threads, interleave, parameters, publish, timing

OTHER = "surefoot_before"
SCHEMES: dict[str, Callable[[ModuleType], object]] = {
    "free": lambda sf: sf.Free(),
    "Post Clip, far": lambda sf: sf.PostClip(100.0),
    "Post Clip, at": lambda sf: sf.PostClip(0.2),
}
COLUMNS: Columns = {
    "case": ("case", ""),
    "threads": ("threads", ""),
    "scheme": ("scheme", ""),
    "before ms": ("before", ".2f"),
    "after ms": ("after", ".2f"),
    "median of ratios": ("ratio", ".3f"),
}


def renamed(package: Path, folder: Path) -> ModuleType:
    """Import another tree's package as `surefoot_before`, from a copy in a folder."""
    shutil.copytree(package, folder / OTHER, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (folder / OTHER).rglob("*.py"):
        text = re.sub(r"\b(from|import) surefoot\b", rf"\1 {OTHER}", path.read_text(encoding="utf-8"))
        path.write_text(text.replace('"surefoot._api"', f'"{OTHER}._api"'), encoding="utf-8")
    sys.path.insert(0, str(folder))
    return importlib.import_module(OTHER)


def measure(before: ModuleType, rounds: int) -> list[Row]:
    """Every case under every scheme, and a table's free step."""
    cases = {name: (shapes, 1 if shapes[0][0] > 128 else layers) for name, (shapes, layers) in MODELS.items()}
    rows = []
    for case, (shapes, layers) in {**cases, "table 50304 x 768": (((50304, 768),), 1)}.items():
        for scheme, make in SCHEMES.items():
            steps = {}
            for name, sf in (("before", before), ("after", surefoot)):
                geometry = sf.RowRMS() if case.startswith("table") else sf.Spectral()
                group = {"params": parameters(shapes, layers), "role": sf.Role("own", geometry, stabiliser=make(sf))}
                steps[name] = sf.SteepestDescent([group], lr=1e-3).step
            times = interleave(steps, rounds)
            ratio = statistics.median(b / a for a, b in zip(times["before"].wall, times["after"].wall, strict=True))
            ms = {name: 1e3 * statistics.median(each.wall) for name, each in times.items()}
            rows.append({"case": case, "scheme": scheme, **ms, "ratio": ratio})
            if case.startswith("table"):
                break
    return rows


def main() -> None:
    parser = timing(__doc__, rounds=15)
    parser.add_argument("package", type=Path, help="the other tree's src/surefoot")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        before = renamed(arguments.package, Path(folder))
        rows = at_threads(arguments.threads, lambda: measure(before, arguments.rounds))
    publish(arguments.json, {"steps": (rows, COLUMNS)})


if __name__ == "__main__":
    main()
