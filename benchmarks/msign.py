"""Time and accuracy of every method of `surefoot.msign`, by shape and spectrum, in one interleaved run.

    python benchmarks/msign.py --json benchmarks/results/msign.json
    python benchmarks/msign.py --methods qdwh_2 halley streaming streaming_2 --json benchmarks/results/streaming.json

Times are beside float32 `newton_schulz`, Muon's five steps. "Gaussian" matrices have entries of N(0, 1); "1/i" has
singular values 1/i between random singular vectors. With `o = msign(x)` and `x = U S Vᵀ` in float64: alignment `<o,
x> / (|o|_2 |x|_*)`, 1 being exact; the largest singular value of o; and the largest `|u_iᵀ o v_i - 1|` over singular
values of x of at least 0.01 of its largest. Of a batch, the worst matrix.

`streaming` (`streaming_2`: two iterations) starts from the vectors that ten iterations on the same matrix give. So its
time is that of any step, its accuracy that of a gradient that stays; studies/streaming has that of training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from common import TIMES, Columns, Row, at_threads, interleave, publish, timing
from surefoot import msign
from surefoot.linalg.polar import METHODS
from surefoot.linalg.power_iteration import streaming_msign

PEER = "newton_schulz"
SHAPES = ((1, 768, 768), (1, 768, 3072), (1, 2048, 768), (24, 128, 512))
SMOKE = ((2, 8, 16),)
MADE_FOR_GPUS = {"polar_express_fp16"}  # float16 is emulated on a CPU: benchmarks/gpu.py times it
STREAMING, WARM = {"streaming": 1, "streaming_2": 2}, 10  # iterations of each, and those before
NAMES = [*(name for name in METHODS if name not in MADE_FOR_GPUS), *STREAMING]
SMALLEST = 0.01  # singular value whose error counts, relative to the largest
COLUMNS: Columns = {
    "shape": ("shape", ""),
    "spectrum": ("spectrum", ""),
    "threads": ("threads", "d"),
    "method": ("method", ""),
    **TIMES,
    f"/ {PEER}": ("ratio", ".2f"),
    "alignment": ("alignment", ".4f"),
    "largest s.v.": ("largest_singular_value", ".4f"),
    "largest error of a s.v.": ("largest_error", ".1e"),
}


def gaussian(shape: tuple[int, ...]) -> Tensor:
    """Entries of N(0, 1)."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def heavy_tailed(shape: tuple[int, ...]) -> Tensor:
    """Singular values 1/i."""
    u, s, vh = torch.linalg.svd(gaussian(shape).double(), full_matrices=False)
    return ((u / torch.arange(1, s.shape[-1] + 1)) @ vh).float()


SPECTRA: dict[str, Callable[[tuple[int, ...]], Tensor]] = {"Gaussian": gaussian, "1/i": heavy_tailed}


def accuracy(x: Tensor, o: Tensor) -> Row:
    """How far o `(n, out, in)` is from x's matrix sign; in float64."""
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    signs = ((u.mT @ o.double()) * vh).sum(-1)  # u_iᵀ o v_i, (n, k)
    top = torch.linalg.matrix_norm(o.double(), 2)
    error = torch.where(s >= SMALLEST * s[..., :1], (signs - 1).abs(), 0)
    return {
        "alignment": float(((signs * s).sum(-1) / (top * s.sum(-1))).min()),
        "largest_singular_value": float(top.max()),
        "largest_error": float(error.max()),
    }


def sign_of(x: Tensor, method: str) -> Callable[[], Tensor]:
    """What computes the matrix sign of x by a method."""
    if method not in STREAMING:
        return partial(msign, x, method)
    k = min(x.shape[-2:])
    _, basis = streaming_msign(x, torch.eye(k).expand(*x.shape[:-2], k, k), WARM)
    return lambda: streaming_msign(x, basis, STREAMING[method])[0]


def measure(shape: tuple[int, ...], spectrum: str, names: list[str], rounds: int) -> Iterator[Row]:
    """A row per method."""
    x = SPECTRA[spectrum](shape)
    actions = {method: sign_of(x, method) for method in dict.fromkeys([PEER, *names])}
    times = interleave(actions, rounds)
    for method, measured in times.items():
        yield {
            "shape": " x ".join(str(n) for n in shape if n > 1),
            "spectrum": spectrum,
            "method": method,
            **measured.columns(),
            "ratio": measured.typical_ms / times[PEER].typical_ms,
            **accuracy(x, actions[method]()),
        }


def main() -> None:
    """The command line."""
    parser = timing(__doc__)
    parser.add_argument("--methods", nargs="+", choices=NAMES, default=NAMES, help="beside the peer; default all")
    options = parser.parse_args()

    def rows() -> Iterator[Row]:
        for shape in SMOKE if options.smoke else SHAPES:
            for spectrum in SPECTRA:
                yield from measure(shape, spectrum, options.methods, options.rounds)

    publish(options.json, {"rows": (at_threads(options.threads, rows), COLUMNS)})


if __name__ == "__main__":
    main()
