"""The page of sweeps over horizons, batch sizes or depths: the rate to use, the law behind it, and what it rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.experiment.files import Record
from surefoot.experiment.reports import extrapolate, transfer
from surefoot.experiment.reports.loss_frame import shared_axes
from surefoot.experiment.reports.style import lr
from surefoot.experiment.reports.web import sweeps, vega
from surefoot.experiment.reports.web.page import Chart, Fact, Page, Table
from surefoot.experiment.sweep.axis import AXES
from surefoot.experiment.sweep.extrapolate import load

Entry = Mapping[str, Any]


def page(directory: Path) -> Page:
    """Describe sweeps over an axis, finished or not.

    Args:
        directory: of `surefoot transfer` with `--horizons`, `--batches` or `--depths`.

    Returns:
        The page.

    Raises:
        FileNotFoundError: no such sweeps were started there.
        ValueError: its files are damaged.
    """
    summary, swept = load(directory)
    axis = AXES[summary["axis"]]
    as_sweep, records = extrapolate.as_sweep(summary, swept)
    state = f"{'finished' if summary['finished'] else 'under way'}: {len(records)} runs"
    details = {"Configuration": vega.flat(summary["config"]), "Machine and versions": summary["environment"]}
    charts = [] if extrapolate.nothing(summary) else [_law(summary)]
    if frame := shared_axes(as_sweep, records):
        charts.append(sweeps.curves(as_sweep, records, frame, axis.name))
    head, rows = extrapolate.cells(summary)
    table = Table("Recipes", head, sweeps.rates_first(rows, summary["recipes"]), extrapolate.notes(summary))
    kind = f"learning-rate transfer over {axis.title}: {extrapolate.fixed(summary)}"
    tables = [table, sweeps.runs(records, axis.name)]
    return Page(directory.name, kind, state, _facts(summary, records), charts, tables, details)


def _facts(summary: Mapping[str, Any], records: Sequence[Record]) -> list[Fact]:
    """Say first what to do: the rate of the recipe whose loss at the highest value is the lowest."""
    rates = {entry["recipe"]: extrapolate.rate(summary, entry) for entry in summary["recipes"]}
    entries = [entry for entry in summary["recipes"] if rates[entry["recipe"]].log2_lr is not None]
    if not entries:
        bases = [f"{name}: {found.basis}" for name, found in rates.items()]
        return [Fact("Rate to use", "none yet", "; ".join(bases))]
    best = min(entries, key=lambda entry: float(entry["best_loss"][-1]))
    axis, name, found = AXES[summary["axis"]], best["recipe"], rates[best["recipe"]]
    first, last = (axis.text.format(summary["values"][end]) for end in (0, -1))
    others = f", which has the lowest loss of {len(entries)} recipes at {last}" if len(entries) > 1 else ""
    whose = f"{name}, Surefoot's default recipe," if name == sweeps.DEFAULT else name
    use = f"2^{found.log2_lr:.2f}, for {whose} at {found.where} and width {summary['width']}{others}; {found.basis}"
    return [
        Fact("Rate to use", f"{lr(found.log2_lr or 0.0):.3g}", use),
        _interval(best, found),
        *([_power(best, axis.title)] if best["power"] is not None else []),
        Fact(f"The best rate of {name} moves by", transfer.drift(best), f"from {first} to {last}, in octaves"),
        sweeps.missing_it({**best, "widths": best["values"]}, records, f", at {last}"),
    ]


def _power(best: Entry, title: str) -> Fact:
    off = best["rms_octaves"]
    bent = "two values cannot show whether it bends"
    note = bent if off is None else f"the best rates lie {off:.2f} octaves (rms) off the law"
    return Fact("Power", extrapolate.power(best), f"the best rate goes as {title} to this power; {note}")


def _interval(best: Entry, found: extrapolate.Rate) -> Fact:
    if found.interval is None:
        note = f"it needs three seeds and these sweeps have {best['seeds']}: --seeds 3, in another directory"
        return Fact("Its 95 % interval", "not measured", note)
    low, high = map(lr, found.interval)
    note = f"over {best['seeds']} seeds; it does not contain that the law bends beyond what was measured"
    return Fact("Its 95 % interval", f"{low:.3g} to {high:.3g}", note)


def _law(summary: Mapping[str, Any]) -> Chart:
    axis, target = AXES[summary["axis"]], summary["target"]
    rows = [row for entry in summary["recipes"] for row in _rows(entry, target)]
    columns = vega.columns(("recipe", "kind", "size", "lr", "low", "high"), rows)
    shown = vega.tooltip(
        recipe="recipe", kind="it is", size=f"{axis.title}|d", lr="rate|.3g", low="from|.3g", high="to|.3g"
    )
    marks = vega.series("recipe", "recipe", [entry["recipe"] for entry in summary["recipes"]])
    x = {**vega.widths([*summary["values"], *([target] if target else [])]), "field": "size", "title": axis.title}
    y = vega.number("lr", "best learning rate")
    span = {"y": {**y, "field": "low"}, "y2": {"field": "high"}}
    law, points = "datum.kind == 'law'", "datum.kind != 'law'"
    layers = [
        vega.layer("area", span, law, opacity=0.15, aria=False),
        vega.layer("line", {}, law, strokeWidth=2),
        vega.layer("rule", {**span, "tooltip": shown}, points, strokeWidth=2),
        vega.points({"shape": marks["shape"], "tooltip": shown}, "datum.kind == 'measured'"),
        vega.layer("point", {"tooltip": shown}, "datum.kind == 'target'", filled=False, size=130, strokeWidth=2),
    ]
    return Chart(
        f"Best learning rate against {axis.title}",
        "A point is a best rate that was measured, with its 95 % interval over seeds; the line is the power law, with "
        f"the band of its interval; the ring is the rate at the target. {extrapolate.BENDS}",
        {"encoding": {"x": x, "y": y, "color": marks["color"]}, "layer": layers},
        columns,
        axes={"y": vega.scales(columns["lr"], padding=15)},
    )


def _rows(entry: Entry, target: int | None) -> list[tuple[Any, ...]]:
    """What is drawn of a recipe: measured rates, the law, the rate at the target."""
    measured = zip(entry["values"], entry["best_log2_lr"], entry["best_log2_lr_ci"], strict=True)
    drawn = [("measured", *row) for row in measured if row[1] is not None]
    if entry["line"]:
        line = zip(*(entry["line"][key] for key in ("size", "log2_lr", "log2_lr_ci")), strict=True)
        drawn += [("law", *row) for row in line]
        if target is not None:
            drawn.append(("target", target, entry["target_log2_lr"], entry["target_log2_lr_ci"]))
    ends = ((kind, size, rate, *(interval or (rate, rate))) for kind, size, rate, interval in drawn)
    return [(entry["recipe"], kind, size, *map(lr, rates)) for kind, size, *rates in ends]
