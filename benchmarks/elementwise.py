"""Row, column and sign steps on large matrices, beside the memory's bandwidth and torch's fused AdamW.

    python benchmarks/elementwise.py --json benchmarks/results/elementwise.json

A step has to read weight, gradient and momentum and to write weight and momentum: 20 bytes per float32 entry. GB/s
counts these (8 for a copy, 12 for a triad `c = a + s b`, 28 for AdamW). torch's fused SGD with momentum moves exactly
20 bytes in one pass. The bandwidth is the highest rate that copy, triad, SGD or AdamW reach on as many entries in the
same interleaved run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

import surefoot as sf
from common import TIMES, Columns, Row, at_threads, interleave, parameters, publish, timing
from rivals import ADAMW
from surefoot.views import Vector

LR = 1e-3
PEER = ADAMW[0]
ROLES = {
    "row step (RowRMS)": sf.Role("row", sf.RowRMS()),
    "column step (MOGA column, q = 2)": sf.Role("column", sf.MeanOperator(1, 2)),
    "sign step (MaxNorm)": sf.Role("sign", sf.MaxNorm(), view=Vector()),
}
SGD = "torch SGD with momentum, fused"
PASSES = {"copy": 8, "triad": 12, SGD: 20, PEER: 28}
LEAST = {**PASSES, **dict.fromkeys(ROLES, 20)}
SHAPES = ((50304, 768), (4096, 4096))
SMOKE = ((8, 16),)
COLUMNS: Columns = {
    "matrix": ("matrix", ""),
    "threads": ("threads", "d"),
    "what": ("what", ""),
    "least B/entry": ("least_bytes", "d"),
    **TIMES,
    "GB/s": ("gigabytes_per_second", ".1f"),
    "share of bandwidth": ("share", ".0%"),
    "/ AdamW, fused": ("ratio", ".2f"),
}


def actions(shape: tuple[int, int]) -> dict[str, Callable[[], object]]:
    """Return what is timed, by name; no two share an array."""

    def step(build: Callable[[list[Tensor]], Optimizer]) -> Callable[[], object]:
        return build(parameters((shape,), 1)).step

    def ours(role: sf.Role) -> Callable[[], object]:
        return step(lambda ps: sf.SteepestDescent([{"params": ps, "role": role}], lr=LR))

    a, b, c = (torch.ones(shape) for _ in range(3))
    return {
        "copy": lambda: c.copy_(a),
        "triad": lambda: torch.add(a, b, alpha=3.0, out=c),
        SGD: step(lambda ps: torch.optim.SGD(ps, lr=LR, momentum=0.9, fused=True)),
        PEER: step(lambda ps: torch.optim.AdamW(ps, lr=LR, fused=True)),
        **{name: ours(role) for name, role in ROLES.items()},
    }


def measure(shape: tuple[int, int], rounds: int) -> Iterator[Row]:
    """Yield a row per step, and per operation that the bandwidth is taken from."""
    times = interleave(actions(shape), rounds)
    rate = {name: LEAST[name] * shape[0] * shape[1] / (1e6 * time.typical_ms) for name, time in times.items()}
    bandwidth = max(rate[name] for name in PASSES)
    for name, time in times.items():
        yield {
            "matrix": " x ".join(map(str, shape)),
            "what": name,
            "least_bytes": LEAST[name],
            **time.columns(),
            "gigabytes_per_second": rate[name],
            "share": rate[name] / bandwidth,
            "ratio": time.typical_ms / times[PEER].typical_ms,
        }


def main() -> None:
    """Run the benchmark."""
    options = timing(__doc__, rounds=25).parse_args()

    def rows() -> Iterator[Row]:
        for shape in SMOKE if options.smoke else SHAPES:
            yield from measure(shape, options.rounds)

    publish(options.json, {"rows": (at_threads(options.threads, rows), COLUMNS)})


if __name__ == "__main__":
    main()
