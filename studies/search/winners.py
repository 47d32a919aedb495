"""What the search found: the finalists of each family, from the committed results."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

HERE = Path(__file__).parent
WIDTH, CHECK_WIDTH, FINAL_SEEDS = 64, 32, (302, 303, 304, 305)


def results(name: str) -> Iterator[tuple[int, Mapping[str, Any], float, dict[float, float]]]:
    """A family's finalists, best first: number, point, loss at the search's width and at the narrower one by shift."""
    lines = (HERE / name / "results.jsonl").read_text(encoding="utf-8").splitlines()
    found: dict[int, dict[tuple[int, float], list[float]]] = defaultdict(lambda: defaultdict(list))
    points: dict[int, Mapping[str, Any]] = {}
    for record in map(json.loads, lines):
        if record["seed"] in FINAL_SEEDS or record["width"] == CHECK_WIDTH:
            found[record["point"]][record["width"], record["shift"]].append(record["val_loss"])
            points[record["point"]] = record["settings"]
    ranked = []
    for number, losses in found.items():
        narrow = {shift: mean(values) for (width, shift), values in losses.items() if width == CHECK_WIDTH}
        ranked.append((number, points[number], mean(losses[WIDTH, 0.0]), narrow))
    yield from sorted(ranked, key=lambda result: result[2] + min(result[3].values()))


def searches(name: str) -> tuple[str, ...]:
    """The searches of a family that have been run: the first, and one in wider ranges where it ended at an edge."""
    return tuple(one for one in (name, f"{name}_2") if (HERE / one / "results.jsonl").exists())


def winner(name: str) -> Mapping[str, Any]:
    """The best settings of all searches of a family."""
    found = [result for one in searches(name) for result in results(one)]
    return min(found, key=lambda result: result[2] + min(result[3].values()))[1]
