"""Which settings should be the defaults? Each variant gets its own best learning rate; the losses are compared.

    python studies/defaults/run.py beyond_mup    # one setting at a time around the default recipe
    python studies/defaults/run.py adamw         # the same number of settings of AdamW
    python studies/defaults/run.py moonlight     # and of Muon under Moonlight's scale; moonlight_2: its second round
    python studies/defaults/run.py --table       # what each choice gains, from the committed results

Widths 32 and 64 (64 and 128 in `beyond_mup_3`), 120 steps, the demo's model and text, three seeds that no transfer
study uses. Resumes; the results lie beside this file, in `<study>/results.jsonl`. `adamw_grid` and `adamw_grid_128` are
the coarse search, at one seed, that gave AdamW's starting point.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surefoot import recipes
from surefoot.experiment.data.corpus import load
from surefoot.experiment.models.decoder import GPT, GPTConfig, Size
from surefoot.experiment.reports import transfer as transfer_report
from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.config import SweepConfig, Trial, TrialResult
from surefoot.experiment.sweep.search import Bracket
from surefoot.experiment.sweep.summary import points
from surefoot.experiment.sweep.sweep import load as load_sweep
from surefoot.experiment.sweep.sweep import run
from surefoot.experiment.training.baselines import gpt2_, torch_
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train
from surefoot.experiment.training.methods import AdamW, Initialise, Method, Steepest
from surefoot.geometry import Identity
from surefoot.momentum import Adam, Momentum
from surefoot.scaling import Constant, Moonlight

HERE = Path(__file__).parent
SEEDS = (100, 101, 102)
OWN = {"model": f"{Path(__file__).stem}:biased"}
BASE, BIASED = "base", "with biases, bias 1.0"


@dataclass(frozen=True)
class Variant:
    """A way of training, and the fields of `TrainConfig` that differ with it."""

    method: Method
    training: Mapping[str, Any] = field(default_factory=dict)


Variants = dict[str, Variant]


class Restless(Momentum):
    """Momentum under which a row absent from the batch moves on, in the direction of its old gradients."""

    def live(self, g: Tensor, finite: Tensor, couples: frozenset[int]) -> Tensor:
        """Every finite gradient, zero or not."""
        return finite.to(g.dtype)


@dataclass(frozen=True)
class Started(Method):
    """A method with other initial values."""

    method: Method
    initialise: Initialise
    clip: float | None = None

    def initialise_(self, model: nn.Module, seed: int) -> None:
        """As `initialise` says."""
        self.initialise(model, seed)

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """The method's own."""
        return self.method.optimizer(model, lr)


def biased(width: int) -> nn.Module:
    """The study's model with biases in every linear layer and LayerNorm."""
    return GPT(GPTConfig(Size(width, depth=2, head_dim=16, vocab=256), biases="all"))


def _schedules(method: Method) -> Variants:
    return {
        "warm-up 2 %": Variant(method, {"warmup": 0.02}),
        "warm-up 25 %": Variant(method, {"warmup": 0.25}),
        "decay over the last 30 %": Variant(method, {"decay": 0.3}),
    }


def _varied(recipe: recipes.Recipe, kinds: tuple[str, ...] = (), **changes: Any) -> Steepest:
    """The recipe with changes to the roles of these kinds (all by default)."""
    table = {k: replace(role, **changes) if not kinds or k in kinds else role for k, role in recipe.table.items()}
    return Steepest(recipes.Recipe("variant", table))


def _beyond_mup_base() -> recipes.Recipe:
    """Where the search started: factor 16 on the head's rate, 1 on the others, whatever the recipe has now."""
    scales = dict.fromkeys(recipes.beyond_mup().table, 1.0) | {"head": 16.0}
    table = {
        kind: replace(role, momentum=Momentum(0.9, 0.8), lr_scale=Constant(scales[kind]))
        for kind, role in recipes.beyond_mup().table.items()
    }
    return recipes.Recipe("base", table)


def _beyond_mup() -> Variants:
    base = _beyond_mup_base()

    def scaled(kind: str, scale: float) -> Method:
        return _varied(base, (kind,), lr_scale=Constant(scale))

    pairs = ((0.95, 0.9), (0.9, 0.9), (0.9, 0.7), (0.9, 0.6), (0.85, 0.7), (0.8, 0.6))
    scales = {"head": (4, 8, 32), "embedding": (0.5, 2), "gain": (0.0625, 0.125, 0.25, 0.5, 2)}
    return {
        BASE: Variant(Steepest(base)),
        **{f"momentum {pair}": Variant(_varied(base, momentum=Momentum(*pair))) for pair in pairs},
        **{f"{kind} {s}": Variant(scaled(kind, float(s))) for kind, values in scales.items() for s in values},
        "absent rows move on": Variant(_varied(base, momentum=Restless(0.9, 0.8))),
        **_schedules(Steepest(base)),
        **{f"with biases, bias {s}": Variant(scaled("bias", s), OWN) for s in (0.25, 1.0, 4.0)},
    }


def _beyond_mup_2() -> Variants:
    """Around the best of the first round: gains at a quarter of the rate."""
    first = _beyond_mup()["gain 0.25"].method
    assert isinstance(first, Steepest)

    def scaled(kind: str, scale: float) -> Method:
        return _varied(first.recipe, (kind,), lr_scale=Constant(scale))

    return {
        BASE: Variant(first),
        **{
            f"momentum {pair}": Variant(_varied(first.recipe, momentum=Momentum(*pair)))
            for pair in ((0.9, 0.7), (0.85, 0.7))
        },
        **{f"head {scale}": Variant(scaled("head", float(scale))) for scale in (8, 24)},
        **{f"with biases, bias {s}": Variant(scaled("bias", s), OWN) for s in (0.25, 1.0)},
    }


def _beyond_mup_3() -> Variants:
    """Momentum by role, as tuned Muon has it; and Adam on embedding and head, to see which part is its gain."""
    base = recipes.beyond_mup()
    short, long, ends = Momentum(0.8, 0.6), Momentum(0.95, 0.9), ("embedding", "head")

    def hidden(recipe: Steepest, pair: Momentum = short) -> Steepest:
        return _varied(recipe.recipe, ("linear",), momentum=pair)

    def adam(kind: str, scale: float) -> Steepest:
        return _varied(base, (kind,), geometry=Identity(), momentum=Adam(0.6, 0.8), lr_scale=Constant(scale))

    return {
        BASE: Variant(Steepest(base)),
        **{f"hidden {pair}": Variant(hidden(Steepest(base), Momentum(*pair))) for pair in ((0.8, 0.6), (0.7, 0.5))},
        "embedding and head (0.95, 0.9)": Variant(_varied(base, ends, momentum=long)),
        "hidden (0.8, 0.6), the ends (0.95, 0.9)": Variant(hidden(_varied(base, ends, momentum=long))),
        "hidden (0.8, 0.6), head (0.95, 0.9)": Variant(hidden(_varied(base, ("head",), momentum=long))),
        "hidden (0.8, 0.6), embedding 2": Variant(hidden(_varied(base, ("embedding",), lr_scale=Constant(2.0)))),
        "hidden (0.8, 0.6), head 8": Variant(hidden(_varied(base, ("head",), lr_scale=Constant(8.0)))),
        "head by Adam": Variant(adam("head", 1.0)),
        "embedding by Adam, 4": Variant(adam("embedding", 4.0)),
        "hidden (0.8, 0.6), head by Adam": Variant(hidden(adam("head", 1.0))),
    }


def _adamw() -> Variants:
    base = AdamW(torch_, (0.6, 0.8), 0.1, 1.0)
    rates = {"embedding": (0.25, 4, 16), "head": (0.25, 0.5, 2, 4), "gain": (0.25, 4)}
    betas = ((0.5, 0.8), (0.6, 0.9), (0.7, 0.8), (0.7, 0.9), (0.9, 0.95))
    return {
        BASE: Variant(base),
        **{f"betas {pair}": Variant(replace(base, betas=pair)) for pair in betas},
        **{f"decay {decay}": Variant(replace(base, weight_decay=decay)) for decay in (0.0, 0.3)},
        "no clipping": Variant(replace(base, clip=None)),
        "GPT-2's initial values": Variant(replace(base, initialise=gpt2_)),
        **{f"{k} {s}": Variant(replace(base, rates={k: float(s)})) for k, values in rates.items() for s in values},
        **_schedules(base),
    }


def _moonlight() -> Variants:
    base = recipes.muon(Moonlight())
    others = ("embedding", "head", "gain", "bias", "scalar")

    def scaled(kind: str, scale: float) -> Method:
        return _varied(base, (kind,), lr_scale=Constant(scale))

    pairs = ((0.95, 0.9), (0.9, 0.8), (0.9, 0.7), (0.8, 0.6))
    scales = {"embedding": (0.25, 4, 16), "head": (0.25, 0.5, 4), "gain": (0.25, 4)}
    return {
        BASE: Variant(Steepest(base)),
        **{f"momentum {pair}": Variant(_varied(base, ("linear",), momentum=Momentum(*pair))) for pair in pairs},
        **{
            f"betas {b}": Variant(_varied(base, others, momentum=Adam(*b)))
            for b in ((0.6, 0.8), (0.7, 0.9), (0.8, 0.9))
        },
        **{f"{kind} {s}": Variant(scaled(kind, float(s))) for kind, values in scales.items() for s in values},
        "clipping at 1": Variant(Steepest(base, clip=1.0)),
        "torch's initial values": Variant(Started(Steepest(base), torch_)),
    }


def moonlight_tuned(pair: tuple[float, float] = (0.8, 0.6), embedding: float = 4.0) -> recipes.Recipe:
    """The best of the first round together: shorter momentum, a faster embedding."""
    table = dict(recipes.muon(Moonlight()).table)
    table["linear"] = replace(table["linear"], momentum=Momentum(*pair))
    table["embedding"] = replace(table["embedding"], lr_scale=Constant(embedding))
    return recipes.Recipe("moonlight tuned", table)


def _moonlight_2() -> Variants:
    base = moonlight_tuned()
    others = ("embedding", "head", "gain", "bias", "scalar")
    return {
        BASE: Variant(Steepest(base)),
        **{f"momentum {pair}": Variant(Steepest(moonlight_tuned(pair))) for pair in ((0.9, 0.7), (0.7, 0.5))},
        **{f"embedding {scale}": Variant(Steepest(moonlight_tuned(embedding=scale))) for scale in (1.0, 2.0, 8.0)},
        **{f"betas {b}": Variant(_varied(base, others, momentum=Adam(*b))) for b in ((0.7, 0.9), (0.8, 0.9))},
    }


def _adamw_grid() -> Variants:
    betas = ((0.9, 0.999), (0.9, 0.95), (0.8, 0.9))
    grid = [*itertools.product((torch_, gpt2_), betas, (0.0, 0.1), (None, 1.0))]
    grid += itertools.product((torch_,), ((0.8, 0.95), (0.7, 0.9), (0.7, 0.8), (0.6, 0.8)), (0.1,), (None, 1.0))
    return {
        f"{start.__name__.rstrip('_')} init, betas {betas}, decay {decay}, clip {clip}": Variant(
            AdamW(start, betas, decay, clip)
        )
        for start, betas, decay, clip in grid
    }


def _adamw_finalists() -> Variants:
    grid = _adamw_grid().items()
    return {name: v for name, v in grid if "torch init" in name and "(0.9" not in name and "decay 0.1" in name}


@dataclass(frozen=True)
class Study:
    """Variants, the log2 rate around which each search starts, widths and seeds."""

    variants: Callable[[], Variants]
    centre: float
    widths: tuple[int, ...] = (32, 64)
    seeds: tuple[int, ...] = SEEDS


STUDIES = {
    "beyond_mup": Study(_beyond_mup, -4.0),
    "beyond_mup_2": Study(_beyond_mup_2, -3.5),
    "beyond_mup_3": Study(_beyond_mup_3, -3.5, (64, 128)),
    "adamw": Study(_adamw, -6.0),
    "moonlight": Study(_moonlight, -4.0),
    "moonlight_2": Study(_moonlight_2, -4.0),
    "adamw_grid": Study(_adamw_grid, -6.0, (64,), SEEDS[:1]),
    "adamw_grid_128": Study(_adamw_finalists, -7.0, (128,), SEEDS[:1]),
}


def run_trial(cell: Trial) -> TrialResult:
    """Train one variant."""
    torch.set_num_threads(1)
    variant = STUDIES[cell.settings["study"]].variants()[cell.recipe]
    config = TrainConfig.of(
        width=cell.width, lr=2.0**cell.log2_lr, seed=cell.seed, steps=cell.steps, **dict(variant.training)
    )
    result = train(config, load(None), method=variant.method)
    return TrialResult(result.train_loss, result.val_loss, result.seconds, result.diverged)


def measure(name: str) -> None:
    """Run what is missing of a study."""
    study = STUDIES[name]
    names = tuple(study.variants())
    search = Bracket(dict.fromkeys(names, study.centre), budget=7)
    run(SweepConfig(names, study.widths, study.seeds, 120, search, {"study": name}), HERE / name, run_trial)


def table(name: str) -> str:
    """What each variant gains over the base at each width, in nats, with an interval paired over seeds; best first."""
    summary, records = load_sweep(HERE / name)
    widths = summary["config"]["widths"]
    rows = []
    for row in summary["recipes"]:
        name = row["recipe"]
        base = BIASED if name.startswith("with biases") else BASE
        curves = [[points(records, r, width) for r in (base, name)] for width in widths]
        gains = [fit.difference(*map(fit.lowest, pair)) for pair in curves]
        rows.append((-sum(gain.value or 0 for gain in gains), row, gains))
    head = ["setting", *(f"{what} at {width}" for width in widths for what in ("best lr", "gain in nats"))]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for _, row, gains in sorted(rows, key=lambda entry: entry[0]):
        cells = [row["recipe"]]
        for rate, status, gain in zip(row["best_log2_lr"], row["status"], gains, strict=True):
            cells += [
                status if rate is None else f"2^{rate:.2f}",
                "none" if gain.value is None else f"{gain.value:+.3f}{transfer_report.plus_minus(gain.interval, 3)}",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", choices=[*STUDIES, []], metavar="study", help=", ".join(STUDIES))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    for name in options.studies or ("beyond_mup", "beyond_mup_2", "beyond_mup_3", "adamw", "moonlight", "moonlight_2"):
        if not options.table:
            measure(name)
        print(f"\n{name}\n{table(name)}", flush=True)


if __name__ == "__main__":
    main()
