"""Time, memory and accuracy of a step on a GPU, beside torch's optimizers and Gram Newton-Schulz.

    python benchmarks/gpu.py --out benchmarks/results/gpu.json    # two and a half minutes on an H200
    python benchmarks/gpu.py --minutes 1                          # what fits into the time; leaves out the rest
    python benchmarks/gpu.py --smoke                              # toy sizes on a CPU, to test the command

It prints the tables last. Steps: the matrices of GPT-2 Small, of a LLaMA of 1.1 billion parameters (22 layers, d =
2048, FFN 5632, no grouped queries) and of 24 layers of d = 128, without embeddings, with fixed gradients. Steps are
timed by events; ratios are of medians to `torch.optim.Muon`'s. A bound is certified in one of the 16 rounds, so its
cost is in the mean. Matrix signs: one chunk of each shape, as the optimizer stacks it.
`gram-newton-schulz` takes part where it is installed, with its own kernels and without.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import surefoot as sf
from common import Columns, table
from surefoot.experiment.files import write_atomic
from surefoot.linalg.ops import TORCH
from surefoot.linalg.polar import METHODS

Shape = tuple[int, int]
Row = dict[str, Any]
PEER, RIVAL, LR = "torch Muon", "gram-newton-schulz, kernels", 0.01
STEPS_SHOWN: Columns = {
    "model": ("model", ""),
    "optimizer": ("optimizer", ""),
    "median ms": ("median_ms", ".2f"),
    "mean ms": ("mean_ms", ".2f"),
    "peak MiB": ("peak_mib", ".0f"),
    f"/ {PEER}": ("ratio", ".2f"),
}
SIGNS_SHOWN: Columns = {
    "shape": ("shape", ""),
    "method": ("method", ""),
    "median ms": ("median_ms", ".2f"),
    "largest": ("largest", ".3f"),
    "alignment": ("alignment", ".3f"),
    f"/ {RIVAL}": ("ratio", ".2f"),
}


@dataclass(frozen=True)
class Size:
    """Device, number of timed rounds, matrices and batch size of a measurement."""

    device: str
    rounds: int
    models: dict[str, tuple[tuple[Shape, ...], int]]
    chunk: int  # bytes of a float32 batch of matrices


def block(width: int, hidden: int, wide: int) -> tuple[Shape, ...]:
    """Return the shapes of a layer: four square matrices, `wide` up and one down."""
    return ((width, width),) * 4 + ((hidden, width),) * wide + ((width, hidden),)


FULL = Size(
    device="cuda",
    rounds=16,
    models={
        "GPT-2 Small, 12 layers": (block(768, 3072, 1), 12),
        "LLaMA 1.1B, 22 layers": (block(2048, 5632, 2), 22),
        "d = 128, 24 layers": (block(128, 512, 1), 24),
    },
    chunk=256 << 20,
)
SMOKE = Size(device="cpu", rounds=2, models={"toy, 2 layers": (block(16, 48, 1), 2)}, chunk=1 << 14)


def timed(size: Size, run: Callable[[], object]) -> list[float]:
    """Return the milliseconds of every round, after three that warm up."""
    times = []
    for turn in range(size.rounds + 3):
        if size.device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            elapsed = start.elapsed_time(end)
        else:
            before = time.perf_counter()
            run()
            elapsed = 1e3 * (time.perf_counter() - before)
        if turn >= 3:
            times.append(elapsed)
    return times


def parameters(size: Size, shapes: tuple[Shape, ...], layers: int) -> list[Tensor]:
    """Return weights with gradients, drawn on the device."""
    generator = torch.Generator(size.device).manual_seed(0)
    params = []
    for shape in shapes * layers:
        p = torch.nn.Parameter(torch.randn(shape, device=size.device, generator=generator) * 0.02)
        p.grad = torch.randn(shape, device=size.device, generator=generator) * 1e-3
        params.append(p)
    return params


def steepest(stabiliser: sf.Stabiliser, **options: Any) -> Callable[[list[Tensor]], Callable[[], object]]:
    """Return a builder of a `SteepestDescent` step on linear layers."""

    def build(params: list[Tensor]) -> Callable[[], object]:
        role = sf.Role("linear", sf.Spectral(), stabiliser=stabiliser)
        return sf.SteepestDescent([{"params": params, "role": role}], lr=LR, **options).step

    return build


def captured(params: list[Tensor]) -> Callable[[], object]:
    """Capture the same step as a CUDA graph, and return its replay."""
    rate = torch.tensor(LR, device=params[0].device)
    optimizer = sf.SteepestDescent([{"params": params, "role": "linear"}], lr=rate)
    for _ in range(2):
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph.replay


STEPS: dict[str, Callable[[list[Tensor]], Callable[[], object]]] = {
    PEER: lambda ps: torch.optim.Muon(ps, lr=LR, weight_decay=0.0).step,
    "torch AdamW, fused": lambda ps: torch.optim.AdamW(ps, lr=LR, fused=True).step,
    "surefoot": steepest(sf.Free()),
    "surefoot, CUDA graph": captured,
    "surefoot, Post Clip": steepest(sf.PostClip(10.0)),
    "surefoot, compiled": lambda ps: steepest(sf.Free(), step=sf.compiled())(ps),
}
ON_A_CPU = (PEER, "surefoot", "surefoot, Post Clip")


def steps(size: Size, deadline: float) -> Iterator[Row]:
    """Yield a row per optimizer and model; after the deadline, rows without times. The slow compiler comes last."""
    for name, build in STEPS.items():
        for model, (shapes, layers) in size.models.items():
            row: Row = {"model": model, "optimizer": name}
            if (size.device == "cpu" and name not in ON_A_CPU) or time.monotonic() > deadline:
                yield row | {"left_out": "needs a GPU" if size.device == "cpu" else "no time left"}
                continue
            params = parameters(size, shapes, layers)
            run = build(params)
            times = timed(size, run)
            yield row | {
                "median_ms": statistics.median(times),
                "mean_ms": statistics.mean(times),
                "peak_mib": peak(size, run),
            }
            del params, run
            gc.collect()  # an optimizer and its hooks form a reference cycle


def peak(size: Size, run: Callable[[], object]) -> float | None:
    """Return the MiB that a step allocates beyond what is allocated between steps."""
    if size.device != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def signs(size: Size) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the methods by name; they take a float32 batch `(b, m, n)`, m <= n."""
    methods: dict[str, Callable[[Tensor], Tensor]] = {
        "polar_express_fp16": lambda x: sf.msign(x, "polar_express_fp16"),
        "polar_express, bfloat16": lambda x: METHODS["polar_express"]((x / x.abs().amax()).bfloat16(), TORCH),
        "newton_schulz, bfloat16": lambda x: METHODS["newton_schulz"]((x / x.abs().amax()).bfloat16(), TORCH),
        "qdwh_2, float32": lambda x: sf.msign(x, "qdwh_2"),
    }
    if size.device == "cuda":
        methods["polar_express_fp16, compiled"] = torch.compile(methods["polar_express_fp16"], dynamic=False)
    if size.device == "cuda" and find_spec("gram_newton_schulz"):
        from gram_newton_schulz import GramNewtonSchulz

        methods["gram-newton-schulz, torch"] = GramNewtonSchulz(ns_use_kernels=False)
        if find_spec("quack"):
            methods[RIVAL] = GramNewtonSchulz(ns_use_kernels=True)
    return methods


def sign_rows(size: Size, deadline: float) -> Iterator[Row]:
    """Yield a row per method and shape; what others compile comes last.

    The largest singular value and the alignment `<o, x> / (|o|_2 |x|_*)` are those of the batch's first matrix.
    """
    shapes = sorted({(min(shape), max(shape)) for shapes, _ in size.models.values() for shape in shapes})
    batches = [torch.randn(max(1, size.chunk // (4 * m * n)), m, n, device=size.device) for m, n in shapes]
    nuclear = [torch.linalg.svdvals(x[0].double()).sum() for x in batches]
    for name, method in signs(size).items():
        for x, norm in zip(batches, nuclear, strict=True):
            row: Row = {"shape": " x ".join(map(str, x.shape)), "method": name}
            if time.monotonic() > deadline:
                yield row | {"left_out": "no time left"}
                continue
            times = timed(size, lambda: method(x))  # noqa: B023
            o = method(x)[0].double()
            top = torch.linalg.matrix_norm(o, 2)
            yield row | {
                "median_ms": statistics.median(times),
                "largest": float(top),
                "alignment": float((o * x[0]).sum() / (top * norm)),
            }


def compared(rows: list[Row], by: str, peer: str) -> list[Row]:
    """Add to each row that was measured its time over the peer's in its group, and return these rows by group."""
    measured = [row for row in rows if "median_ms" in row]
    peers = {row[by]: row["median_ms"] for row in measured if peer in row.values()}
    for row in measured:
        row["ratio"] = row["median_ms"] / peers[row[by]] if row[by] in peers else None
    groups = list(dict.fromkeys(row[by] for row in rows))
    return sorted(measured, key=lambda row: groups.index(row[by]))


def facts(size: Size) -> Row:
    """Return the date, the versions and the GPU."""
    about: Row = {"date": date.today().isoformat(), "torch": torch.__version__, "python": platform.python_version()}
    about["triton"] = __import__("triton").__version__ if find_spec("triton") else None
    if size.device == "cuda":
        about |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return about


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu.json"), help="the results, written as they come")
    parser.add_argument("--minutes", type=float, default=6.5, help="no measurement starts later")
    parser.add_argument("--smoke", action="store_true", help="toy sizes on a CPU")
    options = parser.parse_args()
    if not (options.smoke or torch.cuda.is_available()):
        parser.error("torch finds no GPU here; --smoke runs the same command at toy size on a CPU")
    size = SMOKE if options.smoke else FULL
    options.out.parent.mkdir(parents=True, exist_ok=True)
    halfway, deadline = (time.monotonic() + share * options.minutes for share in (30, 60))
    about, results = facts(size), {"steps": list[Row](), "signs": list[Row]()}
    for kind, rows in (("steps", steps(size, halfway)), ("signs", sign_rows(size, deadline))):
        for row in rows:
            results[kind].append(row)
            print(row, flush=True)
            write_atomic(options.out, json.dumps({"environment": about, **results}, indent=1) + "\n")
    tables = (
        table(compared(results["steps"], "model", PEER), STEPS_SHOWN),
        table(compared(results["signs"], "shape", RIVAL), SIGNS_SHOWN),
    )
    write_atomic(options.out, json.dumps({"environment": about, **results}, indent=1) + "\n")
    print("\n", *tables, sep="\n\n")


if __name__ == "__main__":
    main()
