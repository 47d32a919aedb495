"""Time, memory and accuracy of one optimizer step on a model's hidden matrices, all optimizers in one interleaved run.

    python benchmarks/step.py                              # all layers, one thread
    python benchmarks/step.py --fraction 0.25 --threads 1 all    # a quarter of the layers; one thread, then all
    python benchmarks/step.py --fraction 0.1 0.1 0.25 --json benchmarks/results/step.json
    ONEDNN_MAX_CPU_ISA=AVX512_CORE python benchmarks/step.py    # as on a CPU without bfloat16 units

Beside torch's optimizers: `pytorch_optimizer`, `heavyball` and others of PyPI where they are installed; those that
are not are listed with the reason. Every round steps all optimizers once, in turn, with new gradients, so that other
load affects all alike; the fastest round is shown beside the median. Ratios are of median times: CPU time on one
thread, which other processes hardly lengthen, and wall time on several. "/ best float32" is the time over that of the
fastest rival that multiplies in float32. Alignment `<G, D> / (|D|_2 |G|_*)` and the largest singular value (over the
norm that the step should have) are those of the first step: the mean, and the maximum, over the distinct shapes. A
second table has the cost of the guaranteed Post Clip; `bounds.py` has the other schemes.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator

import torch
from torch import Tensor

import bounds
import rivals
from common import (
    MODELS,
    SMOKE,
    TIMES,
    Columns,
    Row,
    Shapes,
    add_fraction,
    at_threads,
    cut,
    interleave,
    parameters,
    publish,
    state_bytes,
    timing,
)
from rivals import LR, OURS, PEER, RIVALS

COLUMNS: Columns = {
    "model": ("model", ""),
    "threads": ("threads", "d"),
    "optimizer": ("optimizer", ""),
    **TIMES,
    f"/ {PEER}": ("ratio", ".2f"),
    "/ best float32": ("ratio_float32", ".2f"),
    "state B/param": ("state_bytes_per_parameter", ".2f"),
    "alignment": ("alignment", ".3f"),
    "largest s.v.": ("largest_singular_value", ".4f"),
}


class Contender:
    """An optimizer with weights of its own; `prepare` restores gradients that a step overwrote or dropped."""

    def __init__(self, name: str, shapes: Shapes, layers: int) -> None:
        self.name, self.params = name, parameters(shapes, layers)
        self.gradients = [p.grad for p in self.params]
        self.optimizer = RIVALS[name].build(self.params)
        self.last: Tensor | None = None

    def prepare(self) -> None:
        """Restore the gradients; raise RuntimeError if the last step changed no weight: its time has no meaning."""
        if self.last is not None and bool((self.last == self.params[0]).all()):
            raise RuntimeError(f"{self.name}: a step left the weights as they were")
        self.last = self.params[0].detach().clone()
        for p, gradient in zip(self.params, self.gradients, strict=True):
            p.grad = gradient.clone()


@functools.cache
def steepest(shape: tuple[int, int]) -> float:
    """Return `|G|_*` of the first gradient of this shape, in float64."""
    (p,) = parameters((shape,), 1)
    return float(torch.linalg.matrix_norm(p.grad.double(), "nuc"))


def accuracy(name: str, shapes: Shapes) -> tuple[float, float] | tuple[None, None]:
    """Return mean alignment and largest singular value of the first step, over the distinct shapes."""
    unit = RIVALS[name].unit
    if unit is None:
        return None, None
    alignments, largest = [], 0.0
    for shape in sorted(set(shapes)):
        (p,) = parameters((shape,), 1)
        before, gradient = p.detach().double(), p.grad.double()
        RIVALS[name].build([p]).step()
        d = (before - p.detach().double()) / LR
        wide = d if shape[0] <= shape[1] else d.mT
        top = float(torch.linalg.eigvalsh(wide @ wide.mT)[-1]) ** 0.5
        alignments.append(float((gradient * d).sum()) / (top * steepest(shape)))
        largest = max(largest, top / unit(shape))
    return statistics.mean(alignments), largest


def measure(model: str, shapes: Shapes, layers: int, names: list[str], rounds: int) -> Iterator[Row]:
    """Yield a row per optimizer."""
    contenders = {name: Contender(name, shapes, layers) for name in names}
    steps = {name: contender.optimizer.step for name, contender in contenders.items()}
    before = {name: contender.prepare for name, contender in contenders.items()}
    times = interleave(steps, rounds, before)
    best = min(times[name].typical_ms for name in names if RIVALS[name].products == "float32" and name != OURS)
    for name, contender in contenders.items():
        alignment, largest = accuracy(name, shapes)
        yield {
            "model": model,
            "optimizer": name,
            **times[name].columns(),
            "ratio": times[name].typical_ms / times[PEER].typical_ms,
            "ratio_float32": times[name].typical_ms / best,
            "state_bytes_per_parameter": state_bytes(contender.optimizer),
            "alignment": alignment,
            "largest_singular_value": largest,
        }


def main() -> None:
    """Run the benchmark."""
    parser = timing(__doc__)
    add_fraction(parser)
    parser.add_argument("--models", choices=list(MODELS), nargs="+", default=list(MODELS), help="default: all")
    options = parser.parse_args()
    absent = rivals.absent()
    names = [name for name in RIVALS if name not in absent]
    models = cut(SMOKE if options.smoke else {name: MODELS[name] for name in options.models}, options.fraction)

    def all_models() -> Iterator[Row]:
        for model, (shapes, layers) in models.items():
            yield from measure(model, shapes, layers, names, options.rounds)

    def post_clip() -> Iterator[Row]:
        for model, (shapes, layers) in models.items():
            yield from bounds.measure(model, shapes, layers, bounds.GUARANTEED)

    parts = {
        "rows": (at_threads(options.threads, all_models), COLUMNS),
        "post_clip": (at_threads(options.threads, post_clip), bounds.COLUMNS),
    }
    publish(options.json, parts, packages=rivals.versions(), absent=absent)


if __name__ == "__main__":
    main()
