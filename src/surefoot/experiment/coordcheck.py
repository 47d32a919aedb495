"""The coordinate check: do activations, and what training changes of them, keep their size as the width grows?

For each layer the slope of `log2 rms` over `log2 width`: of its output at the start, and of the output's change over a
few steps, on a fixed batch. Under a parametrisation that transfers both are 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.files import Log, Record, claim, dumps, locked, write_atomic
from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.search import check_list
from surefoot.experiment.sweep.summary import environment
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.methods import Method
from surefoot.experiment.training.run import VALIDATION_SEED, Run, build
from surefoot.monitor.activations import first_tensor, forward_hooks, lm_heads, owners, rms
from surefoot.plan import Plan

RESULTS, SUMMARY = "results.jsonl", "coordcheck.json"
QUANTITIES = ("start", "change")
LOGITS = "logits"
BAND = 0.1
"""Largest slope that passes. Natural recipes stay below 0.07 over widths 64 to 512, AdamW reaches 2.7."""

Say = Callable[[Record], None]


def check(
    config: TrainConfig,
    corpus: Corpus,
    directory: Path,
    widths: tuple[int, ...],
    seeds: Sequence[int],
    band: float = BAND,
    say: Say | None = None,
) -> dict[str, Any]:
    """Run every width and seed that is not yet in `directory`, judge the slopes, write and return the summary.

    Args:
        config: the run to make; its width and seed give way to `widths` and `seeds`.
        corpus: the data.
        directory: made if missing; more widths, more seeds and another band go on from what it holds.
        widths: two or more.
        seeds: three or more give intervals.
        band: see `judge`.
        say: called with each record as it is made.

    Raises:
        ValueError: fewer than two widths, one that does not fit the model, a model with parameters that cannot be
            placed or with other layers at another width, a directory of another configuration.
        DirectoryInUse: another check writes there.
        OSError: a file cannot be written.
    """
    check_list("widths", widths)
    if len(widths) < 2:
        raise ValueError(f"a slope needs two widths, got {widths[0]} alone")
    for width in widths:  # what does not fit is said before anything runs
        Plan.of(build(config.replace(width=width), corpus.vocab))
    directory.mkdir(parents=True, exist_ok=True)
    made = {**config.to_json(), "text": corpus.name, "corpus": corpus.sha256}
    asked = {key: value for key, value in made.items() if key not in ("width", "seed")}
    with locked(directory):
        claim(directory, asked, RESULTS)
        with Log(directory / RESULTS) as log:
            done = {(record["width"], record["seed"]): record for record in log.records}
            cells = [(width, seed) for width in sorted(widths) for seed in seeds]
            for width, seed in (cell for cell in cells if cell not in done):
                done[width, seed] = record = observe(config.replace(width=width, seed=seed), corpus)
                log.append(record)
                if say is not None:
                    say(record)
        found = judge([done[cell] for cell in cells], band)
        summary = {**found, "config": asked, "environment": environment()}
        write_atomic(directory / SUMMARY, dumps(summary, indent=2) + "\n")
    return summary


def observe(config: TrainConfig, corpus: Corpus, method: Method | None = None) -> Record:
    """Train one model and measure, on a batch that it does not train on, each layer's output and its change.

    Layers are the modules that own parameters, and the model itself as "logits" in place of its head.

    Args:
        config, corpus, method: see `Run`.

    Returns:
        width, seed, loss, seconds; `start` and `change`, each layer -> RMS (None where it is not finite); `logits`, the
        layers whose outputs are logits.
    """
    run = Run(config, corpus, method)
    tokens, _ = corpus.batch("validation", VALIDATION_SEED, 0, config.batches.batch_size, config.batches.context)
    taps = _taps(run.model)
    begun = time.perf_counter()
    before = _outputs(run.model, tokens.to(run.device), taps)
    for _ in range(config.schedule.steps):
        run.advance()
    after = _outputs(run.model, tokens.to(run.device), taps)
    seconds = round(time.perf_counter() - begun, 3)
    start = {layer: _finite(rms(y)) for layer, y in before.items()}
    change = {layer: _finite(rms(after[layer] - y)) for layer, y in before.items()}
    sizes = {"width": config.architecture.width, "seed": config.seed, "loss": run.record()["loss"], "seconds": seconds}
    return {**sizes, "logits": [LOGITS, *_routers(run.model)], "start": start, "change": change}


def judge(records: Iterable[Record], band: float = BAND) -> dict[str, Any]:
    """Slopes with their intervals over seeds, and whether each stays in the band.

    A slope is the mean over seeds of least-squares slopes, and inside if its size is at most `band`. Logits, the
    model's and its routers', may fall at the start: by design they do, as `width**-0.5`, under heads that start at std
    1/width; growth counts.

    Args:
        records: of `observe`, every seed at every width.
        band: largest slope that passes.

    Returns:
        widths, seeds, band, passes; `layers`, each with `start` and `change`: slope, ci (None below three seeds),
        log2_rms at each width (mean over seeds), status: inside, outside, zero (at every width: never moves), or
        not finite (its logarithm, somewhere).

    Raises:
        ValueError: the model has other layers at another width.
    """
    records = list(records)
    names = list(records[0]["start"])
    for record in records:
        if differing := set(names) ^ set(record["start"]):
            raise ValueError(
                f"the model has other layers at width {record['width']} than at {records[0]['width']}: "
                f"{', '.join(sorted(differing))}; a coordinate check compares like layers"
            )
    layers = [
        {"layer": name, **{quantity: _judge(records, quantity, name, band) for quantity in QUANTITIES}}
        for name in names
    ]
    passes = all(layer[quantity]["status"] in ("inside", "zero") for layer in layers for quantity in QUANTITIES)
    widths, seeds = (sorted({record[key] for record in records}) for key in ("width", "seed"))
    return {"passes": passes, "band": band, "widths": widths, "seeds": seeds, "layers": layers}


def _judge(records: Sequence[Record], quantity: str, layer: str, band: float) -> dict[str, Any]:
    by_seed: dict[int, dict[int, float | None]] = {}
    for record in records:
        by_seed.setdefault(record["seed"], {})[record["width"]] = record[quantity][layer]
    values = [value for row in by_seed.values() for value in row.values()]
    if not all(values):  # one is 0 or None
        zero = set(values) == {0.0}
        return {"status": "zero" if zero else "not finite", "slope": None, "ci": None, "log2_rms": None}
    widths = sorted(by_seed[records[0]["seed"]])
    table = np.log2(np.array([[row[width] for width in widths] for row in by_seed.values()], dtype=float))
    slopes = np.polyfit(np.log2(widths), table.T, 1)[0].tolist()  # of each row, a seed
    slope = float(np.mean(slopes))
    may_fall = quantity == "start" and layer in records[0].get("logits", (LOGITS,))  # unsaid in logs before routers
    inside = slope <= band and (may_fall or slope >= -band)
    return {
        "status": "inside" if inside else "outside",
        "slope": slope,
        "ci": fit.interval(slopes),
        "log2_rms": table.mean(0).tolist(),
    }


def _taps(model: nn.Module) -> dict[str, str]:
    """Layer's name in the tables -> module's name."""
    hidden = [name for name in owners(model) if name and name not in lm_heads(model, Plan.of(model))]
    return {name: name for name in hidden} | {LOGITS: ""}


def _routers(model: nn.Module) -> list[str]:
    """Names of the layers that choose experts."""
    placements = Plan.of(model).placements.items()
    return [name.rpartition(".")[0] for name, placement in placements if placement.role.name == "router"]


def _outputs(model: nn.Module, tokens: Tensor, taps: dict[str, str]) -> dict[str, Tensor]:
    """The output of each layer, flat; of one that is called several times, all of them."""
    layers = {module: layer for layer, module in taps.items()}
    found: dict[str, list[Tensor]] = {}

    def see(module: str, _: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        if (y := first_tensor(output)) is not None:
            found.setdefault(layers[module], []).append(y.flatten().clone())

    with forward_hooks(model, layers, see):
        model(tokens)
    return {layer: torch.cat(parts) for layer, parts in found.items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
