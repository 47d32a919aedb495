"""The best rates over horizons, batch sizes or depths, and their power law, as a table and as a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from surefoot.experiment.files import Record
from surefoot.experiment.reports import transfer
from surefoot.experiment.reports.style import GREY, INK, aligned, frame, lr, plus_minus
from surefoot.experiment.sweep.axis import AXES, flag
from surefoot.experiment.sweep.summary import Swept

BENDS = (
    "An interval over seeds says how far other seeds would move the line.\n"
    "It does not contain that the law bends beyond what was measured."
)
_FIXED = {"model": "{}", "width": "width {}", "steps": "{} steps", "batch_size": "batch size {}"}
"""What stays the same, as far as a reader of the rates needs it."""


@dataclass(frozen=True)
class Rate:
    """The rate to use of one recipe.

    Args:
        where: the value that it is for, "1600 steps".
        log2_lr: log2 of it; None if there is none.
        interval: of log2 of it.
        basis: how it was found, or why there is none.
    """

    where: str
    log2_lr: float | None
    interval: Sequence[float] | None
    basis: str


def rate(summary: Mapping[str, Any], entry: Mapping[str, Any]) -> Rate:
    """Find the rate to use: at the target by the law, without a target at the highest value as measured.

    Args:
        summary: the content of `summary.json`.
        entry: of a recipe.

    Returns:
        The rate, or why there is none.
    """
    axis, target, least, most = AXES[summary["axis"]], summary["target"], summary["values"][0], summary["values"][-1]
    if target is None:
        basis = f"measured; {flag(axis.target)} N gives the rate at N" if entry["interior"][-1] else entry["no_law"]
        return Rate(axis.text.format(most), entry["best_log2_lr"][-1], entry["best_log2_lr_ci"][-1], basis)
    if entry["no_law"]:
        basis = f"no law ({entry['no_law']})"
    elif target > most:
        basis = f"extrapolated {target / most:.3g}x beyond the {axis.most}"
    elif target < least:
        basis = f"extrapolated {least / target:.3g}x below the {axis.least}"
    else:
        basis = "by the law, inside what was measured"
    return Rate(axis.text.format(target), entry["target_log2_lr"], entry["target_log2_lr_ci"], basis)


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
        found = rate(summary, entry)
        ci = found.interval
        between = "" if ci is None else f" ({lr(ci[0]):.3g} to {lr(ci[1]):.3g})"
        use = "no rate" if found.log2_lr is None else f"lr = {lr(found.log2_lr):.3g}"
        lines.append(f"{entry['recipe']}: {use} at {found.where}{between}, width {summary['width']}; {found.basis}")
    return "\n".join(lines)


def statement(summary: Mapping[str, Any]) -> str:
    """Format what was measured, the table and the rates to use, for a terminal."""
    parts = [f"{fixed(summary)}:", aligned(*cells(summary)), "\n".join(notes(summary)), recommendation(summary)]
    return "\n\n".join(parts)


def fixed(summary: Mapping[str, Any]) -> str:
    """What all runs share, the width too."""
    values = {**summary["config"]["settings"], "width": summary["width"]}
    return ", ".join(text.format(values[key]) for key, text in _FIXED.items() if key in values)


def cells(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table's columns and, per recipe, its cells."""
    values = [AXES[summary["axis"]].text.format(value) for value in summary["values"]]
    head = ["recipe", *(f"best lr at {value}" for value in values)]
    head += ["power", "off the line", "drift in octaves", f"best loss at {values[-1]}"]
    return head, [_row(entry) for entry in summary["recipes"]]


def _row(entry: Mapping[str, Any]) -> list[str]:
    optima = zip(entry["best_log2_lr"], entry["best_log2_lr_ci"], entry["status"], strict=True)
    loss, off = entry["best_loss"][-1], entry["rms_octaves"]
    return [
        entry["recipe"],
        *(transfer.optimum(*one) for one in optima),
        power(entry),
        "not known" if off is None else f"{off:.2f}",
        transfer.drift(entry),
        "none" if loss is None else f"{loss:.3f}",
    ]


def power(entry: Mapping[str, Any]) -> str:
    """Format a recipe's power, with its interval."""
    return "no law" if entry["power"] is None else f"{entry['power']:+.2f}{plus_minus(entry['power_ci'], 2)}"


def notes(summary: Mapping[str, Any]) -> list[str]:
    """Return what the table's columns mean, in lines."""
    title = AXES[summary["axis"]].title
    lines = [
        f"best lr: vertex of a parabola in log2 lr. power: b of the law lr = c ({title})^b, the line through the best",
        "rates in log2. off the line: root mean square of their distances from it, in octaves; of three or more.",
        "drift: the last minus the first.",
        *transfer.seeds_and_edges(as_sweep(summary, {})[0]["recipes"], AXES[summary["axis"]].text),
        *BENDS.split("\n"),
    ]
    if any(entry["no_law"] for entry in summary["recipes"]):
        lines.append("no law: it needs a best rate inside those measured at every value: --budget, --rates, --seeds.")
    if not summary["finished"]:
        lines.append("UNFINISHED: a best rate is of a sweep that has finished; the same command goes on from there.")
    return lines


def as_sweep(summary: Mapping[str, Any], swept: Mapping[int, Swept]) -> tuple[dict[str, Any], list[Record]]:
    """Put the values in the place of the widths, for what reports draw of a sweep over widths.

    Args:
        summary: the content of `summary.json`.
        swept: by value.

    Returns:
        What a sweep's summary has of its recipes and widths, and the records.
    """
    entries = [{**entry, "widths": entry["values"]} for entry in summary["recipes"]]
    records = [{**record, "width": value} for value, one in swept.items() for record in one.records]
    return {"recipes": entries, "config": {**summary["config"], "widths": summary["values"]}}, records


def nothing(summary: Mapping[str, Any]) -> bool:
    """Whether no value has a best rate, so that there is nothing to draw."""
    return all(rate is None for entry in summary["recipes"] for rate in entry["best_log2_lr"])


def figure(summary: Mapping[str, Any], directory: Path) -> Path | None:
    """Draw `transfer.png`: best rate against size, both logarithmic, with each recipe's law.

    A dot is a measured best rate with its interval, a line the law with the band of its interval, a ring the rate at
    the target.

    Args:
        summary: the content of `summary.json`.
        directory: where the picture is written.

    Returns:
        The picture's path; None where no value has a best rate.
    """
    if nothing(summary):
        return None
    axis, target = AXES[summary["axis"]], summary["target"]
    drawing = Figure(figsize=(6.4, 3.8), layout="constrained", dpi=200)
    panel = drawing.subplots()
    for place, entry in enumerate(summary["recipes"]):
        _law(panel, entry, target, colormaps["tab10"](place % 10))
    panel.set_xscale("log", base=2)
    ticks = sorted({*summary["values"], *([target] if target else [])})
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.minorticks_off()
    panel.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"$2^{{{y:g}}}$"))
    panel.set_xlabel(axis.title, fontsize=10, color=INK)
    panel.set_ylabel("best learning rate", fontsize=10, color=INK)
    panel.set_title(fixed(summary), fontsize=10, color=INK)
    frame(panel, ticks=GREY)
    drawing.legend(loc="outside right center", frameon=False, fontsize=9, title="power")
    path = directory / transfer.PICTURE
    drawing.savefig(path)
    return path


def _law(panel: Axes, entry: Mapping[str, Any], target: int | None, colour: transfer.Colour) -> None:
    measured = zip(entry["values"], entry["best_log2_lr"], entry["best_log2_lr_ci"], strict=True)
    label = f"{entry['recipe']}\n{power(entry)}"
    for value, best, ci in measured:
        if best is not None:
            _interval(panel, value, ci, colour)
            panel.plot(value, best, "o", color=colour, markersize=5, zorder=4)
    if entry["line"] is None:
        panel.plot([], [], "o", color=colour, markersize=5, label=label)
        return
    sizes, line, intervals = (entry["line"][key] for key in ("size", "log2_lr", "log2_lr_ci"))
    panel.plot(sizes, line, "-", color=colour, linewidth=1.4, label=label, zorder=2)
    if None not in intervals:
        low, high = zip(*intervals, strict=True)
        panel.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0, zorder=1)
    if target is not None:
        _interval(panel, target, entry["target_log2_lr_ci"], colour)
        panel.plot(
            target, entry["target_log2_lr"], "o", markersize=8, markerfacecolor="white", markeredgecolor=colour,
            markeredgewidth=1.6, zorder=5,
        )  # fmt: skip


def _interval(panel: Axes, size: int, ci: Sequence[float] | None, colour: transfer.Colour) -> None:
    if ci is not None:
        panel.plot([size] * 2, ci, "-_", color=colour, linewidth=1.4, markersize=8, zorder=3)
