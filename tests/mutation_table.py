"""What `tests/mutations.py` tries: a piece of the package's text, what it becomes, and the tests that must fail."""

from dataclasses import dataclass

GEOMETRY = "tests/laws/test_geometry.py"
PROJECTION = "tests/laws/test_projection.py"
MSIGN = "tests/laws/linalg/test_msign.py"
PRECISION = "tests/laws/linalg/test_matmul_precision.py"
OPS = "tests/laws/linalg/test_ops.py"
BATCHING = "tests/unit/optim/test_batching.py"
RATES = "tests/unit/optim/test_learning_rates.py"
MASKS = "tests/unit/optim/test_masks.py"
STABILISERS = "tests/laws/test_stabilisers.py"
MOVES = "tests/laws/test_moves.py"
GUARANTEE = "tests/laws/test_guarantee.py"
RUNNING_BOUND = "tests/laws/test_running_bound.py"
CHANGE, PROMISES = "tests/laws/promises/test_change.py", "tests/laws/promises/test_promises.py"
ADDED, EDGES = "tests/unit/discovery/test_added_tables.py", "tests/unit/core/test_plan_edges.py"
CHECK = "tests/laws/test_check.py"
FUSED_VALUES = "tests/unit/discovery/test_fused_values.py"
TANGENT = "tests/laws/linalg/test_spectral_sphere.py"
MANIFOLDS = "tests/laws/linalg/test_manifolds.py"
HYPERBALL = "tests/oracle/test_hyperball.py"
VIEWS, HEADS = "tests/unit/core/test_views.py", "tests/unit/core/test_plan_heads.py"
IDENTITY = "tests/unit/core/test_identity.py"
SWEEP = "tests/unit/experiment/test_sweep.py"


@dataclass(frozen=True)
class Mutation:
    """`old` becomes `new` in one file of the package; `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str


MUTATIONS = (
    Mutation("sign of the step", "stabilise/base.py", "alpha=-eta", "alpha=eta", MOVES),
    Mutation(
        "sign of msign", "geometry/spectral.py", ".mul_(self.unit(g.shape))", ".mul_(-self.unit(g.shape))", GEOMETRY
    ),
    Mutation("sign of a row's direction", "geometry/lp_balls.py", "unit = g /", "unit = -g /", GEOMETRY),
    Mutation(
        "fan-in and fan-out swapped, spectral",
        "geometry/spectral.py",
        "math.sqrt(max(1, shape[-2]) / max(1, shape[-1]))",
        "math.sqrt(max(1, shape[-1]) / max(1, shape[-2]))",
        GEOMETRY,
    ),
    Mutation(
        "fan-in and fan-out swapped, head",
        "geometry/vectors.py",
        "return math.sqrt(max(1, shape[-1]))",
        "return math.sqrt(max(1, shape[-2]))",
        GEOMETRY,
    ),
    Mutation(
        "fan-in and fan-out swapped, column",
        "geometry/mean_operator.py",
        "shape[-1] / max(1, shape[-2])",
        "shape[-2] / max(1, shape[-1])",
        GEOMETRY,
    ),
    Mutation(
        "momentum normalised in place, rows",
        "geometry/lp_balls.py",
        "unit = g / divisor(max_abs(g, dim))",
        "unit = g.div_(divisor(max_abs(g, dim)))",
        GEOMETRY,
    ),
    Mutation(
        "momentum normalised in place, msign",
        "linalg/polar.py",
        "torch.where(safe, x, x / max_abs_or_one(x))",
        "torch.where(safe, x, x.div_(max_abs_or_one(x)))",
        MSIGN,
    ),
    Mutation(
        "eps added to the norm, msign",
        "linalg/polar.py",
        "torch.where(safe, x, x / max_abs_or_one(x))",
        "torch.where(safe, x, x / (max_abs_or_one(x) + 1e-8))",
        MSIGN,
    ),
    Mutation(
        "eps added to the norm, rows",
        "geometry/lp_balls.py",
        "unit = g / divisor(max_abs(g, dim))",
        "unit = g / (max_abs(g, dim) + 1e-8)",
        GEOMETRY,
    ),
    Mutation(
        "absent row turned NaN",
        "geometry/lp_balls.py",
        "unit = g / divisor(max_abs(g, dim))",
        "unit = g / max_abs(g, dim)",
        GEOMETRY,
    ),
    Mutation("zero matrix turned NaN", "linalg/bounds.py", "divisor(max_abs(x,", "(max_abs(x,", MSIGN),
    Mutation(
        "clip threshold without the width factor, spectral",
        "geometry/spectral.py",
        "mclip(w, radius * self.unit(w.shape))",
        "mclip(w, radius)",
        PROJECTION,
    ),
    Mutation(
        "clip threshold without the width factor, rows",
        "geometry/vectors.py",
        "precise.dtype) / self.scale(w.shape)",
        "precise.dtype)",
        PROJECTION,
    ),
    Mutation(
        "flags restored too early", "linalg/device.py", "while _replaced and not _users:", "while _replaced:", PRECISION
    ),
    Mutation("few long rows in float32", "linalg/ops.py", "FLOAT64_ROWS = 16", "FLOAT64_ROWS = 0", MSIGN),
    Mutation(
        "one Gram matrix for few long rows",
        "linalg/polar.py",
        "HALLEY_ROWS, HALLEY_COLUMNS = (32,",
        "HALLEY_ROWS, HALLEY_COLUMNS = (2,",
        OPS,
    ),
    Mutation("neighbours out of range", "linalg/polar.py", "torch.where(safe, x, x / max", "(x / max", MSIGN),
    Mutation(
        "inverse by halves, coupling", "linalg/ops.py", "multiply(side, last)).neg_()", "multiply(side, last))", OPS
    ),
    Mutation(
        "equal entries rounded to one side",
        "linalg/polar.py",
        "torch.exp2(golden.frac())",
        "torch.ones_like(golden)",
        "tests/laws/linalg/test_polar_float16.py",
    ),
    Mutation("what is slower is fast", "linalg/onednn_ops.py", "RATIO = 0.75", "RATIO = 1.5", OPS),
    Mutation("a tall matrix in another layout", "linalg/ops.py", "if x.mT.is_contiguous() else", "if False else", OPS),
    Mutation(
        "weights side by side written at once",
        "optim/batching.py",
        "return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))",
        "return tensors[0].as_strided((len(tensors), *tensors[0].shape), (tensors[0].numel(), *tensors[0].stride()))",
        BATCHING,
    ),
    Mutation(
        "momenta apart",
        "optim/batching.py",
        "if all(x.untyped_storage().nbytes() == size for x in tensors):",
        "if False:",
        BATCHING,
    ),
    Mutation(
        "a rate multiplied in its own dtype",
        "optim/param_groups.py",
        "return float(lr.detach() if isinstance(lr, Tensor) else lr)",
        "return lr",
        RATES,
    ),
    Mutation("a rate of two entries accepted", "optim/param_groups.py", "if lr.numel() != 1:", "if False:", RATES),
    Mutation("weight in new memory", "stabilise/base.py", "eta, into=w), cache", "eta), cache", MOVES),
    Mutation("momentum in new memory", "momentum/base.py", "old.lerp_(g, weight)", "old.lerp(g, weight)", MOVES),
    Mutation(
        "steps of eta 0 not undone", "step.py", "return where_moved(eta, dims, moved, w), {", "return moved, {", MASKS
    ),
    Mutation(
        "the step's norm bounded, not the weight's",
        "step.py",
        "moved, cache = stabiliser.move(w, d, eta, ball,",
        "moved, cache = stabiliser.move(w, d, eta, role.geometry.plain,",
        GUARANTEE,
    ),
    Mutation("an empty row", "geometry/lp_balls.py", "if s == 2 and g.numel() and", "if s == 2 and", GEOMETRY),
    Mutation("decay not capped", "stabilise/base.py", "min(1.0, max(0.0, eta * rate))", "eta * rate", MOVES),
    Mutation(
        "running bound does not grow",
        "stabilise/running_bound.py",
        "* (1 + 2 * rounding) + reach,",
        "* (1 + 2 * rounding),",
        GUARANTEE,
    ),
    Mutation(
        "an overridden direction assumed to be known",
        "geometry/spectral.py",
        "Sizes() if self._redirected else Sizes(spectral=most)",
        "Sizes(spectral=most)",
        CHANGE,
    ),
    Mutation(
        "promise of decay assumes steps of norm 1",
        "stabilise/decay.py",
        "bound = unit if longest <= TOLERANCE[torch.float32] else longest * unit",
        "bound = unit",
        PROMISES,
    ),
    Mutation(
        "clip's way back not reported",
        "stabilise/clip.py",
        "return torch.where((running + reach > self.radius) & (known.upper + reach > inside), back, reach)",
        "return torch.where(running > 1e30, back, reach)",
        CHANGE,
    ),
    Mutation("orthogonal by a fast one", "stabilise/manifolds.py", ".retract(along(", ".direction(along(", PROMISES),
    Mutation("a norm of other rows", "discovery/find.py", ".normalized_shape) == (d,)", ".normalized_shape)", HEADS),
    Mutation("a head (d, V) by its other side", "discovery/overrides.py", "in tables - {shape}", "in {()}", HEADS),
    Mutation("positions keep RMS 1", "discovery/find.py", "(tied, added, ", "(tied, ", ADDED),
    Mutation("small rows drown", "discovery/tied.py", "branches=COUNT * kind", "branches=kind", ADDED),
    Mutation(
        "margin of one step too few",
        "stabilise/running_bound.py",
        "torch.where(outside, inside * (1 + 4 * rounding), upper)",
        "torch.where(outside, inside - reach, upper)",
        GUARANTEE,
    ),
    Mutation(
        "steps of another norm counted as the weight's",
        "step.py",
        "longest = partial(ChangeBounds.of(role.geometry).direction_norm_bound,",
        "longest = partial(ChangeBounds.of(ball).direction_norm_bound,",
        "tests/laws/test_running_bound.py",
    ),
    Mutation("sphere's multiplier of the wrong sign", "linalg/tangent.py", "x - step * h", "x + step * h", TANGENT),
    Mutation(
        "sphere's ends not mixed",
        "linalg/tangent.py",
        "return torch.lerp(low.d, high.d,",
        "return torch.lerp(low.d, low.d,",
        TANGENT,
    ),
    Mutation("turn that stretches", "linalg/tangent.py", "(turn - turn.mT,", "(turn + turn.mT,", MANIFOLDS),
    Mutation("fixed multipliers", "linalg/tangent.py", "[..., None], mixed, x)", "[..., None], x, x)", MANIFOLDS),
    Mutation("step by noise", "linalg/tangent.py", "(part, dims) > least", "(part, dims) >= 0", MANIFOLDS),
    Mutation("Hyperball's own step", "stabilise/sphere.py", "eta * (d * share)", "eta * d", HYPERBALL),
    Mutation(
        "unequal projections by one scale",
        "roles.py",
        "Constant(role.lr_scale(x)).value",
        "Constant(role.lr_scale(self.blocks[0])).value",
        VIEWS,
    ),
    Mutation(
        "fused values with the role of queries",
        "roles.py",
        "self.by_block or (self.role,)",
        "(self.role,)",
        FUSED_VALUES,
    ),
    Mutation("loaded bound not revalidated", "optim/optimizer.py", "self._bounds.clear()", "pass", GUARANTEE),
    Mutation(
        "writes from outside not noticed",
        "stabilise/running_bound.py",
        "elif not bool((changed := self._changed(params, fingerprint(weights))).any()):",
        "elif True:",
        GUARANTEE,
    ),
    Mutation(
        "fingerprint without weights of positions",
        "stabilise/running_bound.py",
        "return torch.mv(w, _column_weights(w.shape[-1], w.dtype))",
        "return w.sum(-1)",
        RUNNING_BOUND,
    ),
    Mutation(
        "fingerprint of any layout",
        "stabilise/running_bound.py",
        "_row_sums(w.reshape(-1, n)).reshape(len(w), -1)",
        "(w @ _column_weights(w.shape[-1], w.dtype)).flatten(1)",
        RUNNING_BOUND,
    ),
    Mutation("roles compared by name", "roles.py", "self._key == other._key", "self.name == other.name", IDENTITY),
    Mutation(
        "tensors compared by shape",
        "identity.py",
        "return hashlib.sha256(ctypes",
        'return "" and hashlib.sha256(ctypes',
        IDENTITY,
    ),
    Mutation(
        "coupled dimensions not checked", "geometry/check.py", 'laws["coupled"] = 1.0', 'laws["coupled"] = 0.0', CHECK
    ),
    Mutation("wrong exponent of the dual direction", "geometry/lp_balls.py", "** (p - 1)\n", "** (s - 1)\n", GEOMETRY),
    Mutation(
        "best lr taken from another width",
        "experiment/sweep/summary.py",
        '"best_log2_lr": [o.log2_lr for o in best]',
        '"best_log2_lr": [best[0].log2_lr for o in best]',
        SWEEP,
    ),
    Mutation(
        "regret of the wrong width's optimum",
        "experiment/sweep/summary.py",
        "vertex = optima[widths[0]]",
        "vertex = optima[widths[-1]]",
        SWEEP,
    ),
)
