"""The page of a sweep: the rate to use, its interval, what missing it costs, and the curves that say so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.experiment.files import Record
from surefoot.experiment.reports import transfer
from surefoot.experiment.reports.loss_frame import SharedAxes, means_of, measured_within, missed, shared_axes
from surefoot.experiment.reports.style import lr, plus_minus
from surefoot.experiment.reports.web import vega
from surefoot.experiment.reports.web.page import Chart, Choice, Fact, Page, Table
from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.summary import points
from surefoot.experiment.sweep.sweep import SUMMARY, load
from surefoot.experiment.training.config import Optimisation

DEFAULT = Optimisation.method
_ENDS = ("lowest", "highest")
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
    tables, kind = [_recipes(summary, records), runs(records)], f"learning-rate transfer over width{_size(summary)}"
    return Page(directory.name, kind, state, _facts(summary, records), _charts(summary, records), tables, details)


def _size(summary: Mapping[str, Any]) -> str:
    config = {**summary["config"].get("settings", {}), **summary["config"]}
    model, steps = config.get("model"), f"{config['steps']} steps"
    batch = " of {batch_size} x {context} tokens".format(**config) if config.keys() >= {"batch_size", "context"} else ""
    return f": {model}, {steps}{batch}" if model else f": {steps}{batch}"


def _facts(summary: Mapping[str, Any], records: Sequence[Record]) -> list[Fact]:
    """Say first what to do: the rate of the recipe whose loss at the widest model is the lowest."""
    if not (found := [entry for entry in summary["recipes"] if entry["best_log2_lr"][-1] is not None]):
        return [Fact("Rate to use", "none yet", "no recipe's best rate lies inside the rates that were measured")]
    best = min(found, key=lambda entry: float(entry["best_loss"][-1]))
    name, width, rate = best["recipe"], best["widths"][-1], best["best_log2_lr"][-1]
    others = f", which has the lowest loss of {len(found)} recipes" if len(found) > 1 else ""
    whose = f"{name}, Surefoot's default recipe," if name == DEFAULT else name
    longer = f"; longer runs than these of {summary['config']['steps']} steps want less"
    facts = [
        Fact("Rate to use", f"{2**rate:.3g}", f"2^{rate:.2f}, for {whose} at width {width}{others}{longer}"),
        _interval(best),
        missing_it(best, records),
    ]
    if len(best["widths"]) > 1:
        span = f"from width {best['widths'][0]} to {width}, in octaves (factors of two)"
        facts.append(Fact(f"The best rate of {name} moves by", transfer.drift(best), span))
    return facts


def missing_it(best: Entry, records: Sequence[Record], at: str = "") -> Fact:
    """Say what half and twice the best rate at the widest model cost, or as far as was measured.

    Args:
        best: the summary's entry of a recipe that has a best rate there.
        records: the finished runs.
        at: where that is, if the reader does not expect it there.

    Returns:
        The fact.
    """
    missing = _missed(best, records)
    costs = "\n".join(f"{cost} at {factor}" for factor, cost in missing)
    ends = [f"; {factor} was the {end} rate tried" for (factor, _), end in zip(missing, _ENDS, strict=True)]
    short = "".join(end for end in ends if not end.startswith(("; half", "; twice")))
    return Fact("Missing it by a factor of two costs", costs, f"nats of validation loss{at}{short}")


def _interval(best: Entry) -> Fact:
    interval, seeds = best["best_log2_lr_ci"][-1], best["seeds"]
    if interval is None:
        note = f"it needs three seeds and this sweep has {seeds}: --seeds 3, in another directory"
        return Fact("Its 95 % interval", "not measured", note)
    low, high = map(lr, interval)
    return Fact("Its 95 % interval", f"{low:.3g} to {high:.3g}", f"over {seeds} seeds")


def _missed(entry: Entry, records: Sequence[Record]) -> list[tuple[str, str]]:
    """Half and twice the best rate at the widest model, or as far as was measured, and what each costs."""
    if (rate := entry["best_log2_lr"][-1]) is None:
        return []
    measured = points(records, entry["recipe"], entry["widths"][-1])
    rates = [measured_within(measured, rate, octaves) for octaves in (-1.0, 1.0)]
    return [(_factor(other - rate), _cost(missed(measured, other))) for other in rates]


def _factor(octaves: float) -> str:
    return {-1.0: "half", 1.0: "twice"}.get(round(octaves, 6), f"{2**octaves:.2g} times")


def _cost(cost: fit.Estimate) -> str:
    if cost.value is None:
        return "not measured"
    return "divergence" if cost.value == math.inf else f"+{cost.value:.3f}{plus_minus(cost.interval, 3)}"


def _recipes(summary: Mapping[str, Any], records: Sequence[Record]) -> Table:
    head, rows = transfer.cells(summary)
    costs = ["\n".join(f"{factor}: {cost}" for factor, cost in _missed(entry, records)) for entry in summary["recipes"]]
    notes = [
        *transfer.notes(summary),
        "best loss: the lowest mean that was measured. missing it: the loss at half and at twice the best rate, or as "
        "far as was measured, on the line between two rates, minus the lowest.",
    ]
    both = [[*row, cost] for row, cost in zip(rates_first(rows, summary["recipes"]), costs, strict=True)]
    return Table("Recipes", [*head, "missing it by two"], both, notes)


def rates_first(rows: Sequence[Sequence[str]], entries: Sequence[Entry]) -> list[list[str]]:
    """Write each best rate itself above the power of two that a table of recipes gives it as.

    Args:
        rows: of the table: a recipe's name, its best rate at each width, and other cells.
        entries: the summary's, of the same recipes.

    Returns:
        The rows.

    >>> rates_first([["muon", "2^-3.00 ± 0.09", "low edge"]], [{"best_log2_lr": [-3.0, None]}])
    [['muon', '0.125\\n2^-3.00 ± 0.09', 'low edge']]
    """
    rates = [["", *("" if x is None else f"{2**x:.3g}\n" for x in entry["best_log2_lr"])] for entry in entries]
    return [[rate + cell for rate, cell in zip_longest(*both, fillvalue="")] for both in zip(rates, rows, strict=True)]


def runs(records: Sequence[Record], of: str = "width") -> Table:
    """List every run.

    Args:
        records: of the runs.
        of: what their width is called.

    Returns:
        The table.
    """
    head = ["recipe", of, "lr", "seed", "steps", "validation loss", "training loss", "seconds", "state"]
    rows = [
        [
            r["recipe"], str(r["width"]), f"{2 ** r['log2_lr']:.3g} (2^{r['log2_lr']:.3f})", str(r["seed"]),
            str(r["steps"]), _loss(r["val_loss"]), _loss(r["train_loss"]), f"{r['seconds']:.1f}", _state(r),
        ]
        for r in records
    ]  # fmt: skip
    return Table("Every run", head, rows)


def _loss(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4f}"


def _state(record: Record) -> str:
    return str(record.get("failed") or ("diverged" if record["diverged"] else "finished"))


def _charts(summary: Mapping[str, Any], records: Sequence[Record]) -> list[Chart]:
    frame = shared_axes(summary, records)
    if frame is None:
        return []
    return [curves(summary, records, frame), *([_optima(summary)] if len(summary["config"]["widths"]) > 1 else [])]


def curves(summary: Mapping[str, Any], records: Sequence[Record], frame: SharedAxes, of: str = "width") -> Chart:
    """Draw loss against learning rate, a panel per recipe and a line per width.

    Args:
        summary: the content of `summary.json`.
        records: the finished runs.
        frame: the axes of all panels.
        of: what the width is called.

    Returns:
        The chart.
    """
    names = ("recipe", "width", "kind", "lr", "log2_lr", "loss", "seed", "steps", "low", "high")
    rows = [row for entry in summary["recipes"] for row in _rows(entry, records, frame)]
    columns = vega.columns(names, [[row.get(name) for name in names] for row in rows])
    marks = vega.series("width", of, [str(width) for width in summary["config"]["widths"]])
    shown = vega.tooltip(
        lr="learning rate|.3g", log2_lr="log2 of it|.2f", loss="loss|.4f", width=of, seed="seed", steps="steps"
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
    if frame.low <= 0:  # the room below losses near 0, which a logarithmic axis has none for
        del losses["log"]["scale"]["domain"]
    return Chart(
        "Loss against learning rate",
        f"A line per {of}, the mean over seeds; small points are seeds; a ring is the fitted best rate with its "
        "interval; a cross at the top is a rate that diverged. Curves end where they leave the losses near the best. "
        "Point at a point, or tap it, for its numbers.",
        {"encoding": {"x": x, "y": vega.number("loss", "validation loss (nats)")}, "layer": layers},
        columns,
        [
            Choice(entry["recipe"], {"recipe": entry["recipe"]}, domains={"x": _rates(entry, records, frame)})
            for entry in summary["recipes"]
        ],
        side_by_side=True,
        axes={"x": vega.scales(columns["lr"]), "y": dict(reversed(losses.items()))},
    )


def _rates(entry: Entry, records: Sequence[Record], frame: SharedAxes) -> tuple[float, float]:
    """The rates that a recipe's panel spans: as many octaves as the others', around its own."""
    rates = [record["log2_lr"] for record in records if record["recipe"] == entry["recipe"]]
    middle = (max(rates, default=0.0) + min(rates, default=0.0)) / 2
    return 2 ** (middle - frame.octaves / 2), 2 ** (middle + frame.octaves / 2)


def _rows(entry: Entry, records: Sequence[Record], frame: SharedAxes) -> list[dict[str, Any]]:
    """What is drawn of a recipe: means, seeds, rates that diverged, optima."""
    rows = []
    optima = zip(entry["widths"], entry["best_log2_lr"], entry["best_log2_lr_ci"], strict=True)
    own = [record for record in records if record["recipe"] == entry["recipe"]]
    for width, vertex, interval in optima:
        means = means_of(own, entry["recipe"], width)
        runs = [record for record in own if record["width"] == width]
        here = {"recipe": entry["recipe"], "width": str(width), "steps": runs[0]["steps"] if runs else None}
        for rate, mean in means.items():
            kind = {"kind": "diverged", "loss": frame.high} if mean is None else {"kind": "mean", "loss": mean}
            seeds = sum(record["log2_lr"] == rate for record in runs)
            rows.append({**here, **kind, "log2_lr": rate, "lr": 2**rate, "seed": f"mean of {seeds}"})
        if entry["seeds"] > 1:
            rows += [
                {**here, "kind": "seed", "log2_lr": r["log2_lr"], "lr": 2 ** r["log2_lr"], "loss": r["val_loss"],
                 "seed": str(r["seed"])}
                for r in runs if r["val_loss"] is not None
            ]  # fmt: skip
        finite = {rate: mean for rate, mean in means.items() if mean is not None}
        if vertex is not None:
            height = float(np.interp(vertex, list(finite), list(finite.values())))
            low, high = interval or (vertex, vertex)
            rows.append({**here, "kind": "optimum", "log2_lr": vertex, "lr": 2**vertex, "loss": height,
                         "seed": "fitted", "low": lr(low), "high": lr(high)})  # fmt: skip
    return rows


def _optima(summary: Mapping[str, Any]) -> Chart:
    rows = [
        (entry["recipe"], width, 2**rate, rate, *map(lr, interval or (rate, rate)))
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
