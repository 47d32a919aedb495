"""What a bound costs: mean step time over one certificate period, interleaved with steps that have no bound.

    python benchmarks/bounds.py --fraction 0.08 0.25 --json benchmarks/results/bounds.json
    python benchmarks/bounds.py        # all layers of GPT-2 Small and 24 of d = 128; one thread, an hour

Gradients are fixed, so norms grow by the learning rate at every step. Times are CPU times on one thread, wall times on
several. The radius of "far" is never reached. Without the bound every matrix would exceed the radius of "at" at every
step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

import torch

import surefoot as sf
from common import (
    MODELS,
    SMOKE,
    Columns,
    Row,
    Shapes,
    add_fraction,
    at_threads,
    cut,
    interleave,
    parameters,
    publish,
    timing,
)

FAR, AT, PERIOD, LR = 10.0, 0.9, 16, 0.01
JUDGED = ("GPT-2 Small", "d = 128")
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


COLUMNS: Columns = {
    "model": ("model", ""),
    "threads": ("threads", "d"),
    "scheme": ("scheme", ""),
    "mean ms": ("mean_ms", ".1f"),
    "longest ms": ("longest_ms", ".1f"),
    "on top of free": ("overhead", "+.0%"),
    "largest norm": ("largest_norm", ".3f"),
}


def build(scheme: sf.Stabiliser, shapes: Shapes, layers: int) -> torch.optim.Optimizer:
    """Return an optimizer of the model's matrices, whose norms are 1."""
    params = parameters(shapes, layers)
    role = sf.Role("linear", sf.Spectral(), stabiliser=scheme)
    for p in params:
        p.data.div_(sf.Spectral().norm(p.data))
    return sf.SteepestDescent([{"params": params, "role": role}], lr=LR)


def measure(
    model: str, shapes: Shapes, layers: int, schemes: Mapping[str, sf.Stabiliser], rounds: int = PERIOD
) -> Iterator[Row]:
    """Yield a row per scheme."""
    optimizers = {name: build(scheme, shapes, layers) for name, scheme in schemes.items()}
    times = interleave({name: optimizer.step for name, optimizer in optimizers.items()}, rounds)
    free = statistics.mean(times["free"].compared)
    for name, optimizer in optimizers.items():
        weights = [p.detach() for p in optimizer.param_groups[0]["params"]]
        yield {
            "model": model,
            "scheme": name,
            "mean_ms": 1e3 * statistics.mean(times[name].compared),
            "longest_ms": 1e3 * max(times[name].compared),
            "overhead": statistics.mean(times[name].compared) / free - 1,
            "largest_norm": max(float(sf.Spectral().norm(w)) for w in weights),
        }


def main() -> None:
    """Run the benchmark."""
    parser = timing(__doc__, PERIOD)
    add_fraction(parser)
    options = parser.parse_args()
    models = cut(SMOKE if options.smoke else {name: MODELS[name] for name in JUDGED}, options.fraction)

    def rows() -> Iterator[Row]:
        for model, (shapes, layers) in models.items():
            yield from measure(model, shapes, layers, SCHEMES, options.rounds)

    publish(options.json, {"rows": (at_threads(options.threads, rows), COLUMNS)})


if __name__ == "__main__":
    main()
