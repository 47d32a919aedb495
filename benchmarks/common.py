"""Shared by the benchmarks: matrices, options, interleaved times, tables, and a description of the machine."""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from surefoot.experiment.files import write_atomic
from surefoot.experiment.reports.style import markdown

Row = dict[str, object]
Columns = dict[str, tuple[str, str]]
"""From a column's header to the row's key and its format."""
Shapes = tuple[tuple[int, int], ...]

GPT2_SMALL = ((768, 768),) * 4 + ((3072, 768), (768, 3072))
LLAMA_130M = ((768, 768),) * 4 + ((2048, 768),) * 2 + ((768, 2048),)
SMALL = ((128, 128),) * 4 + ((512, 128), (128, 512))
MODELS: dict[str, tuple[Shapes, int]] = {
    "GPT-2 Small": (GPT2_SMALL, 12),
    "LLaMA-130M": (LLAMA_130M, 12),
    "d = 128": (SMALL, 24),
}
"""Shapes of a layer's hidden matrices (those that Muon steps), and the number of layers."""
SMOKE: dict[str, tuple[Shapes, int]] = {"smoke": (((8, 8), (16, 8)), 1)}


@dataclass(frozen=True)
class Times:
    """Seconds per round: wall time and the process's CPU time."""

    threads: int
    wall: list[float]
    cpu: list[float]

    @property
    def compared(self) -> list[float]:
        """CPU time on one thread, which other processes hardly lengthen; wall time on several threads."""
        return self.cpu if self.threads == 1 else self.wall

    @property
    def typical_ms(self) -> float:
        """Median of the compared times in milliseconds; ratios are of these."""
        return 1e3 * statistics.median(self.compared)

    def columns(self) -> Row:
        """Return the columns of a result row: medians and minima in milliseconds."""
        return {
            "median_ms": 1e3 * statistics.median(self.wall),
            "min_ms": 1e3 * min(self.wall),
            "cpu_ms": 1e3 * statistics.median(self.cpu),
            "cpu_min_ms": 1e3 * min(self.cpu),
        }


TIMES: Columns = {
    "median ms": ("median_ms", ".1f"),
    "min ms": ("min_ms", ".1f"),
    "CPU ms": ("cpu_ms", ".1f"),
    "CPU min ms": ("cpu_min_ms", ".1f"),
}


def interleave(
    actions: Mapping[str, Callable[[], object]], rounds: int, before: Mapping[str, Callable[[], object]] | None = None
) -> dict[str, Times]:
    """Time every action once per round, in turn, so that other load on the machine affects all of them alike.

    Args:
        actions: what is timed, by name.
        rounds: number of rounds, after one that warms up.
        before: name -> what to call before the action, not timed.

    Returns:
        The times by name.
    """
    keep_freed()
    times = {name: Times(torch.get_num_threads(), [], []) for name in actions}
    for round_ in range(rounds + 1):
        for name, action in actions.items():
            if before:
                before[name]()
            wall, cpu = time.perf_counter(), time.process_time()
            action()
            if round_:  # the first round allocates memory
                times[name].cpu.append(time.process_time() - cpu)
                times[name].wall.append(time.perf_counter() - wall)
    return times


def keep_freed() -> None:
    """Make glibc keep freed memory for reuse instead of returning it to the operating system, for every competitor.

    glibc takes blocks above one threshold from the system individually, and returns the free end of its heap above
    another; both follow the largest block freed so far, up to 32 MB. A training step frees larger ones in its backward
    pass; a benchmark of optimizers alone does not, so a block of 31 MB is freed here, its pages never touched.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


def parameters(shapes: Shapes, layers: int, device: str = "cpu") -> list[Tensor]:
    """Return Gaussian weights of a layer's shapes for every layer, with Gaussian gradients."""
    generator = torch.Generator().manual_seed(0)
    params = []
    for _ in range(layers):
        for shape in shapes:
            p = torch.nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(device))
            p.grad = (torch.randn(shape, generator=generator) * 1e-3).to(device)
            params.append(p)
    return params


def state_bytes(optimizer: torch.optim.Optimizer) -> float:
    """Return the bytes of state tensors per parameter entry."""
    entries = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    return sum(t.numel() * t.element_size() for t in _tensors(optimizer.state)) / entries


def _tensors(value: object) -> Iterator[Tensor]:
    """Yield all tensors of a state, which may be nested, as heavyball's."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)


def parser(about: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark."""
    options = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, help="also write the rows and the environment here")
    options.add_argument("--smoke", action="store_true", help="tiny shapes, to test that it runs")
    return options


def timing(about: str | None, rounds: int = 5) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark of time."""
    options = parser(about)
    options.add_argument("--rounds", type=int, default=rounds, help="timed rounds, after one that warms up")
    options.add_argument("--threads", type=_threads, nargs="+", default=[1], help="numbers, or all")
    return options


def _threads(text: str) -> int:
    return (os.cpu_count() or 1) if text == "all" else int(text)


def add_fraction(options: argparse.ArgumentParser) -> None:
    """Add `--fraction`, for benchmarks of whole models."""
    options.add_argument(
        "--fraction", type=float, nargs="+", default=[1.0], help="share of the layers, or one per model"
    )


def cut(models: Mapping[str, tuple[Shapes, int]], fraction: list[float]) -> dict[str, tuple[Shapes, int]]:
    """Return the models with a share of their layers, at least one; the new names contain the number."""
    parts = zip(models.items(), itertools.cycle(fraction), strict=False)
    counts = {name: (shapes, max(1, round(layers * part))) for (name, (shapes, layers)), part in parts}
    return {
        f"{name}, {layers} layer{'s' * (layers > 1)}": (shapes, layers) for name, (shapes, layers) in counts.items()
    }


def at_threads(threads: list[int], measure: Callable[[], Iterable[Row]]) -> list[Row]:
    """Return the rows of a measurement at every number of threads."""
    rows = []
    for count in dict.fromkeys(threads):
        torch.set_num_threads(count)
        rows += [{"threads": count, **row} for row in measure()]
    return rows


def table(rows: Iterable[Row], columns: Columns) -> str:
    """Format rows as a Markdown table; None is an empty cell."""
    cells = [
        ["" if row[key] is None else format(row[key], form) for key, form in columns.values()]  # type: ignore[arg-type]
        for row in rows
    ]
    return markdown(list(columns), cells)


def publish(path: Path | None, parts: Mapping[str, tuple[list[Row], Columns]], **more: object) -> None:
    """Print the environment and a table per part; write environment and rows to the path."""
    about = {**environment(), **more}
    for key, value in about.items():
        lines = [f"{name}: {text}" for name, text in value.items()] if isinstance(value, dict) else [value]
        print("\n".join(f"{key}: {line}" for line in lines))
    for rows, columns in parts.values():
        print("\n" + table(rows, columns))
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"environment": about, **{name: rows for name, (rows, _) in parts.items()}}
        write_atomic(path, json.dumps(content, indent=1) + "\n")


def environment() -> Row:
    """Return the command, the date, the machine and the versions."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    model = next((line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")), "")
    return {
        "command": " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "cpu": model or platform.processor(),
        "cores": os.cpu_count(),
        "bf16_units": ("avx512_bf16" in text or "amx_bf16" in text) and not os.environ.get("ONEDNN_MAX_CPU_ISA"),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
