"""How good is a direction by streaming power iteration? Alignment while the reference GPT trains, loss, and cost.

    python studies/streaming/run.py            # what is missing; resumes, 25 minutes on 2 cores
    python studies/streaming/run.py --time     # time of every direction, interleaved; on an idle machine
    python studies/streaming/run.py --table    # from the committed results, as in docs/performance.md
    python studies/streaming/run.py --figure   # docs/images/streaming.png, from the same

The demo's model and text under `beyond_mup` at lr 2^-4, 400 steps; only the hidden matrices' direction d differs.
With seed 0 each method measures, every ten steps and in float64, `<d, m> / (|d|_2 |m|_*)` of the smoothed gradient m,
which is 1 for the exact matrix sign, and the largest singular value of d in units of norm 1.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor

import surefoot as sf
from surefoot import recipes
from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.data.sources import load as load_text
from surefoot.experiment.files import dumps, write_atomic
from surefoot.experiment.reports.style import markdown, plus_minus
from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.config import SweepConfig, Trial, TrialResult
from surefoot.experiment.sweep.search import Grid
from surefoot.experiment.sweep.sweep import load, run
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.methods import Steepest
from surefoot.experiment.training.run import Run
from surefoot.geometry.adaptive import Adaptive, Taken
from surefoot.geometry.change_bounds import UNKNOWN, Sizes

HERE = Path(__file__).parent
IMAGE = HERE.parents[1] / "docs" / "images" / "streaming.png"
STEPS, EVERY = 400, 10
Measured = dict[str, list[list[float]]]
"""From "kind alignment" and "kind largest" to a list per measured step, of each matrix of the kind."""


@dataclass(frozen=True)
class Published(sf.StreamingSpectral):
    """The published form: `V <- orthonormal(mᵀ m V)`, `U = m V` with columns of length 1, `d = unit U Vᵀ`."""

    def take(self, w: Tensor, m: Tensor, active: Tensor | float, memory: dict[str, Tensor]) -> Taken:
        """One step of it; a wide matrix is transposed."""
        tall = m if m.shape[-2] > m.shape[-1] else m.mT
        a = tall / tall.abs().amax((-2, -1), keepdim=True)
        basis = torch.linalg.qr(a.mT @ (a @ memory["basis"])).Q
        d = torch.nn.functional.normalize(a @ basis, dim=-2, eps=1e-20) @ basis.mT
        return (d if tall is m else d.mT) * self.norm_of.unit(m.shape), {"basis": basis}

    def direction_sizes(self, shape: tuple[int, ...], smoothed: Sizes = UNKNOWN) -> Sizes:
        """Columns of length 1: at most the root of their number."""
        own = super().direction_sizes(shape, smoothed)
        return Sizes(spectral=own.spectral * min(shape[-2:]) ** 0.5)


WAYS: dict[str, sf.Geometry] = {
    "auto": sf.Spectral(),
    "streaming": sf.StreamingSpectral(),
    "streaming, 2 iterations": sf.StreamingSpectral(iterations=2),
    "as published": Published(),
}
"""From names in the results to the hidden matrices' geometries; the first is that of the recipes."""
OURS = tuple(WAYS)[:3]
PARTS = {
    "width_64": SweepConfig(tuple(WAYS), (64,), (0, 1, 2, 3), STEPS, Grid((-4.0,))),
    "width_256": SweepConfig(OURS, (256,), (0, 1), STEPS, Grid((-4.0,))),
}


@dataclass(frozen=True)
class Watched(Adaptive):
    """Another geometry's directions, measured at every tenth step."""

    norm_of: sf.Geometry
    way: sf.Geometry
    due: list[bool] = field(default_factory=lambda: [False])
    measured: Measured = field(default_factory=dict)

    def init_memory(self, w: Tensor) -> dict[str, Tensor]:
        """The other's."""
        return self.way.init_memory(w)

    def take(self, w: Tensor, m: Tensor, active: Tensor | float, memory: dict[str, Tensor]) -> Taken:
        """The other's direction."""
        way = self.way
        d, memory = way.take(w, m, active, memory) if isinstance(way, Adaptive) else (way.direction(m), memory)
        if self.due[0]:
            d64, m64 = d.flatten(0, -3).double(), m.flatten(0, -3).double()
            top = torch.linalg.matrix_norm(d64, 2)
            alignment = (d64 * m64).sum((-2, -1)) / (top * torch.linalg.svdvals(m64).sum(-1))
            kind = "attention" if m.shape[-1] == m.shape[-2] else "MLP in" if m.shape[-2] > m.shape[-1] else "MLP out"
            unit = (m.shape[-2] / m.shape[-1]) ** 0.5
            for name, values in ((f"{kind} alignment", alignment), (f"{kind} largest", top / unit)):
                self.measured.setdefault(name, []).append([round(x, 5) for x in values.tolist()])
        return d, memory


def with_directions(geometry: sf.Geometry) -> Steepest:
    """`beyond_mup` with this geometry for its hidden matrices."""
    table = recipes.beyond_mup().table
    return Steepest(recipes.Recipe("streaming study", {**table, "linear": replace(table["linear"], geometry=geometry)}))


def run_trial(trial: Trial) -> TrialResult:
    """Train one model on one thread; with seed 0, measure its directions."""
    torch.set_num_threads(1)
    watched = Watched(sf.Spectral(), WAYS[trial.recipe])
    geometry = WAYS[trial.recipe] if trial.seed else watched
    config = TrainConfig(
        data_order="random", width=trial.width, lr=2.0**trial.log2_lr, seed=trial.seed, steps=trial.steps
    )
    training = Run(config, corpus(), with_directions(geometry))
    while training.step < trial.steps:
        watched.due[0] = training.step % EVERY == 0 or training.step == trial.steps - 1
        training.advance()
    if not trial.seed:
        alignment_of(trial.recipe, trial.width).parent.mkdir(exist_ok=True)
        write_atomic(alignment_of(trial.recipe, trial.width), dumps(watched.measured) + "\n")
    result = training.result()
    return TrialResult(result.train_loss, result.val_loss, training.seconds, result.diverged)


def alignment_of(way: str, width: int) -> Path:
    """Where a run's measured directions are."""
    return HERE / "alignment" / f"{way.replace(', ', '_').replace(' ', '_')}_{width}.json"


@functools.cache
def corpus() -> Corpus:
    """The text, read once per process."""
    return load_text(None)


def time_directions(rounds: int = 25) -> None:
    """Write the CPU time of one step's directions of all ways, on matrices of the model's shapes, interleaved."""
    torch.set_num_threads(1)
    costs: dict[str, dict[str, float]] = {}
    for d in (64, 256):
        m = [torch.randn(8, d, d), torch.randn(2, 4 * d, d), torch.randn(2, d, 4 * d)]
        memory = {name: [way.init_memory(x) for x in m] for name, way in WAYS.items()}
        times: dict[str, list[float]] = {name: [] for name in WAYS}
        for _ in range(rounds + 1):
            for name, way in WAYS.items():
                start = time.process_time()
                for x, kept in zip(m, memory[name], strict=True):
                    kept.update(way.take(x, x, 1.0, kept)[1]) if isinstance(way, Adaptive) else way.direction(x)
                times[name].append(time.process_time() - start)
        costs[str(d)] = {name: 1e3 * statistics.median(all_[1:]) for name, all_ in times.items()}
    write_atomic(HERE / "cost_ms.json", dumps(costs, indent=2) + "\n")


def cost(way: str, width: int) -> str:
    """The time of a way's directions over that of the first."""
    path = HERE / "cost_ms.json"
    costs = json.loads(path.read_text())[str(width)] if path.exists() else {}
    return f"{costs[way] / costs['auto']:.2f}" if way in costs else "not run"


def losses(part: str) -> dict[str, dict[int, float]]:
    """Final losses by way and seed."""
    found: dict[str, dict[int, float]] = {}
    for record in load(HERE / part)[1] if (HERE / part / "config.json").exists() else ():
        found.setdefault(record["recipe"], {})[record["seed"]] = record["val_loss"]
    return found


def measured_runs() -> Iterator[tuple[str, int, Measured]]:
    """Way, width and measured directions of every run that has them."""
    for sweep in PARTS.values():
        for way in sweep.recipes:
            if (path := alignment_of(way, sweep.widths[0])).exists():
                yield way, sweep.widths[0], json.loads(path.read_text())


def table() -> str:
    """Markdown: alignment after the first ten steps by kind of matrix, largest singular values, loss and cost."""
    head = ["width", "direction", *(f"alignment, {kind}" for kind in ("attention", "MLP in", "MLP out"))]
    head += ["largest singular value", "time of the direction", "seeds", "loss", "against auto"]
    rows = []
    for way, width, measured in measured_runs():
        kinds = [np.array(measured[f"{kind} alignment"][1:]) for kind in ("attention", "MLP in", "MLP out")]
        top = max(np.max(values) for name, values in measured.items() if name.endswith("largest"))
        by_way = losses(f"width_{width}")
        mine, against = by_way[way], by_way["auto"]
        gain = fit.difference(mine, against) if way != "auto" else None
        cells = [f"{np.median(x):.3f} ({x.min():.3f} to {x.max():.3f})" for x in kinds]
        mean = sum(mine.values()) / len(mine)
        difference = f"{gain.value:+.4f}{plus_minus(gain.interval, 4)}" if gain else ""
        rows.append(
            [str(width), way, *cells, f"{top:.4f}", cost(way, width), str(len(mine)), f"{mean:.3f}", difference]
        )
    return markdown(head, rows)


def figure() -> Figure:
    """Alignment and largest singular value over the steps: median of the matrices, and the band from 5 to 95 %."""
    drawing = Figure(figsize=(9, 6), layout="constrained", dpi=150)
    axes = drawing.subplots(2, 2, sharex=True, sharey="row")
    steps = [*range(0, STEPS, EVERY), STEPS - 1]
    for way, width, measured in measured_runs():
        column, colour = int(width > 64), colormaps["tab10"](list(WAYS).index(way))
        for row, number in enumerate(("alignment", "largest")):
            matrices = np.concatenate([np.array(x) for name, x in measured.items() if name.endswith(number)], 1)
            low, middle, high = np.quantile(matrices, (0.05, 0.5, 0.95), axis=1)
            loss = losses(f"width_{width}").get(way, {}).get(0, float("nan"))
            label = f"{way}: loss {loss:.3f}, time {cost(way, width)}"
            axes[row][column].plot(steps, middle, color=colour, label=label)
            axes[row][column].fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
    for column, width in enumerate((64, 256)):
        axes[0][column].set_title(f"width {width}, 12 matrices: median, 5 to 95 %", fontsize=10)
        axes[0][column].legend(fontsize=8, frameon=False, loc="center right")
        axes[1][column].set_xlabel("step")
    axes[0][0].set_ylabel("alignment $\\langle d, m\\rangle / (|d|_2 |m|_*)$")
    axes[1][0].set_ylabel("largest singular value of d / unit")
    for each in axes.flat:
        each.grid(color="#e6e6e6", linewidth=0.6)
        for side in ("top", "right"):
            each.spines[side].set_visible(False)
    return drawing


def main() -> None:
    """Run what is missing, or the timing, the figure or the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_mutually_exclusive_group()
    for name, text in (("time", "measure the directions' time"), ("table", "print the table"), ("figure", "draw")):
        chosen.add_argument(f"--{name}", action="store_true", help=f"only {text}")
    options = parser.parse_args()
    if options.time:
        time_directions()
    elif not (options.table or options.figure):
        for name, config in PARTS.items():
            run(config, HERE / name, run_trial, environment={"corpus_sha256": corpus().sha256})
    if options.figure:
        figure().savefig(IMAGE)
    else:
        print(table())


if __name__ == "__main__":
    main()
