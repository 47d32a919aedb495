"""Peak memory of each optimizer's step, beyond parameters, gradients and state.

    python benchmarks/memory.py --fraction 0.25 --json benchmarks/results/memory.json

The peak is that of the second step, when the state exists. On a CPU it is the largest sum of the tensors that torch's
profiler reports as allocated and not yet freed, without the scratch memory of BLAS; on CUDA it is
`torch.cuda.max_memory_allocated` minus what was allocated before. It is exact, whatever else the machine does.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

import rivals
import surefoot as sf
from common import MODELS, SMOKE, Columns, Row, Shapes, add_fraction, cut, parameters, parser, publish, state_bytes
from rivals import LR, OURS, PEER, RIVALS

COLUMNS: Columns = {
    "model": ("model", ""),
    "optimizer": ("optimizer", ""),
    "parameters MiB": ("parameters_mib", ".1f"),
    "state B/param": ("state_bytes_per_parameter", ".2f"),
    "peak of the step MiB": ("peak_mib", ".1f"),
    "peak B/param": ("peak_bytes_per_parameter", ".2f"),
}


def ours(role: sf.Role) -> Callable[[list[Tensor]], Optimizer]:
    return lambda ps: sf.SteepestDescent([{"params": ps, "role": role}], lr=LR)


BUILDS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    **{name: RIVALS[name].build for name in (*rivals.ADAMW, PEER, f"{PEER}, float32", OURS)},
    # a ball so small that the measured step clips every matrix
    f"{OURS}, Post Clip": ours(sf.Role("linear", sf.Spectral(), stabiliser=sf.PostClip(0.1, period=1))),
    "surefoot, row step": ours(sf.Role("row", sf.RowRMS())),
}


def cpu_peak(step: Callable[[], object]) -> int:
    """Return the largest number of bytes that the call had allocated at once in tensors."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        step()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        trace.export_chrome_trace(str(path))
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        allocated += event["args"]["Bytes"]
        peak = max(peak, allocated)
    return peak


def cuda_peak(step: Callable[[], object]) -> int:
    """Return the same on the current CUDA device."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before


PEAKS = {"cpu": cpu_peak, "cuda": cuda_peak}


def measure(model: str, shapes: Shapes, layers: int, device: str) -> Iterator[Row]:
    """Yield a row per optimizer."""
    for name, build in BUILDS.items():
        params = parameters(shapes, layers, device)
        entries = sum(p.numel() for p in params)
        optimizer = build(params)
        optimizer.step()  # allocates the state
        peak = PEAKS[device](optimizer.step)
        yield {
            "model": model,
            "optimizer": name,
            "device": device,
            "parameters_mib": 4 * entries / 2**20,
            "state_bytes_per_parameter": state_bytes(optimizer),
            "peak_mib": peak / 2**20,
            "peak_bytes_per_parameter": peak / entries,
        }


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    add_fraction(arguments)
    arguments.add_argument("--device", choices=PEAKS, default="cpu")
    options = arguments.parse_args()
    models = cut(SMOKE if options.smoke else MODELS, options.fraction)
    rows = [row for model, (shapes, layers) in models.items() for row in measure(model, shapes, layers, options.device)]
    publish(options.json, {"rows": (rows, COLUMNS)})


if __name__ == "__main__":
    main()
