"""What does one choice cost in loss? The demo's model and text at one rate, and differences on the same seeds.

    python studies/paired/run.py storage       # momentum, or the weights themselves, in bfloat16; 20 minutes on 2 cores
    python studies/paired/run.py momentum      # the default recipe's in 8 bits; 10 minutes
    python studies/paired/run.py directions    # how accurate a matrix sign has to be; 15 minutes
    python studies/paired/run.py storage --table    # from the committed results, as docs/performance.md has it

`beyond_mup`, for "momentum" the default, at lr 2^-4. An interrupted run resumes; the results lie beside this file.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot import recipes
from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.data.sources import load as load_text
from surefoot.experiment.models.configs import GPTConfig
from surefoot.experiment.models.decoder import Decoder
from surefoot.experiment.models.sizes import Size
from surefoot.experiment.reports.style import markdown, plus_minus
from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.config import SweepConfig, Trial, TrialResult
from surefoot.experiment.sweep.search import Grid
from surefoot.experiment.sweep.sweep import load, run
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.methods import Method, Steepest
from surefoot.experiment.training.run import CHECK_EVERY, Run
from surefoot.linalg.bounds import squared_norm_bound
from surefoot.linalg.coefficients import ROUNDING
from surefoot.linalg.ops import Ops
from surefoot.linalg.polar import METHODS

HERE = Path(__file__).parent
BF16 = torch.bfloat16
WIDTHS = (64, 128)


ZOLOTAREV_SCALE = 0.6333893530970343
ZOLOTAREV_PARTS = (
    (1.3368238531042626e-05, 0.00945907766223356),
    (0.001069330138194799, 0.06571098018179139),
    (0.06771673387084316, 0.5378174387941379),
)
"""`(p, r)` of the one step `x -> ZOLOTAREV_SCALE x (1 + sum_i r_i / (x² + p_i))`.

The best odd function of its type: it maps [3e-3, 1] into [0.936, 1]. A smaller first p would amplify what rounding
leaves in a float32 Gram matrix. Source: E. Zolotarev, 1877; Y. Nakatsukasa, R. Freund, "Computing fundamental matrix
decompositions accurately via the matrix sign function in two iterations", 2016."""


def zolotarev(x: Tensor, ops: Ops) -> Tensor:
    """`x <- c (1 + sum_i r_i (A + p_i)⁻¹) x` with `A = x xᵀ`: one Gram matrix, one product, an inverse per part."""
    gram = ops.gram(x)
    bound = squared_norm_bound(gram)
    factor = torch.zeros_like(gram)
    for pole, residue in ZOLOTAREV_PARTS:
        shifted = gram / (bound * pole)
        shifted.diagonal(dim1=-2, dim2=-1).add_(1)
        factor.add_(ops.inverse(shifted), alpha=residue / pole)
    factor.diagonal(dim1=-2, dim2=-1).add_(1)
    return ops.apply(factor.mul_(ROUNDING * ZOLOTAREV_SCALE * bound.rsqrt()), x)


METHODS["zolotarev"] = zolotarev


@dataclass(frozen=True)
class Stored(Method):
    """A recipe with weights, forward and backward pass in `dtype`, and the optimizer's `storage`."""

    dtype: torch.dtype
    storage: sf.Precision
    recipe: sf.Recipe = field(default_factory=recipes.beyond_mup)
    clip: float | None = None

    def initialise_(self, model: nn.Module, seed: int) -> None:
        """Initialised by the plan, then rounded to `dtype`."""
        sf.Plan.of(model, self.recipe).initialise_(model, seed)
        model.to(self.dtype)

    def optimizer(self, model: nn.Module, lr: float) -> sf.SteepestDescent:
        """The optimizer, with `storage` as its precision."""
        return sf.SteepestDescent(model, sf.Plan.of(model, self.recipe), lr=lr, precision=self.storage)


@dataclass(frozen=True)
class Zolotarev(sf.Spectral):
    """The spectral norm; its direction is within 0.07 of the exact one where singular values are >= 0.01 sigma_max."""

    def direction(self, g: Tensor) -> Tensor:
        """`sqrt(d_out/d_in) msign(g)`."""
        return sf.msign(g, "zolotarev").mul_(self.unit(g.shape))


SIGNS = {
    "qdwh": sf.Spectral("qdwh"),
    "qdwh2": sf.Spectral("qdwh_2"),
    "auto": sf.Spectral("auto"),
    "halley": sf.Spectral("halley"),
    "zolotarev": Zolotarev(),
    "newton_schulz": sf.Spectral("newton_schulz"),
}
"""From the names in the results to spectral norms whose direction is computed in different ways."""


def signed(name: str, geometry: sf.Spectral) -> Steepest:
    """`beyond_mup`, the hidden matrices' directions computed by this geometry."""
    table = recipes.beyond_mup().table
    linear = replace(table["linear"], geometry=geometry)
    return Steepest(recipes.Recipe(f"msign by {name}", {**table, "linear": linear}))


def state_of_gpt2(momentum: torch.dtype) -> int:
    """Bytes of the default's state of GPT-2 Small, whose head is its embedding."""
    with torch.device("meta"):
        model = Decoder(GPTConfig(Size(768, depth=12, head_dim=64, vocab=50257), head="tied"))
    optimizer = sf.SteepestDescent(model, lr=1.0, precision=sf.Precision(momentum))
    return sum(x.nbytes for p in model.parameters() for x in optimizer._state(p).values())


@dataclass(frozen=True)
class Study:
    """Ways of training, compared with the first of them; `more` is one more column of the table, its head first."""

    ways: Mapping[str, Method]
    seeds: int
    steps: int
    more: tuple[str, ...] = ()


STUDIES = {
    "storage": Study(
        {
            "float32": Stored(torch.float32, sf.Precision()),
            "bfloat16 momentum": Stored(torch.float32, sf.Precision(BF16)),
            "bfloat16 weights, master copy": Stored(BF16, sf.Precision(weights=sf.MasterWeights())),
            "bfloat16 weights, stochastic": Stored(BF16, sf.Precision(weights=sf.StochasticRounding())),
            "bfloat16 weights, to nearest": Stored(BF16, sf.Precision()),
            "both, stochastic": Stored(BF16, sf.Precision(BF16, sf.StochasticRounding())),
        },
        seeds=5,
        steps=300,
        more=("bytes a parameter, weight and state", "8", "6", "10", "6", "6", "4"),
    ),
    "momentum": Study(
        {
            "float32": Stored(torch.float32, sf.Precision(), recipes.steady()),
            "int8": Stored(torch.float32, sf.Precision(torch.int8), recipes.steady()),
        },
        seeds=5,
        steps=300,
        more=(
            "GPT-2 Small's state, MB",
            *(f"{size / 1e6:.0f}" for size in map(state_of_gpt2, (torch.float32, torch.int8))),
        ),
    ),
    "directions": Study({name: signed(name, geometry) for name, geometry in SIGNS.items()}, seeds=8, steps=150),
}


def run_trial(trial: Trial, study: str) -> TrialResult:
    """Train one model on one thread."""
    torch.set_num_threads(1)
    config = TrainConfig(
        data_order="random", width=trial.width, lr=2.0**trial.log2_lr, seed=trial.seed, steps=trial.steps
    )
    training = Run(config, corpus(), STUDIES[study].ways[trial.recipe])
    while training.step < trial.steps and not (training.step % CHECK_EVERY == 0 and training.diverged()):
        training.advance()
    result = training.result()
    return TrialResult(result.train_loss, result.val_loss, training.seconds, result.diverged)


@functools.cache
def corpus() -> Corpus:
    """The text, read once per process."""
    return load_text(None)


def table(name: str) -> str:
    """Markdown: the mean loss of each way of training, and its difference from the first on the same seeds."""
    study, records = STUDIES[name], load(HERE / name)[1]
    first, *_ = study.ways
    columns = (*(f"loss at {width}" for width in WIDTHS), *(f"against {first} at {width}" for width in WIDTHS))
    head = [name, *study.more[:1], *columns]
    rows = []
    losses: dict[tuple[str, int], dict[int, float]] = {}
    for r in records:
        losses.setdefault((r["recipe"], r["width"]), {})[r["seed"]] = r["val_loss"]
    for i, way in enumerate(study.ways, 1):
        mine = [losses[way, width] for width in WIDTHS]
        line = [way, *study.more[i : i + 1], *(f"{sum(by_seed.values()) / len(by_seed):.3f}" for by_seed in mine)]
        for width, by_seed in zip(WIDTHS, mine, strict=True):
            against = fit.difference(by_seed, losses[first, width])
            line.append("" if way == first else f"{against.value:+.4f}{plus_minus(against.interval, 4)}")
        rows.append(line)
    return markdown(head, rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--table", action="store_true", help="only print the table")
    options = parser.parse_args()
    if not options.table:
        study = STUDIES[options.study]
        sweep = SweepConfig(tuple(study.ways), WIDTHS, tuple(range(study.seeds)), study.steps, Grid((-4.0,)))
        cell = functools.partial(run_trial, study=options.study)
        run(sweep, HERE / options.study, cell, environment={"corpus_sha256": corpus().sha256})
    print(table(options.study))


if __name__ == "__main__":
    main()
