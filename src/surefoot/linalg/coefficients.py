"""Coefficients of the polar iterations, with their sources."""

import math

Quintic = tuple[float, float, float]
"""`(a, b, c)` of one step `x -> a x + b x³ + c x⁵` on every singular value."""

NEWTON_SCHULZ: tuple[Quintic, ...] = ((3.4445, -4.7750, 2.0315),) * 5
"""K. Jordan, "Muon", 2024. Steep at 0, not convergent: values land in about [0.68, 1.21]."""

# N. Amsel, D. Persson, C. Musco, R. M. Gower, "The Polar Express", 2025, list for l = 1e-3: the minimax odd
# quintic of each step, given the interval that the steps before it leave.
_MINIMAX: tuple[Quintic, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
)
_DAMPED = [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in _MINIMAX]
POLAR_EXPRESS: tuple[Quintic, ...] = (*_DAMPED, *((1.875, -1.25, 0.375),) * 2)
"""Six minimax steps, damped by 1 % against rounding, then two of the classical quintic, tangent to 1 at 1: it removes
what rounding and the minimax ripple leave."""

POLAR_EXPRESS_FP16: tuple[Quintic, ...] = (
    (8.300666943488281, -24.037544230253616, 17.466133545669692),
    (4.0033865680202245, -2.9228400184426993, 0.5418712697038386),
    (3.4708619972711814, -2.5494043348672863, 0.5002039749955783),
    (2.4654613261824316, -1.7803293239089077, 0.41563323476674785),
    (1.8987883650806459, -1.2586129598288736, 0.36127616035875143),
)
"""Five steps for float16: by the same recursion for l = 3e-3, which maps [3e-3, 1] into 1 ± 0.005; damped likewise."""

STARTS = (0, 1, 3)
"""Steps before which the Gram matrix of x is computed anew. The first step lifts a singular value of a tenth eightfold,
and the rounding of its square 65-fold: a second step on the same Gram matrix can leave the interval in which the
next ones converge (largest singular value 1.3 to 7, on few nonzero rows)."""

SHRINK = 0.96
"""Factor that compensates ripple and rounding: without it the largest singular value was at most 1.0075, on a CPU."""


def qdwh(lowest: float, steps: int) -> tuple[Quintic, ...]:
    """Weights of the dynamically weighted Halley steps `x -> x (a + b x²) / (1 + c x²)`.

    Each step is the best rational function of its type that maps `[lowest, 1]` into `[lowest', 1]`.
    Source: Y. Nakatsukasa, Z. Bai, F. Gygi, "Optimizing Halley's iteration", 2010, eq. 3.18 to 3.20.

    Args:
        lowest: smallest singular value (relative to the largest) that must reach 1; 0 < lowest < 1.
        steps: number of steps.

    Returns:
        `(a, b, c)` of each step.

    >>> [round(c) for _, _, c in qdwh(1e-3, 2)]
    [16000, 14]
    """
    weights = []
    for _ in range(steps):
        square = lowest * lowest
        root = (4 * (1 - square) / square**2) ** (1 / 3)
        a = math.sqrt(1 + root) + 0.5 * math.sqrt(8 - 4 * root + 8 * (2 - square) / (square * math.sqrt(1 + root)))
        b = (a - 1) ** 2 / 4
        c = a + b - 1
        weights.append((a, b, c))
        lowest = min(1.0, lowest * (a + b * square) / (1 + c * square))
    return tuple(weights)


_DEGREE_9 = (3.97056497261309, -12.761707634657196, 24.673262881817383, -22.92666161360823, 8.044541393834946)
HALLEY: tuple[Quintic, tuple[float, ...]] = (qdwh(lowest=4e-3, steps=1)[0], _DEGREE_9)
"""One Halley step, and the minimax odd polynomial of degree 9 on [.385, 1], into which the step maps [.004, 1]: it ends
in [.982, 1]. A smaller lowest value would amplify what rounding leaves in a float32 Gram matrix."""

ROUNDING = 0.998
"""Factor that compensates what float32 rounding adds to the largest singular value of methods that take one Gram matrix
only: at most 1.3e-3, on spectra of two values."""

SHRINK_BF16 = 0.99
"""The same for two Halley steps, the second in bfloat16: without it the largest singular value was at most 1.0048 from
128 rows on, 1.0095 for fewer."""
