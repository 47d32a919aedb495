"""The best rates over horizons, batch sizes or depths, and their power law, as a table and as a page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt

from surefoot.experiment.files import Record
from surefoot.experiment.reports import charts, transfer
from surefoot.experiment.reports.loss_curves import curves, found_at
from surefoot.experiment.reports.page import Chart, Fact, Page, Table
from surefoot.experiment.reports.style import estimate, lr, span
from surefoot.experiment.sweep.axis import AXES, flag
from surefoot.experiment.sweep.extrapolate import load

BENDS = (
    "An interval over seeds says how far other seeds would move the line.\n"
    "It does not contain that the law bends beyond what was measured."
)
_BUT = "; it does not contain that the law bends beyond what was measured"
_FIXED = {"model": "{}", "width": "width {}", "steps": "{} steps", "batch_size": "batch size {}"}
"""Shared settings that a reader of the rates needs, and their text."""


def rate(summary: Mapping[str, Any], entry: Mapping[str, Any]) -> tuple[str, float | None, Sequence[float] | None, str]:
    """Find the rate to use: at the target by the law, without a target at the highest value as measured.

    Args:
        summary: the content of `summary.json`.
        entry: of a recipe.

    Returns:
        The value that it is for, "1600 steps"; log2 of the rate, None if there is none; the interval of that; and how
        it was found, or why there is none.
    """
    axis, target, least, most = AXES[summary["axis"]], summary["target"], summary["values"][0], summary["values"][-1]
    if target is None:
        basis = f"measured; {flag(axis.target)} N gives the rate at N" if entry["interior"][-1] else entry["no_law"]
        return axis.text.format(most), entry["best_log2_lr"][-1], entry["best_log2_lr_ci"][-1], basis
    basis = "by the law, inside what was measured"
    if entry["no_law"]:
        basis = f"no law ({entry['no_law']})"
    elif target > most:
        basis = f"extrapolated {target / most:.3g}x beyond the {axis.ends[1]} measured {axis.name}"
    elif target < least:
        basis = f"extrapolated {least / target:.3g}x below the {axis.ends[0]} measured {axis.name}"
    return axis.text.format(target), entry["target_log2_lr"], entry["target_log2_lr_ci"], basis


def recommendation(summary: Mapping[str, Any]) -> str:
    """Name the rate to use, or why there is none, a line per recipe.

    Args:
        summary: the content of `summary.json`.

    Returns:
        The lines.

    >>> entry = {"recipe": "muon", "no_law": None, "target_log2_lr": -5.0, "target_log2_lr_ci": [-5.1, -4.9]}
    >>> recommendation({"axis": "horizon", "values": [100, 400], "target": 1600, "width": 64, "recipes": [entry]})
    'muon: lr = 0.0312 at 1600 steps (0.0292 to 0.0335), width 64; extrapolated 4x beyond the longest measured horizon'
    """
    lines = []
    for entry in summary["recipes"]:
        where, log2_lr, ci, basis = rate(summary, entry)
        use = "no rate" if log2_lr is None else f"lr = {lr(log2_lr):.3g}"
        between = f" ({span(ci)})" if ci else ""
        lines.append(f"{entry['recipe']}: {use} at {where}{between}, width {summary['width']}; {basis}")
    return "\n".join(lines)


def statement(summary: Mapping[str, Any]) -> str:
    """Format what was measured, the table and the rates to use, for a terminal."""
    return f"{fixed(summary)}:\n\n{table(summary)}\n\n{recommendation(summary)}"


def fixed(summary: Mapping[str, Any]) -> str:
    """The settings that all runs share, including the width."""
    values = {**summary["config"]["settings"], "width": summary["width"]}
    return ", ".join(text.format(values[key]) for key, text in _FIXED.items() if key in values)


def table(summary: Mapping[str, Any], decimal: bool = False) -> Table:
    """Tabulate the optima, power, drift and best loss of each recipe.

    Args:
        summary: the content of `summary.json`.
        decimal: as `transfer.optimum`.

    Returns:
        The table, with notes.
    """
    axis = AXES[summary["axis"]]
    law = f"power: b of the law lr = c ({axis.title})^b, the line through the best"
    notes = [
        f"best lr: vertex of a parabola in log2 lr. {law}",
        "rates in log2. off the line: root mean square of their distances from it, in octaves; of three or more.",
        "drift: the last minus the first.",
        *transfer.seeds_and_edges(as_sweep(summary)["recipes"], axis.text),
        *BENDS.split("\n"),
    ]
    if any(entry["no_law"] for entry in summary["recipes"]):
        notes.append("no law: it needs a best rate inside those measured at every value: --budget, --rates, --seeds.")
    if not summary["finished"]:
        notes.append(transfer.UNFINISHED)
    columns: transfer.Columns = {
        "power": power,
        "off the line": lambda entry: estimate(entry["rms_octaves"], None, ".2f"),
        "drift in octaves": transfer.drift,
    }
    return transfer.recipes(summary["recipes"], [*map(axis.text.format, summary["values"])], columns, notes, decimal)


def power(entry: Mapping[str, Any]) -> str:
    """Format a recipe's power, with its interval."""
    return estimate(entry["power"], entry["power_ci"], "+.2f", "no law")


def as_sweep(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A summary with its values also in place of widths, for reports that are written for a sweep over widths."""
    entries = [{**entry, "widths": entry["values"]} for entry in summary["recipes"]]
    return {**summary, "recipes": entries, "config": {**summary["config"], "widths": summary["values"]}}


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
    axis, sweep = AXES[summary["axis"]], as_sweep(summary)
    records = [{**record, "width": value} for value, one in swept.items() for record in one.records]
    state = f"{'finished' if summary['finished'] else 'under way'}: {len(records)} runs"
    details = {"Configuration": charts.flat(summary["config"]), "Machine and versions": summary["environment"]}
    found = any(rate is not None for entry in summary["recipes"] for rate in entry["best_log2_lr"])
    drawn = [*([_law(sweep)] if found else []), *curves(sweep, records, axis.name)]
    kind = f"learning-rate transfer over {axis.title}: {fixed(summary)}"
    tables = [table(summary, decimal=True), transfer.runs(records, axis.name)]
    return Page(directory.name, kind, state, _facts(sweep, records), drawn, tables, details)


def _facts(summary: Mapping[str, Any], records: Sequence[Record]) -> list[Fact]:
    """Say first what to do: the rate of the recipe whose loss at the highest value is the lowest."""
    found = [(entry, rate(summary, entry)) for entry in summary["recipes"]]
    usable = [(entry, one) for entry, one in found if one[1] is not None]
    if not usable:
        return [Fact("Rate to use", "none yet", "; ".join(f"{entry['recipe']}: {one[-1]}" for entry, one in found))]
    best, (where, log2_lr, ci, basis) = min(usable, key=lambda each: float(each[0]["best_loss"][-1]))
    axis, name, off = AXES[summary["axis"]], best["recipe"], best["rms_octaves"]
    first, last = (axis.text.format(summary["values"][end]) for end in (0, -1))
    others = f", which has the lowest loss of {len(usable)} recipes at {last}" if len(usable) > 1 else ""
    use = f"2^{log2_lr:.2f}, for {transfer.whose(name)} at {where} and width {summary['width']}{others}; {basis}"
    bent = "two values cannot show whether it bends"
    bends = bent if off is None else f"the best rates lie {off:.2f} octaves (rms) off the law"
    law = Fact("Power", power(best), f"the best rate goes as {axis.title} to this power; {bends}")
    return [
        Fact("Rate to use", f"{lr(log2_lr or 0.0):.3g}", use),
        transfer.interval(ci, best["seeds"], "these sweeps have", _BUT * ("extrapolated" in basis)),
        *([law] if best["power"] is not None else []),
        Fact(f"The best rate of {name} moves by", transfer.drift(best), f"from {first} to {last}, in octaves"),
        transfer.missing_it(best, records, f", at {last}"),
    ]


def _law(summary: Mapping[str, Any]) -> Chart:
    axis, target = AXES[summary["axis"]], summary["target"]
    rows = [row for entry in summary["recipes"] for row in _rows(entry, target)]
    columns = charts.columns(("recipe", "kind", "size", "lr", "low", "high"), rows)
    shown = charts.tooltip("recipe", "kind=it is", f"size={axis.title}|d", "lr=rate|.3g", "low=from|.3g", "high=to|.3g")
    labels = {entry["recipe"]: f"{entry['recipe']}, power {power(entry)}" for entry in summary["recipes"]}
    color, shape = charts.series("recipe", "recipe", labels, labels)
    x = charts.sizes("size", axis.title, [*summary["values"], *([target] if target else [])])
    y, low = (alt.Y(field, type="quantitative", title="best learning rate") for field in ("lr", "low"))
    law, measured, at_target = (charts.rows(f"datum.kind == '{kind}'") for kind in ("law", "measured", "target"))
    layers = [
        law.mark_area(opacity=0.15, aria=False).encode(low, y2="high:Q"),
        law.mark_line(strokeWidth=2).encode(y),
        charts.rows("datum.kind != 'law'").mark_rule(strokeWidth=2).encode(low, y2="high:Q", tooltip=shown),
        measured.mark_point(filled=True, size=55).encode(y, shape, tooltip=shown),
        at_target.mark_point(filled=False, size=130, strokeWidth=2).encode(y, tooltip=shown),
    ]
    what = (
        "A point is a best rate that was measured, with its 95 % interval over seeds; the line is the power law, with "
        f"the band of its interval; the ring is the rate at the target. {BENDS}"
    )
    title, spec = f"Best learning rate against {axis.title}", charts.spec(*layers, x=x, color=color)
    axes = {"y": charts.scales(rates=columns["lr"], padding=15)}
    return Chart(title, what, spec, columns, axes=axes, file="transfer.png")


def _rows(entry: Mapping[str, Any], target: int | None) -> list[tuple[Any, ...]]:
    """The rows drawn for a recipe: measured rates, the law, the rate at the target."""
    drawn: list[Any] = [("measured", *row) for row in found_at(entry) if row[1] is not None]
    if entry["line"]:
        line = zip(*(entry["line"][key] for key in ("size", "log2_lr", "log2_lr_ci")), strict=True)
        drawn += [("law", *row) for row in line]
        if target is not None:
            drawn.append(("target", target, entry["target_log2_lr"], entry["target_log2_lr_ci"]))
    ends = ((kind, size, rate, *(interval or (rate, rate))) for kind, size, rate, interval in drawn)
    return [(entry["recipe"], kind, size, *map(lr, rates)) for kind, size, *rates in ends]
