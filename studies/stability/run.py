"""What a bound on the weights costs, and whether the norms stay below it.

    python studies/stability/run.py            # what is missing; resumes, 25 minutes on 2 cores
    python studies/stability/run.py --time     # milliseconds a step of every scheme; on an idle machine
    python studies/stability/run.py --table    # from the committed results, as in docs/stability.md

The demo's model at width 64 under `beyond_mup`, 300 steps, radius 2 in natural units (weight decay and Pre Decay have
the rate 1/2, which promises the same). Every norm is measured exactly after every step.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import surefoot as sf
from surefoot import recipes
from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.data.sources import load as load_text
from surefoot.experiment.files import dumps, write_atomic
from surefoot.experiment.reports.style import markdown, plus_minus
from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.config import SweepConfig, Trial, TrialResult
from surefoot.experiment.sweep.search import Grid
from surefoot.experiment.sweep.summary import points
from surefoot.experiment.sweep.sweep import load, run
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.methods import Steepest
from surefoot.experiment.training.run import CHECK_EVERY, Run

HERE = Path(__file__).parent
STEP_MS = HERE / "step_ms.json"
RADIUS, WIDTH, STEPS = 2.0, 64, 300
RATES = (-4.5, -4.0, -3.5, -3.0, -2.0)  # the last far above the best, to test the bound there, too
LOWER = (-5.5, -5.0)  # for weight decay, whose best rate is lower
TOLERANCE = 1e-3

SCHEMES: dict[str, sf.Stabiliser] = {
    "weight decay": sf.WeightDecay(1 / RADIUS),
    "Post Clip, every step": sf.PostClip(RADIUS, period=1),
    "Post Clip": sf.PostClip(RADIUS),
    "Pre Decay": sf.PreDecay(1 / RADIUS),
    "Rescale": sf.Rescale(RADIUS),
    "streaming Post Clip, 1 vector": sf.StreamingPostClip(RADIUS, 1),
    "streaming Post Clip, 8 vectors": sf.StreamingPostClip(RADIUS, 8),
    "streaming Pre Decay, 1 vector": sf.StreamingPreDecay(1 / RADIUS, 1),
    "Normalise": sf.Normalise(RADIUS),
    "Spectral Sphere": sf.SpectralSphere(RADIUS),
}
EVERYWHERE = ("weight decay", "Post Clip, every step", "Post Clip", "Pre Decay")
ALL = "all roles: "


def hidden(stabiliser: sf.Stabiliser) -> Steepest:
    """Return `beyond_mup` with a bound on the hidden matrices alone."""
    base = recipes.beyond_mup()
    return Steepest(sf.Recipe(base.name, {**base.table, "linear": replace(base.role("linear"), stabiliser=stabiliser)}))


METHODS: dict[str, Steepest] = {
    "free": Steepest(recipes.beyond_mup()),
    **{name: hidden(scheme) for name, scheme in SCHEMES.items()},
    **{ALL + name: Steepest(recipes.beyond_mup(), stabiliser=SCHEMES[name]) for name in EVERYWHERE},
}
CLAIMED = ("free", ALL + "weight decay", ALL + "Post Clip")
PARTS: dict[str, SweepConfig] = {
    "schemes": SweepConfig(tuple(METHODS), (WIDTH,), (0, 1, 2), STEPS, Grid(RATES)),
    "more_seeds": SweepConfig(CLAIMED, (WIDTH,), (3, 4), STEPS, Grid(RATES)),
    "lower_rates": SweepConfig(("weight decay",), (WIDTH,), (0, 1, 2), STEPS, Grid(LOWER)),
    "lower_rates_all": SweepConfig((ALL + "weight decay",), (WIDTH,), (0, 1, 2, 3, 4), STEPS, Grid(LOWER)),
}


def run_trial(trial: Trial) -> TrialResult:
    """Train one model on one thread, measuring every weight after every step."""
    torch.set_num_threads(1)
    config = TrainConfig(
        data_order="random", width=trial.width, lr=2.0**trial.log2_lr, seed=trial.seed, steps=trial.steps
    )
    training = Run(config, corpus(), METHODS[trial.recipe])
    plan = sf.Plan.of(training.model, recipes.beyond_mup())
    start, peaks, above = time.perf_counter(), {"hidden": 0.0, "others": 0.0}, 0
    while training.step < trial.steps and not (training.step % CHECK_EVERY == 0 and training.diverged()):
        training.advance()
        for name, norm in norms(training.model, plan).items():
            where = "hidden" if plan[name].role.name == "linear" else "others"
            peaks[where] = max(peaks[where], norm)
            bounded = where == "hidden" or trial.recipe.startswith(ALL)
            above += bounded and norm > RADIUS * (1 + TOLERANCE)
    last = max(norm for name, norm in norms(training.model, plan).items() if plan[name].role.name == "linear")
    seconds, result = time.perf_counter() - start, training.result()
    facts = {"peak": peaks["hidden"], "peak_others": peaks["others"], "last": last, "above": float(above)}
    return TrialResult(result.train_loss, result.val_loss, seconds, result.diverged, facts)


@torch.no_grad()
def norms(model: torch.nn.Module, plan: sf.Plan) -> dict[str, float]:
    """Return every parameter's exact norm, in its role's unit of radius."""
    sizes = {}
    for name, p in model.named_parameters():
        role, (block,) = plan[name].role, plan[name].blocks
        sizes[name] = float(role.geometry.norm(role.view.split(p)[0]).max()) / role.radius_unit(block)
    return sizes


@functools.cache
def corpus() -> Corpus:
    """Read the text, once per process."""
    return load_text(None)


def time_steps(rounds: int = 64) -> None:
    """Write every scheme's mean time of a training step, all interleaved on one thread."""
    torch.set_num_threads(1)
    config = TrainConfig(data_order="random", width=WIDTH, lr=2.0**-4, steps=10_000)
    running = {name: Run(config, corpus(), method) for name, method in METHODS.items()}
    total = dict.fromkeys(running, 0.0)
    for turn in range(STEPS // 4 + rounds):  # by then most matrices are at their bound
        for name, training in running.items():
            start = time.perf_counter()
            training.advance()
            total[name] += (time.perf_counter() - start) * (turn >= STEPS // 4)
    write_atomic(STEP_MS, dumps({"ms": {name: 1e3 * t / rounds for name, t in total.items()}}, indent=2) + "\n")


def finished() -> list[dict[str, Any]]:
    """Return the records of all parts."""
    return [record for part in PARTS if (HERE / part / "config.json").exists() for record in load(HERE / part)[1]]


def best_of(records: list[dict[str, Any]], name: str) -> tuple[float, dict[int, float]]:
    """Return the rate of the lowest mean loss, and its losses by seed."""
    curve = fit.curve(points(records, name, WIDTH))
    return min(
        ((rate, losses) for rate, losses in curve.items() if losses),
        key=lambda pair: sum(pair[1].values()) / len(pair[1]),
    )


def row(name: str, records: list[dict[str, Any]], free: Mapping[int, float]) -> list[str]:
    """Format a scheme's row: loss at its best rate, against free on the same seeds, norms, time."""
    mine = [record for record in records if record["recipe"] == name]
    rate, best = best_of(mine, name)
    facts = [record["facts"] for record in mine if record["log2_lr"] == rate]
    against = fit.difference(best, free)
    ms = json.loads(STEP_MS.read_text())["ms"] if STEP_MS.exists() else {}
    return [
        name,
        str(len(best)),
        f"2^{rate:g}",
        f"{sum(best.values()) / len(best):.3f}",
        "" if name == "free" else f"{against.value:+.3f}{plus_minus(against.interval, 3)}",
        f"{max(fact['peak'] for fact in facts):.3f}",
        f"{max(r['facts']['peak'] for r in mine):.3f}",
        "" if name == "free" else f"{sum(r['facts']['above'] for r in mine):.0f}",
        f"{ms[name] / ms['free']:.2f}" if ms else "not run",
    ]


def table() -> str:
    """Format all schemes as a Markdown table."""
    records = finished()
    _, free = best_of(records, "free")
    head = [
        "scheme",
        "seeds",
        "best lr",
        "loss",
        "against free",
        "peak norm",
        "at every lr",
        "above 2",
        "time of a step",
    ]
    rows = [row(name, records, free) for name in METHODS]
    return markdown(head, rows)


def main() -> None:
    """Run what is missing, or the timing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", action="store_true", help="measure the milliseconds a step instead")
    parser.add_argument("--table", action="store_true", help="only print the table")
    options = parser.parse_args()
    if options.time:
        time_steps()
    elif options.table:
        print(table())
    else:
        for name, config in PARTS.items():
            run(config, HERE / name, run_trial, environment={"corpus_sha256": corpus().sha256})


if __name__ == "__main__":
    main()
