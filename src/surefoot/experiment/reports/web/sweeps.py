"""The page of a sweep: the rate to use, its interval, what missing it costs, and the curves that say so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.experiment.files import Record
from surefoot.experiment.reports import transfer
from surefoot.experiment.reports.loss_frame import SharedAxes, means_of, missed, shared_axes
from surefoot.experiment.reports.web import vega
from surefoot.experiment.reports.web.page import Chart, Choice, Fact, Page, Table
from surefoot.experiment.sweep.summary import points
from surefoot.experiment.sweep.sweep import SUMMARY, load

Entry = Mapping[str, Any]


def page(directory: Path) -> Page:
    """Describe a sweep, finished or not.

    Args:
        directory: of `surefoot transfer`.

    Returns:
        The page.

    Raises:
        FileNotFoundError: no sweep was started there.
        ValueError: its files are damaged.
    """
    summary, records = load(directory)
    state = f"finished: {len(records)} runs" if (directory / SUMMARY).exists() else f"under way: {len(records)} runs"
    details = {"Configuration": vega.flat(summary["config"]), "Machine and versions": summary["environment"]}
    tables = [_recipes(summary, records), _runs(records)]
    return Page(
        directory.name, "learning-rate transfer over width", state,
        _facts(summary, records), _charts(summary, records), tables, details,
    )  # fmt: skip


def _facts(summary: Mapping[str, Any], records: Sequence[Record]) -> list[Fact]:
    """Say first what to do: the rate of the recipe whose loss at the widest model is the lowest."""
    found = [entry for entry in summary["recipes"] if entry["best_log2_lr"][-1] is not None]
    if not found:
        return [Fact("Rate to use", "none yet", "no recipe's best rate lies inside the rates that were measured")]
    best = min(found, key=lambda entry: float(entry["best_loss"][-1]))
    name, width, rate = best["recipe"], best["widths"][-1], best["best_log2_lr"][-1]
    others = f", which has the lowest loss of {len(found)} recipes" if len(found) > 1 else ""
    low, high = _missed(best, records)
    facts = [
        Fact("Rate to use", f"{2**rate:.3g}", f"2^{rate:.2f}, for {name} at width {width}{others}"),
        _interval(best),
        Fact("Missing it by a factor of two", f"{low} or {high} nats", "more loss, at half and at twice the rate"),
    ]
    if len(best["widths"]) > 1:
        span = f"from width {best['widths'][0]} to {width}, in octaves (factors of two)"
        facts.append(Fact("The best rate moves by", transfer.drift(best), span))
    return facts


def _interval(best: Entry) -> Fact:
    interval, seeds = best["best_log2_lr_ci"][-1], best["seeds"]
    if interval is None:
        note = f"it needs three seeds and this sweep has {seeds}: --seeds 3, in another directory"
        return Fact("Its 95 % interval", "not measured", note)
    low, high = (2**end for end in interval)
    return Fact("Its 95 % interval", f"{low:.3g} to {high:.3g}", f"over {seeds} seeds")


def _missed(entry: Entry, records: Sequence[Record]) -> tuple[str, str]:
    """What half and twice the best rate cost at the widest model."""
    rate, measured = entry["best_log2_lr"][-1], points(records, entry["recipe"], entry["widths"][-1])
    half, twice = (None if rate is None else missed(measured, rate + octave) for octave in (-1.0, 1.0))
    return _cost(half), _cost(twice)


def _cost(cost: float | None) -> str:
    if cost is None:
        return "not measured"
    return "diverges" if cost == math.inf else f"+{cost:.3f}"


def _recipes(summary: Mapping[str, Any], records: Sequence[Record]) -> Table:
    head, rows = transfer.cells(summary)
    costs = [_missed(entry, records) for entry in summary["recipes"]]
    notes = [
        *transfer.notes(summary),
        "At half, at twice: the loss there, on the line between the nearest two rates measured, minus the lowest one.",
    ]
    both = [[*row, *cost] for row, cost in zip(rows, costs, strict=True)]
    return Table("Recipes", [*head, "at half the best lr", "at twice"], both, notes)


def _runs(records: Sequence[Record]) -> Table:
    head = ["recipe", "width", "lr", "seed", "steps", "validation loss", "training loss", "seconds", "state"]
    rows = [
        [
            record["recipe"], str(record["width"]), f"2^{record['log2_lr']:.3f}", str(record["seed"]),
            str(record["steps"]), *(_loss(record[key]) for key in ("val_loss", "train_loss")),
            f"{record['seconds']:.1f}", _state(record),
        ]
        for record in records
    ]  # fmt: skip
    return Table("Every run", head, rows)


def _loss(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4f}"


def _state(record: Record) -> str:
    return str(record.get("failed") or ("diverged" if record["diverged"] else "finished"))


def _charts(summary: Mapping[str, Any], records: Sequence[Record]) -> list[Chart]:
    try:
        frame = shared_axes(summary, records)
    except ValueError:  # nothing to draw yet
        return []
    return [_curves(summary, records, frame), *([_optima(summary)] if len(summary["config"]["widths"]) > 1 else [])]


def _curves(summary: Mapping[str, Any], records: Sequence[Record], frame: SharedAxes) -> Chart:
    names = ("recipe", "width", "kind", "lr", "log2_lr", "loss", "seed", "steps", "low", "high")
    rows = [row for entry in summary["recipes"] for row in _rows(entry, records, frame)]
    columns = vega.columns(names, [[row.get(name) for name in names] for row in rows])
    marks = vega.series("width", "width", [str(width) for width in summary["config"]["widths"]])
    shown = vega.tooltip(
        lr="learning rate|.3g", log2_lr="log2 of it|.2f", loss="loss|.4f", width="width", seed="seed", steps="steps"
    )
    x, colour = vega.number("lr", "learning rate"), {"color": marks["color"], "tooltip": shown}
    interval = {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "tooltip": shown}
    mean, seed, optimum = (f"datum.kind == '{kind}'" for kind in ("mean", "seed", "optimum"))
    ink: dict[str, Any] = {"strokeWidth": 2, "color": "var(--ink)"}
    layers = [
        vega.layer("line", colour, mean, clip=True, strokeWidth=2),
        vega.points({**colour, "shape": marks["shape"]}, seed, size=18, opacity=0.5, clip=True),
        vega.points({**colour, "shape": marks["shape"]}, mean, clip=True),
        vega.crosses(colour, "datum.kind == 'diverged'"),
        vega.layer("rule", interval, optimum, **ink),
        vega.layer("point", {"tooltip": shown}, optimum, filled=False, size=130, **ink),
    ]
    losses = vega.scales(domain=[frame.low, frame.high])
    return Chart(
        "Loss against learning rate",
        "A line per width, the mean over seeds; small points are seeds; a ring is the fitted best rate with its "
        "interval; a cross at the top is a rate that diverged. Points tell their numbers.",
        {"encoding": {"x": x, "y": vega.number("loss", "validation loss (nats)")}, "layer": layers},
        columns,
        [Choice(entry["recipe"], {"recipe": entry["recipe"]}) for entry in summary["recipes"]],
        side_by_side=True,
        axes={"x": vega.scales(columns["lr"], padding=12), "y": dict(reversed(losses.items()))},
    )


def _rows(entry: Entry, records: Sequence[Record], frame: SharedAxes) -> list[dict[str, Any]]:
    """What is drawn of a recipe: means, seeds, rates that diverged, optima."""
    rows = []
    optima = zip(entry["widths"], entry["best_log2_lr"], entry["best_log2_lr_ci"], strict=True)
    own = [record for record in records if record["recipe"] == entry["recipe"]]
    for width, vertex, interval in optima:
        means = means_of(own, entry["recipe"], width)
        here = {"recipe": entry["recipe"], "width": str(width)}
        runs = [record for record in own if record["width"] == width]
        for rate, mean in means.items():
            kind = {"kind": "diverged", "loss": frame.high} if mean is None else {"kind": "mean", "loss": mean}
            seeds = sum(record["log2_lr"] == rate for record in runs)
            rows.append({**here, **kind, "log2_lr": rate, "lr": 2**rate, "seed": f"mean of {seeds}"})
        if entry["seeds"] > 1:
            rows += [
                {**here, "kind": "seed", "log2_lr": r["log2_lr"], "lr": 2 ** r["log2_lr"], "loss": r["val_loss"],
                 "seed": str(r["seed"]), "steps": r["steps"]}
                for r in runs if r["val_loss"] is not None
            ]  # fmt: skip
        finite = {rate: mean for rate, mean in means.items() if mean is not None}
        if vertex is not None:
            height = float(np.interp(vertex, list(finite), list(finite.values())))
            low, high = interval or (vertex, vertex)
            rows.append({**here, "kind": "optimum", "log2_lr": vertex, "lr": 2**vertex, "loss": height,
                         "seed": "fitted", "low": 2**low, "high": 2**high})  # fmt: skip
    steps = own[0]["steps"] if own else None
    return [{**row, "steps": steps} for row in rows]


def _optima(summary: Mapping[str, Any]) -> Chart:
    rows = [
        (entry["recipe"], width, 2**rate, rate, 2 ** (interval or (rate, rate))[0], 2 ** (interval or (rate, rate))[1])
        for entry in summary["recipes"]
        for width, rate, interval in zip(
            entry["widths"], entry["best_log2_lr"], entry["best_log2_lr_ci"], strict=True
        )
        if rate is not None
    ]  # fmt: skip
    columns = vega.columns(("recipe", "width", "lr", "log2_lr", "low", "high"), rows)
    shown = vega.tooltip(
        recipe="recipe", width="width", lr="best rate|.3g", log2_lr="log2 of it|.2f", low="from|.3g", high="to|.3g"
    )
    marks = vega.series("recipe", "recipe", [entry["recipe"] for entry in summary["recipes"]])
    y = vega.number("lr", "best learning rate")
    shared = {"x": vega.widths(summary["config"]["widths"]), "y": y, "color": marks["color"], "tooltip": shown}
    layers = [
        vega.layer("line", strokeWidth=2),
        vega.layer("rule", {"y": {**y, "field": "low"}, "y2": {"field": "high"}}, strokeWidth=2),
        vega.points({"shape": marks["shape"]}),
    ]
    return Chart(
        "Best learning rate against width",
        "On a level line the rate tuned on the narrow model serves the wide one. Bars are 95 % intervals over seeds.",
        {"encoding": shared, "layer": layers},
        columns,
        axes={"y": vega.scales(columns["lr"], padding=15)},
    )
