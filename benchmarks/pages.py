"""Training runs whose process keeps freed memory beside runs whose process does not: does a user's training gain?

    python benchmarks/pages.py --json benchmarks/results/pages.json

Every run is a process of its own, since what glibc keeps depends on what the process has freed; both kinds alternate.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import time

import torch

from common import Columns, Row, at_threads, keep_freed, publish, timing
from surefoot.experiment.data.sources import load
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.run import Run

WIDTHS, STEPS = (64, 128, 256), 15
COLUMNS: Columns = {
    "width": ("width", "d"),
    "threads": ("threads", "d"),
    "freed memory": ("freed", ""),
    "CPU s, median": ("cpu", ".2f"),
    "min": ("cpu_min", ".2f"),
    "max": ("cpu_max", ".2f"),
    "page faults": ("faults", ",.0f"),
}


def train(width: int, steps: int, keep: bool, threads: int) -> tuple[float, int]:
    """CPU seconds and page faults of so many training steps under Post Clip, after two that are not counted."""
    torch.set_num_threads(threads)
    if keep:
        keep_freed()
    config = TrainConfig.of(width=width, batch_size=32, lr=2.0**-6, steps=1000, stabiliser="post_clip:2")
    run = Run(config, load(None))
    for _ in range(2):
        run.advance()
    faults, cpu = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.process_time()
    for _ in range(steps):
        run.advance()
    return time.process_time() - cpu, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults


def measure(widths: tuple[int, ...], steps: int, rounds: int) -> list[Row]:
    """A row for each width and kind of process."""
    rows: list[Row] = []
    for width in widths:
        runs: dict[bool, list[tuple[float, int]]] = {False: [], True: []}
        for _ in range(rounds):
            for keep, done in runs.items():
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    done.append(pool.apply(train, (width, steps, keep, torch.get_num_threads())))
        for keep, done in runs.items():
            cpu, faults = zip(*done, strict=True)
            row = {"cpu": statistics.median(cpu), "cpu_min": min(cpu), "cpu_max": max(cpu)}
            kind = "kept" if keep else "as torch leaves it"
            rows.append({"width": width, "freed": kind, **row, "faults": statistics.median(faults)})
    return rows


def main() -> None:
    """Run the benchmark."""
    options = timing(__doc__).parse_args()
    widths, steps = ((32,), 2) if options.smoke else (WIDTHS, STEPS)
    rows = at_threads(options.threads, lambda: measure(widths, steps, options.rounds))
    publish(options.json, {"rows": (rows, COLUMNS)})


if __name__ == "__main__":
    main()
