"""The optimizer's share of a training step of the reference `gpt`, in one interleaved run.

    python benchmarks/share.py --fraction 0.17 --json benchmarks/results/share.json

Forward and backward take `--tokens` tokens, in sequences of `--length`. The share at 2^19 tokens (half a million, a
usual batch for models of this size) is extrapolated: the time of forward and backward is multiplied by 2^19 / tokens,
the optimizer's stays. Every optimizer steps the whole model: Muon the hidden matrices, and AdamW the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

import surefoot as sf
from common import TIMES, Columns, Row, at_threads, interleave, publish, timing
from rivals import ADAMW
from surefoot.experiment.models.decoder import reference

LR = 1e-6  # so small that the gradients hardly change
LARGE = 2**19
PEER = ADAMW[0]
GRADIENT = "forward and backward"
COLUMNS: Columns = {
    "model": ("model", ""),
    "threads": ("threads", "d"),
    "tokens": ("tokens", "d"),
    "what": ("what", ""),
    **TIMES,
    "share of the step": ("share", ".2%"),
    "share at 2^19 tokens, extrapolated": ("share_large", ".3%"),
    f"/ {PEER}": ("ratio", ".2f"),
}


@dataclass(frozen=True)
class Size:
    """Width, head dimension and depth of a reference model."""

    width: int
    head_dim: int
    depth: int

    def cut(self, fraction: float) -> Size:
        return Size(self.width, self.head_dim, max(1, round(self.depth * fraction)))


SIZES = (Size(128, 16, 4), Size(768, 64, 12))
SMOKE = (Size(32, 16, 1),)


def optimizers(model: nn.Module) -> dict[str, Callable[[], object]]:
    """Return steps of the whole model, by the optimizer's name."""
    places = sf.Plan.of(model).placements
    hidden = [model.get_parameter(name) for name, place in places.items() if place.role.name == "linear"]
    rest = [model.get_parameter(name) for name, place in places.items() if place.role.name != "linear"]
    muon = torch.optim.Muon(hidden, lr=LR, weight_decay=0.0)
    beside = torch.optim.AdamW(rest, lr=LR, fused=True)
    return {
        PEER: torch.optim.AdamW(model.parameters(), lr=LR, fused=True).step,
        "torch Muon, AdamW for the rest": lambda: (muon.step(), beside.step()),
        "surefoot, beyond_mup": sf.SteepestDescent(model, sf.Plan.of(model, sf.recipes.beyond_mup()), lr=LR).step,
        "surefoot, steady": sf.SteepestDescent(model, lr=LR).step,
    }


def measure(size: Size, tokens: int, length: int, rounds: int) -> Iterator[Row]:
    """Yield a row per optimizer, and one for forward and backward."""
    model = reference("gpt", size.width, size.depth, size.head_dim)
    text = torch.randint(256, (tokens // length, length + 1), generator=torch.Generator().manual_seed(0))

    def gradient() -> None:
        model.zero_grad()
        nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()

    steps = optimizers(model)
    times = interleave({GRADIENT: gradient, **steps}, rounds)
    model_ms = times[GRADIENT].typical_ms
    for name, time in times.items():
        own = time.typical_ms if name in steps else None
        yield {
            "model": f"gpt, width {size.width}, depth {size.depth}",
            "tokens": text[:, 1:].numel(),
            "what": name,
            **time.columns(),
            "share": own and own / (own + model_ms),
            "share_large": own and own / (own + model_ms * LARGE / text[:, 1:].numel()),
            "ratio": own and own / times[PEER].typical_ms,
        }


def main() -> None:
    """Run the benchmark."""
    parser = timing(__doc__)
    parser.add_argument("--fraction", type=float, default=1.0, help="share of the layers of the large model")
    parser.add_argument("--tokens", type=int, default=8192, help="number of a measured forward and backward")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    options = parser.parse_args()
    sizes = SMOKE if options.smoke else (*SIZES[:-1], SIZES[-1].cut(options.fraction))
    if options.tokens < options.length:
        raise SystemExit(f"--tokens {options.tokens} is less than one sequence: --length {options.length}")

    def rows() -> Iterator[Row]:
        for size in sizes:
            yield from measure(size, options.tokens, options.length, options.rounds)

    publish(options.json, {"rows": (at_threads(options.threads, rows), COLUMNS)})


if __name__ == "__main__":
    main()
