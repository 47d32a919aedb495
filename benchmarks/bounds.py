"""What a bound costs on top of the step: mean time over a period of looking, beside the free step, interleaved.

    python benchmarks/bounds.py --fraction 0.08 0.25 --json benchmarks/results/bounds.json
    python benchmarks/bounds.py        # all layers of GPT-2 Small and 24 of d = 128; one thread, an hour

Gradients are fixed, so norms grow by the learning rate at every step. "Far" has a radius that nothing reaches; "at" has
one that every matrix would leave at every step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

import surefoot as sf
from common import MODELS, environment, parameters

FAR, AT, STEPS, LR = 10.0, 0.9, 16, 0.01
SCHEMES: dict[str, sf.Stabiliser] = {
    "free": sf.Free(),
    "weight decay": sf.WeightDecay(1 / AT),
    "Post Clip, far": sf.PostClip(FAR),
    "Post Clip, at": sf.PostClip(AT),
    "Post Clip, at, period 1": sf.PostClip(AT, period=1),
    "Pre Decay, at": sf.PreDecay(1 / AT),
    "Rescale, at": sf.Rescale(AT),
    "streaming Post Clip, 1 vector, at": sf.StreamingPostClip(AT, 1),
    "streaming Post Clip, 8 vectors, at": sf.StreamingPostClip(AT, 8),
    "Normalise": sf.Normalise(AT),
    "Spectral Sphere": sf.SpectralSphere(AT),
}
GUARANTEED = {name: SCHEMES[name] for name in ("free", "Post Clip, far", "Post Clip, at")}


def build(scheme: sf.Stabiliser, model: str, layers: int) -> torch.optim.Optimizer:
    """An optimizer of the model's matrices, at norm about 1."""
    params = parameters(MODELS[model][0], layers)
    role = sf.Role("linear", sf.Spectral(), stabiliser=scheme)
    for p in params:
        p.data.div_(sf.Spectral().norm(p.data))
    return sf.SteepestDescent([{"params": params, "role": role}], lr=LR)


def measure(model: str, fraction: float, schemes: dict[str, sf.Stabiliser]) -> list[dict[str, object]]:
    """A row per scheme."""
    layers = max(1, round(MODELS[model][1] * fraction))
    optimizers = {name: build(scheme, model, layers) for name, scheme in schemes.items()}
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for turn in range(STEPS + 1):
        for name, optimizer in optimizers.items():
            start = time.perf_counter()
            optimizer.step()
            if turn:  # the first step allocates
                times[name].append(1e3 * (time.perf_counter() - start))
    free = statistics.mean(times["free"])
    return [
        {
            "model": f"{model.split(',')[0]}, {layers} layers",
            "scheme": name,
            "mean_ms": statistics.mean(each),
            "longest_ms": max(each),
            "overhead": statistics.mean(each) / free - 1,
            "largest_norm": max(
                float(sf.Spectral().norm(p.detach())) for p in optimizers[name].param_groups[0]["params"]
            ),
        }
        for name, each in times.items()
    ]


def table(rows: list[dict[str, object]]) -> str:
    """Markdown."""
    lines = ["| model | scheme | mean ms | longest ms | on top of free | largest norm |", "|---|---|---|---|---|---|"]
    for r in rows:
        lines.append(
            f"| {r['model']} | {r['scheme']} | {r['mean_ms']:.1f} | {r['longest_ms']:.1f} | {r['overhead']:+.0%} | "
            f"{r['largest_norm']:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fraction", type=float, nargs=2, default=[1.0, 1.0], help="share of each model's layers")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the rows and the environment here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [row for model, part in zip(MODELS, options.fraction, strict=True) for row in measure(model, part, SCHEMES)]
    about = environment(options.threads)
    print(", ".join(f"{key}: {value}" for key, value in about.items()) + "\n")
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps({"environment": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
