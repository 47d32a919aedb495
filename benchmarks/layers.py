"""An In-Norm layer beside `nn.RMSNorm` and `nn.Linear`, interleaved: forward, and forward with backward.

    python benchmarks/layers.py --json benchmarks/results/layers.json

Both compute the same function; the linear layer alone is the least that they can take. The backward pass gives the
gradients of the input and of all parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from common import TIMES, Columns, Row, at_threads, interleave, publish, timing
from surefoot.layers import InNormLinear

PEER = "nn.RMSNorm, nn.Linear"
LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "nn.Linear alone": lambda d_in, d_out: nn.Linear(d_in, d_out, bias=False),
    PEER: lambda d_in, d_out: nn.Sequential(nn.RMSNorm(d_in), nn.Linear(d_in, d_out, bias=False)),
    "InNormLinear": InNormLinear,
}
SHAPES = ((2048, 768, 768), (2048, 768, 3072), (2048, 3072, 768), (8192, 128, 128))
SMOKE = ((4, 8, 16),)
COLUMNS: Columns = {
    "tokens": ("tokens", "d"),
    "d_in": ("d_in", "d"),
    "d_out": ("d_out", "d"),
    "threads": ("threads", "d"),
    "pass": ("pass", ""),
    "what": ("what", ""),
    **TIMES,
    "/ norm and linear": ("ratio", ".2f"),
}


def forward(layer: nn.Module, x: Tensor) -> Callable[[], object]:
    """Return a call of the layer without gradients."""
    return torch.no_grad()(lambda: layer(x))


def both(layer: nn.Module, x: Tensor, gradient: Tensor) -> Callable[[], object]:
    """Return a call of the layer and of its backward pass."""
    x = x.clone().requires_grad_(True)

    def run() -> None:
        x.grad = None
        layer.zero_grad()
        layer(x).backward(gradient)

    return run


def measure(shape: tuple[int, int, int], rounds: int) -> Iterator[Row]:
    """Yield a row per layer and pass."""
    tokens, d_in, d_out = shape
    torch.manual_seed(0)
    x, gradient = torch.randn(tokens, d_in), torch.randn(tokens, d_out)
    layers = {name: make(d_in, d_out) for name, make in LAYERS.items()}
    passes = {
        "forward": {name: forward(layer, x) for name, layer in layers.items()},
        "forward and backward": {name: both(layer, x, gradient) for name, layer in layers.items()},
    }
    for kind, actions in passes.items():
        times = interleave(actions, rounds)
        for name, time in times.items():
            yield {
                "tokens": tokens,
                "d_in": d_in,
                "d_out": d_out,
                "pass": kind,
                "what": name,
                **time.columns(),
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
