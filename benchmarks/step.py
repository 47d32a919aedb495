"""Time, memory and accuracy of one optimizer step, beside torch's own optimizers in the same interleaved run.

    python benchmarks/step.py                       # GPT-2 Small's and 24 small layers' matrices, one thread
    python benchmarks/step.py --fraction 0.25       # a quarter of the layers, for a quick look
    python benchmarks/step.py --threads 2 --json benchmarks/results/step.json
    ONEDNN_MAX_CPU_ISA=AVX512_CORE python benchmarks/step.py    # as on a CPU without bfloat16 units

Every round steps each optimizer once, in turn, so that a noisy neighbour hits all of them; the ratio is that of
the medians, and the fastest round is shown beside it. Alignment `<G, D> / (|D|_2 |G|_*)` and the largest singular
value (relative to the learning rate) are those of the first step, averaged (maximised) over the distinct shapes. A
second table says what the guaranteed Post Clip costs on top; `bounds.py` compares it with the other schemes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import bounds
import surefoot as sf
from common import MODELS, environment, parameters

LR = 0.01
OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "torch AdamW, fused": lambda ps: torch.optim.AdamW(ps, lr=LR, fused=True),
    "torch AdamW, foreach": lambda ps: torch.optim.AdamW(ps, lr=LR, foreach=True),
    "torch Muon": lambda ps: torch.optim.Muon(ps, lr=LR, weight_decay=0.0),
    "surefoot, linear": lambda ps: sf.SteepestDescent([{"params": ps, "role": "linear"}], lr=LR),
}
UNITS: dict[str, Callable[[tuple[int, ...]], float]] = {
    "torch Muon": lambda shape: math.sqrt(max(1.0, shape[0] / shape[1])),
    "surefoot, linear": lambda shape: math.sqrt(shape[0] / shape[1]),
}
PEER = "torch Muon"


def accuracy(name: str, shapes: tuple[tuple[int, int], ...]) -> tuple[float, float]:
    """Mean alignment and largest singular value of the first step, over the distinct shapes."""
    alignments, largest = [], 0.0
    for shape in sorted(set(shapes)):
        (p,) = parameters((shape,), 1)
        before, gradient = p.detach().double(), p.grad.double()
        OPTIMIZERS[name]([p]).step()
        d = (before - p.detach().double()) / LR
        top = float(torch.linalg.matrix_norm(d, 2))
        alignments.append(float((gradient * d).sum() / (top * torch.linalg.matrix_norm(gradient, "nuc"))))
        largest = max(largest, top / UNITS[name](shape))
    return statistics.mean(alignments), largest


def state_bytes(optimizer: torch.optim.Optimizer) -> float:
    tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    entries = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    return sum(t.numel() * t.element_size() for t in tensors) / entries


def measure(model: str, fraction: float, rounds: int) -> list[dict[str, object]]:
    shapes, layers = MODELS[model]
    layers = max(1, round(layers * fraction))
    optimizers = {name: make(parameters(shapes, layers)) for name, make in OPTIMIZERS.items()}
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    cpu: dict[str, list[float]] = {name: [] for name in optimizers}
    for round_ in range(rounds + 1):
        for name, optimizer in optimizers.items():
            wall, process = time.perf_counter(), time.process_time()
            optimizer.step()
            if round_:  # the first round warms up
                times[name].append(time.perf_counter() - wall)
                cpu[name].append(time.process_time() - process)
    peer = statistics.median(times[PEER])
    rows = []
    for name, optimizer in optimizers.items():
        alignment, largest = accuracy(name, shapes) if name in UNITS else (None, None)
        rows.append(
            {
                "model": f"{model.split(',')[0]}, {layers} layers",
                "optimizer": name,
                "median_ms": 1e3 * statistics.median(times[name]),
                "min_ms": 1e3 * min(times[name]),
                "cpu_ms": 1e3 * statistics.median(cpu[name]),
                "ratio": statistics.median(times[name]) / peer,
                "state_bytes_per_parameter": state_bytes(optimizer),
                "alignment": alignment,
                "largest_singular_value": largest,
            }
        )
    return rows


def table(rows: list[dict[str, object]]) -> str:
    def number(value: object, form: str) -> str:
        return "" if value is None else format(value, form)

    lines = [
        f"| model | optimizer | median ms | min ms | CPU ms | / {PEER} | state B/param | alignment | largest s.v. |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r['model']} | {r['optimizer']} | {r['median_ms']:.1f} | {r['min_ms']:.1f} | {r['cpu_ms']:.1f} | "
            f"{r['ratio']:.2f} | {r['state_bytes_per_parameter']:.2f} | {number(r['alignment'], '.3f')} | "
            f"{number(r['largest_singular_value'], '.4f')} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fraction", type=float, default=1.0, help="share of the layers, 0 to 1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the rows and the environment here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [row for model in MODELS for row in measure(model, options.fraction, options.rounds)]
    about = environment(options.threads)
    print(", ".join(f"{key}: {value}" for key, value in about.items()) + "\n")
    print(table(rows))
    costs = [row for model in MODELS for row in bounds.measure(model, options.fraction, bounds.GUARANTEED)]
    print("\n" + bounds.table(costs))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"environment": about, "rows": rows, "post_clip": costs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
