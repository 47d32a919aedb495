"""The coordinate check: do activations, and their changes by training, keep their size as the width grows?

For each layer it fits two slopes of `log2 rms` over `log2 width`: of the layer's output at the start, and of the
output's change over a few steps, on a fixed batch. Under a parametrisation whose learning rate transfers, both are 0.
"""

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.experiment.configs import claimed
from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.errors import SweepError
from surefoot.experiment.files import Log, Record, finite_or_none, write_json
from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.executors import Executor, Killed, outcomes
from surefoot.experiment.sweep.search import check_list
from surefoot.experiment.sweep.summary import environment
from surefoot.experiment.sweep.worker import unchanged
from surefoot.experiment.training.build import require_model
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.methods import Method
from surefoot.experiment.training.run import VALIDATION_SEED, Run
from surefoot.monitor import activations
from surefoot.monitor.activations import first_output, forward_hooks, lm_heads, owners
from surefoot.monitor.maxima import rms
from surefoot.optim.measuring import of_weights
from surefoot.plan import Plan

RESULTS, SUMMARY = "results.jsonl", "coordcheck.json"
KINDS = {"width": int, "seed": int}
"""Keys of a record, and their types."""
QUANTITIES = ("start", "change")
MEASURED = ("dependency", "norm", "moved")
"""Fitted without a verdict: a layer's dependency, a weight's norm, the norm of its change by training."""

LOGITS = "logits"
BAND = 0.1
"""Largest slope that passes. Natural recipes stay below 0.07 over widths 64 to 512, AdamW reaches 2.7."""


def check(
    config: TrainConfig,
    corpus: Corpus,
    directory: Path,
    widths: tuple[int, ...],
    seeds: Sequence[int],
    band: float = BAND,
    on_record: Callable[[Record], None] = lambda record: None,
    executor: Executor | None = None,
    data: str | None = None,
) -> dict[str, Any]:
    """Run the widths and seeds that are missing in `directory`, fit the slopes, and write `coordcheck.json`.

    Args:
        config: of every run, except for width and seed.
        corpus: the data.
        directory: created if missing; its finished runs are reused, also with more widths, more seeds, another band.
        widths: two or more.
        seeds: three or more give intervals.
        band: see `evaluate`.
        on_record: called with the record of each new run.
        executor: where runs are run, closed at the end; by default this process, one after the other.
        data: what an executor's processes pass to `sources.load`.

    Returns:
        The content of `coordcheck.json`: `evaluate`'s, with `config` and `environment`.

    Raises:
        ValueError: widths or a model that cannot be compared, or a directory of another configuration.
        DirectoryInUse: another check writes there.
        OSError: a file cannot be written.
        SweepError: a run on the executor raised (`DataError` if of the data), or was killed twice, which is recorded.
    """
    check_list("widths", widths, least=2)
    for width in widths:
        require_model(config.replace(width=width), corpus)
    common = {key: value for key, value in config.to_json().items() if key not in KINDS}
    common |= {"text": corpus.name, "corpus": corpus.sha256}
    with claimed(directory, "coordcheck", common, RESULTS), Log(directory / RESULTS, KINDS) as log:
        done = {_Part(record["width"], record["seed"]): record for record in finished(log.records)}
        parts = [_Part(width, seed) for width in sorted(widths) for seed in seeds]
        for record in _measured(config, [part for part in parts if part not in done], corpus, executor, data):
            done[_Part(record["width"], record["seed"])] = record
            log.append(record)
            on_record(record)
        if failed := [f"{part}: {done[part]['failed']}" for part in parts if "failed" in done[part]]:
            raise SweepError("; ".join(failed))
        summary = {**evaluate([done[part] for part in parts], band), "config": common, "environment": environment()}
        return write_json(directory / SUMMARY, summary)


def finished(records: Iterable[Record]) -> list[Record]:
    """The records of the runs that were not killed."""
    return [record for record in records if "failed" not in record]


class _Part(NamedTuple):
    """One run of a check."""

    width: int
    seed: int

    def __str__(self) -> str:
        return f"width {self.width}, seed {self.seed}"


def _measured(
    config: TrainConfig, missing: Sequence[_Part], corpus: Corpus, executor: Executor | None, data: str | None
) -> Iterator[Record]:
    """The records of runs as they end; on an executor the widest first. One that was killed has "failed"."""
    if executor is None:
        yield from (measure(config.replace(**part._asdict()), corpus) for part in missing)
        return
    waiting = [*reversed(missing)]
    with closing(executor):
        for part, end in outcomes(executor, partial(_measure_part, config, data, corpus.sha256), lambda: waiting):
            waiting.remove(part)
            yield {**part._asdict(), "failed": f"killed twice: {end}"} if isinstance(end, Killed) else end


def _measure_part(config: TrainConfig, data: str | None, sha256: str, part: _Part) -> Record:
    return measure(config.replace(**part._asdict()), unchanged(data, sha256))


def measure(config: TrainConfig, corpus: Corpus, method: Method | None = None) -> Record:
    """Train one model and measure each layer's output, and its change, on a batch of the validation split.

    Layers are the modules that own parameters, and the model itself as "logits" in place of its head.

    Args:
        config: as in `Run`.
        corpus: as in `Run`.
        method: as in `Run`.

    Returns:
        `width`, `seed`, `loss`, `seconds`; `start` and `change`, both layer -> RMS (None where it is not finite);
        `logits`, the layers whose outputs are logits; after training, `dependency`, layer -> the largest ratio of
        `monitor.activations`, `norm` and `moved`, parameter -> norm, and norm of its change, in natural units.
    """
    run = Run(config, corpus, method)
    tokens, _ = corpus.batch("validation", VALIDATION_SEED, 0, config.batch_size, config.context)
    plan = Plan.of(run.model)
    layers = {name: name for name in owners(run.model) if name not in {"", *lm_heads(run.model, plan)}} | {"": LOGITS}
    routers = [name.rpartition(".")[0] for name, of in plan.placements.items() if of.role.name == "router"]
    begun = time.perf_counter()
    before, first = _outputs(run.model, tokens.to(run.device), layers), copy.deepcopy(run.model)
    for _ in range(config.steps):
        run.advance()
    after = _outputs(run.model, tokens.to(run.device), layers)
    seconds = round(time.perf_counter() - begun, 3)
    start = {layer: finite_or_none(rms(y)) for layer, y in before.items()}
    change = {layer: finite_or_none(rms(after[layer] - y)) for layer, y in before.items()}
    sizes = {"width": config.width, "seed": config.seed, "loss": run.record()["loss"], "seconds": seconds}
    more = _stability(run.model, first, plan, tokens.to(run.device), layers)
    return {**sizes, "logits": [LOGITS, *routers], "start": start, "change": change, **more}


def _stability(model: nn.Module, first: nn.Module, plan: Plan, tokens: Tensor, layers: dict[str, str]) -> Record:
    """The quantities of `MEASURED`: layer or parameter -> value, None where it is not finite."""
    numbers = activations.measure(model, tokens, names=layers)
    dependency = {layer: numbers[name].get("dependency", 0.0) for name, layer in layers.items() if name in numbers}
    weights = of_weights(model, plan, dict(first.named_parameters()))
    norm, moved = ({name: weights[name].get(key, 0.0) for name in plan} for key in ("forward_lower", "update_measured"))
    found = zip(MEASURED, (dependency, norm, moved), strict=True)
    return {quantity: {key: finite_or_none(x) for key, x in values.items()} for quantity, values in found}


def evaluate(records: Sequence[Record], band: float = BAND) -> dict[str, Any]:
    """Fit the slopes with their intervals over seeds, and compare them with the band.

    A slope is the mean over seeds of least-squares slopes. It is inside if its absolute value is at most `band`. The
    logits of the model and of its routers may fall at the start: with heads of initial std 1/width they do so by
    design, as `width**-0.5`, and only growth leaves the band.

    Args:
        records: of `measure`, every seed at every width.
        band: largest slope that passes.

    Returns:
        `widths`, `seeds`, `band`, `passes`; `layers`, a list of `layer`, `start` and `change`; `measured`, quantity of
        `MEASURED` -> layer or parameter -> slope, on which no verdict depends. A slope has `slope`, `ci` (None below
        three seeds), `log2_rms` at every width (mean over seeds), and `status`: "inside", "outside", "zero" (0 at
        every width), or "not finite" (a logarithm is not).

    Raises:
        ValueError: the model has other layers at another width.
    """
    names = list(records[0]["start"])
    for record in records:
        if differing := set(names) ^ set(record["start"]):
            text = f"the model's layers differ between widths {record['width']} and {records[0]['width']}"
            raise ValueError(f"{text}: {', '.join(sorted(differing))}; a coordinate check compares like layers")
    layers = [{"layer": name, **{q: _slope(records, q, name, band) for q in QUANTITIES}} for name in names]
    passes = all(layer[quantity]["status"] in ("inside", "zero") for layer in layers for quantity in QUANTITIES)
    widths, seeds = (sorted({record[key] for record in records}) for key in KINDS)
    there = [quantity for quantity in MEASURED if all(quantity in record for record in records)]  # not in older logs
    measured = {q: {name: _slope(records, q, name, band) for name in records[0][q]} for q in there}
    return {"passes": passes, "band": band, "widths": widths, "seeds": seeds, "layers": layers, "measured": measured}


def _slope(records: Sequence[Record], quantity: str, layer: str, band: float) -> dict[str, Any]:
    values = {(record["seed"], record["width"]): record[quantity][layer] for record in records}
    if not all(values.values()):  # one is 0 or None
        zero = {*values.values()} == {0.0}
        return {"status": "zero" if zero else "not finite", "slope": None, "ci": None, "log2_rms": None}
    seeds, widths = dict.fromkeys(seed for seed, _ in values), sorted({width for _, width in values})
    table = np.log2([[values[seed, width] for width in widths] for seed in seeds])
    slopes = np.polyfit(np.log2(widths), table.T, 1)[0].tolist()  # of each row, a seed
    slope = float(np.mean(slopes))
    may_fall = quantity == "start" and layer in records[0].get("logits", (LOGITS,))  # older logs lack the key
    status = "inside" if slope <= band and (may_fall or slope >= -band) else "outside"
    return {"status": status, "slope": slope, "ci": fit.interval(slopes), "log2_rms": table.mean(0).tolist()}


def _outputs(model: nn.Module, tokens: Tensor, layers: dict[str, str]) -> dict[str, Tensor]:
    """Return each layer's output as a vector, by `layers`, module -> layer; several outputs of one are concatenated."""
    outputs: dict[str, list[Tensor]] = {}

    def record(module: str, _: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        if (y := first_output(output)) is not None:
            outputs.setdefault(layers[module], []).append(y.flatten().clone())

    with forward_hooks(model, layers, record):
        model(tokens)
    return {layer: torch.cat(parts) for layer, parts in outputs.items()}
