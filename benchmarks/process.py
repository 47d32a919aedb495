"""What a process pays before its first step, beside `import torch`, and in training for memory that it does not keep.

    python benchmarks/process.py --json benchmarks/results/start.json
    python benchmarks/process.py --pages    # does a user's training gain from memory that the process keeps?

Every measurement is a process of its own, and the kinds alternate: a process imports a module only once, and what glibc
keeps depends on what the process has freed.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import subprocess
import sys
import time

import torch

from common import Columns, Row, at_threads, keep_freed, publish, timing
from surefoot.experiment.data.sources import load
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.run import Run

WIDTHS, STEPS = (64, 128, 256), 15
PAGES: Columns = {
    "width": ("width", "d"),
    "threads": ("threads", "d"),
    "freed memory": ("freed", ""),
    "CPU s, median": ("cpu", ".2f"),
    "min": ("cpu_min", ".2f"),
    "max": ("cpu_max", ".2f"),
    "page faults": ("faults", ",.0f"),
}
COLUMNS: Columns = {
    "process": ("process", ""),
    "wall s": ("wall", ".2f"),
    "CPU s": ("cpu", ".2f"),
    "/ import torch": ("ratio", ".2f"),
}
MODEL = "import torch; model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 10))"
STEP = "optimizer.zero_grad(); model(torch.randn(8, 64)).square().mean().backward(); optimizer.step()"
BARE = "import torch"
PROCESSES = {
    BARE: ["-c", BARE],
    "torch AdamW, first step": ["-c", f"{MODEL}; optimizer = torch.optim.AdamW(model.parameters()); {STEP}"],
    "surefoot, first step": [
        "-c",
        f"{MODEL}; import surefoot as sf; run = sf.Run(100, 64); plan = sf.Plan.of(model, head='1', run=run); "
        f"optimizer = sf.SteepestDescent(model, plan); schedule = run.schedule(optimizer); {STEP}; schedule.step()",
    ],
    "surefoot --help": ["-m", "surefoot", "--help"],
}


def starts(rounds: int) -> list[Row]:
    """A row for each process, its medians over the rounds."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in PROCESSES}
    for turn in range(rounds + 1):
        for name, options in PROCESSES.items():
            before, began = _spent(), time.perf_counter()
            subprocess.run([sys.executable, *options], check=True, stdout=subprocess.DEVNULL)
            if turn:  # the first round reads files
                times[name].append((time.perf_counter() - began, _spent() - before))
    medians = {name: [statistics.median(each) for each in zip(*own, strict=True)] for name, own in times.items()}
    bare = medians[BARE][1]
    return [{"process": name, "wall": w, "cpu": cpu, "ratio": cpu / bare} for name, (w, cpu) in medians.items()]


def _spent() -> float:
    """CPU seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def train(width: int, steps: int, keep: bool, threads: int) -> tuple[float, int]:
    """CPU seconds and page faults of so many training steps under Post Clip, after two that are not counted."""
    torch.set_num_threads(threads)
    if keep:
        keep_freed()
    config = TrainConfig(width=width, batch_size=32, lr=2.0**-6, steps=1000, stabiliser="post_clip:2")
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
    parser = timing(__doc__)
    parser.add_argument("--pages", action="store_true", help="page faults of training, not the start")
    options = parser.parse_args()
    if not options.pages:
        publish(options.json, {"rows": (starts(options.rounds), COLUMNS)})
        return
    widths, steps = ((32,), 2) if options.smoke else (WIDTHS, STEPS)
    rows = at_threads(options.threads, lambda: measure(widths, steps, options.rounds))
    publish(options.json, {"rows": (rows, PAGES)})


if __name__ == "__main__":
    main()
