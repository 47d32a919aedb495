"""Break the library on purpose, one way at a time, and see the tests fail: `python tests/mutations.py [name ...]`.

Each mutation replaces one piece of text in a temporary copy of `src` (an assertion says when the code has moved
on and the text is gone) and runs the tests that must notice. Exit code 1 names the mutations that survived. It
takes about three minutes; the test suite itself does not run it.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GEOMETRY = "tests/laws/test_geometry.py"
PROJECTION = "tests/laws/test_projection.py"
MSIGN = "tests/laws/linalg/test_msign.py"
PRECISION = "tests/laws/linalg/test_matmul_precision.py"
OPS = "tests/laws/linalg/test_ops.py"
BATCHING = "tests/unit/optim/test_batching.py"
RATES = "tests/unit/optim/test_learning_rates.py"
STABILISERS = "tests/laws/test_stabilisers.py"
MOVES = "tests/laws/test_moves.py"
GUARANTEE = "tests/laws/test_guarantee.py"
TANGENT = "tests/laws/linalg/test_spectral_sphere.py"
VIEWS = "tests/unit/core/test_views.py"
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
    Mutation("sign of a row's direction", "geometry/lp_balls.py", "unit = g / torch", "unit = -g / torch", GEOMETRY),
    Mutation(
        "fan-in and fan-out swapped, spectral",
        "geometry/spectral.py",
        "math.sqrt(max(1, shape[-2]) / max(1, shape[-1]))",
        "math.sqrt(max(1, shape[-1]) / max(1, shape[-2]))",
        GEOMETRY,
    ),
    Mutation(
        "fan-in and fan-out swapped, head",
        "geometry/rows.py",
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
        "unit = g / torch.where(top == 0, 1, top)",
        "unit = g.div_(torch.where(top == 0, 1, top))",
        GEOMETRY,
    ),
    Mutation(
        "momentum normalised in place, msign",
        "linalg/polar.py",
        "return x / max_abs_or_one(x)",
        "return x.div_(max_abs_or_one(x))",
        MSIGN,
    ),
    Mutation(
        "eps added to the norm, msign",
        "linalg/polar.py",
        "return x / max_abs_or_one(x)",
        "return x / (max_abs_or_one(x) + 1e-8)",
        MSIGN,
    ),
    Mutation(
        "eps added to the norm, rows",
        "geometry/lp_balls.py",
        "unit = g / torch.where(top == 0, 1, top)",
        "unit = g / (top + 1e-8)",
        GEOMETRY,
    ),
    Mutation(
        "absent row turned NaN",
        "geometry/lp_balls.py",
        "unit = g / torch.where(top == 0, 1, top)",
        "unit = g / top",
        GEOMETRY,
    ),
    Mutation(
        "zero matrix turned NaN", "linalg/max_abs.py", "return torch.where(peak == 0, 1, peak)", "return peak", MSIGN
    ),
    Mutation(
        "clip threshold without the width factor, spectral",
        "geometry/spectral.py",
        "mclip(w, radius * self.unit(w.shape))",
        "mclip(w, radius)",
        PROJECTION,
    ),
    Mutation(
        "clip threshold without the width factor, rows",
        "geometry/lp_base.py",
        "precise.dtype) / self.scale(w.shape)",
        "precise.dtype)",
        PROJECTION,
    ),
    Mutation("flags restored too early", "linalg/matmul_precision.py", "if self._users:", "if False:", PRECISION),
    Mutation("few long rows in float32", "linalg/ops.py", "FLOAT64_ROWS = 16", "FLOAT64_ROWS = 0", MSIGN),
    Mutation(
        "one Gram matrix for few long rows",
        "linalg/polar.py",
        "HALLEY_ROWS, HALLEY_COLUMNS = (32,",
        "HALLEY_ROWS, HALLEY_COLUMNS = (2,",
        MSIGN,
    ),
    Mutation(
        "neighbours out of range", "linalg/polar.py", "torch.where(safe, x, _unit_peak(x))", "_unit_peak(x)", MSIGN
    ),
    Mutation(
        "inverse by halves, coupling", "linalg/ops.py", "torch.bmm(side, last)).neg_()", "torch.bmm(side, last))", OPS
    ),
    Mutation("a tall matrix in another layout", "linalg/ops.py", "if x.mT.is_contiguous() else", "if False else", OPS),
    Mutation("weights side by side", "optim/batching.py", "Tensor] = stack)", "Tensor] = stack_adjacent)", BATCHING),
    Mutation("a rate of one entry", "optim/optimizer.py", 'group["lr"].reshape(())', 'group["lr"]', RATES),
    Mutation("pages given back", "optim/optimizer.py", "        host.keep_freed()\n", "", BATCHING),
    Mutation("momenta apart", "optim/optimizer.py", "if unseen and host", "if False and host", BATCHING),
    Mutation("weight in new memory", "stabilise/base.py", "geometry, into=w)", "geometry)", MOVES),
    Mutation("momentum in new memory", "momentum.py", "old.lerp_(g, 1", "old.lerp(g, 1", MOVES),
    Mutation("an empty row", "geometry/lp_balls.py", "if s == 2 and g.numel() and", "if s == 2 and", GEOMETRY),
    Mutation("decay not capped", "stabilise/base.py", "1 - min(1.0, eta * rate)", "1 - eta * rate", MOVES),
    Mutation("running bound does not grow", "geometry/spectral.py", ") + reach, cache", "), cache", GUARANTEE),
    Mutation(
        "running bound believes in any direction",
        "geometry/spectral.py",
        " if type(self).direction is Spectral.direction else math.inf",
        "",
        STABILISERS,
    ),
    Mutation(
        "margin of one step too few",
        "geometry/spectral.py",
        "inside * (1 + 4 * rounding)",
        "inside - eta * self.direction_norm_bound",
        GUARANTEE,
    ),
    Mutation(
        "steps of another norm counted as the weight's",
        "geometry/paired.py",
        "period, cache, self.direction_norm_bound)",
        "period, cache)",
        STABILISERS,
    ),
    Mutation(
        "sphere's multiplier of the wrong sign", "linalg/spectral_sphere.py", "x - step * h", "x + step * h", TANGENT
    ),
    Mutation(
        "sphere's ends not mixed",
        "linalg/spectral_sphere.py",
        "return torch.lerp(low.d, high.d,",
        "return torch.lerp(low.d, low.d,",
        TANGENT,
    ),
    Mutation(
        "unequal projections by one scale",
        "optim/optimizer.py",
        "role.lr_scale(block), finite",
        "role.lr_scale(placement.blocks[0]), finite",
        VIEWS,
    ),
    Mutation("loaded bound believed", "optim/optimizer.py", "self._marks.clear()", "pass", GUARANTEE),
    Mutation("outside writes not noticed", "optim/optimizer.py", "if not bool(written.any()):", "if True:", GUARANTEE),
    Mutation("wrong exponent of the dual direction", "geometry/lp_balls.py", "** (p - 1)\n", "** (s - 1)\n", GEOMETRY),
    Mutation(
        "best lr taken from another width",
        "experiment/sweep/summary.py",
        '"best_log2_lr": [o.log2_lr for o in optima]',
        '"best_log2_lr": [optima[0].log2_lr for o in optima]',
        SWEEP,
    ),
    Mutation(
        "regret of the wrong width's optimum",
        "experiment/sweep/summary.py",
        "_regret(optima[0].log2_lr",
        "_regret(optima[-1].log2_lr",
        SWEEP,
    ),
)


def passes(source: Path, tests: list[str]) -> bool:
    """Whether the tests pass on this copy of the package; the first failure ends the run."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no", *tests]
    environment = os.environ | {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    where = subprocess.run(
        [sys.executable, "-c", "import surefoot; print(surefoot.__file__)"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert where.startswith(str(source)), f"the tests would run on {where.strip()}, not on {source}"
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode not in (0, 1):  # 2 and up: no test ran, which proves nothing
        raise RuntimeError(f"pytest could not run {tests}:\n{result.stdout}{result.stderr}")
    return result.returncode == 0


def survives(mutation: Mutation) -> bool:
    """Whether the tests still pass with the mutation in place."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        file = source / "surefoot" / mutation.file
        text = file.read_text()
        assert text.count(mutation.old) == 1, f"{mutation.name}: {mutation.file} has {mutation.old!r} not exactly once"
        file.write_text(text.replace(mutation.old, mutation.new))
        return passes(source, [mutation.tests])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="part of a mutation's name; default: all of them")
    names = parser.parse_args().names
    chosen = [m for m in MUTATIONS if not names or any(name in m.name for name in names)]
    if not chosen:
        parser.error("no such mutation; choose among: " + ", ".join(m.name for m in MUTATIONS))
    assert passes(ROOT / "src", sorted({m.tests for m in chosen})), "the tests fail before anything is broken"
    survivors = []
    for mutation in chosen:
        alive = survives(mutation)
        print(f"{'SURVIVED' if alive else 'caught':9} {mutation.name}", flush=True)
        survivors += [mutation.name] * alive
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
