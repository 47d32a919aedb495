"""A finished sweep as a table and as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from surefoot.experiment.files import Record
from surefoot.experiment.reports.loss_frame import CROSS_ROW, SharedAxes, means_of, shared_axes
from surefoot.experiment.reports.style import GREY, INK, aligned, frame, lr, plus_minus
from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.summary import points
from surefoot.experiment.sweep.sweep import load

Colour = tuple[float, float, float, float]

PICTURE = "transfer.png"


def table(summary: Mapping[str, Any]) -> str:
    """Format the optima, drift, regret and best loss of each recipe as a Markdown table with notes below.

    Args:
        summary: the content of `summary.json`.

    Returns:
        Padded Markdown, for a terminal.

    >>> entry = {"recipe": "muon", "widths": [32, 64], "best_log2_lr": [-4.0, -4.5],
    ...          "best_log2_lr_ci": [None, None], "best_loss": [2.1, 2.0], "status": ["interior"] * 2,
    ...          "drift_octaves": -0.5, "drift_octaves_ci": None, "regret_nats": 0.01,
    ...          "regret_nats_ci": None, "regret_diverged": False, "seeds": 1}
    >>> print(table({"recipes": [entry]}).splitlines()[2])
    | muon   | 2^-4.00       | 2^-4.50       | -0.50 (x 0.71)   | 0.010        | 2.000           |
    """
    return "\n".join([aligned(*cells(summary)), "", *notes(summary)])


def cells(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table's columns and, per recipe, its cells."""
    entries = summary["recipes"]
    widths = entries[0]["widths"]
    head = ["recipe", *(f"best lr at {width}" for width in widths)]
    if len(widths) > 1:
        head += ["drift in octaves", f"regret at {widths[-1]}"]
    return [*head, f"best loss at {widths[-1]}"], [_row(entry) for entry in entries]


def statement(summary: Mapping[str, Any]) -> str:
    """Format the table and the recommended rates, for a terminal."""
    return f"{table(summary)}\n\n{recommendation(summary)}".rstrip()


def recommendation(summary: Mapping[str, Any]) -> str:
    """Name the rate to use at and beyond the widest model, a line per recipe with an interior optimum there.

    Args:
        summary: the content of `summary.json`.

    Returns:
        The lines; empty if no recipe has one.

    >>> recommendation({"recipes": [{"recipe": "muon", "widths": [32], "best_log2_lr": [-4.0],
    ...                              "best_log2_lr_ci": [[-4.1, -3.9]]}]})
    'muon: lr = 0.0625 at width 32 (0.0583 to 0.067)'
    """
    lines = []
    for entry in summary["recipes"]:
        rate, ci = entry["best_log2_lr"][-1], entry["best_log2_lr_ci"][-1]
        if rate is not None:
            between = "" if ci is None else f" ({lr(ci[0]):.3g} to {lr(ci[1]):.3g})"
            lines.append(f"{entry['recipe']}: lr = {2**rate:.3g} at width {entry['widths'][-1]}{between}")
    return "\n".join(lines)


def _row(entry: Mapping[str, Any]) -> list[str]:
    optima = zip(entry["best_log2_lr"], entry["best_log2_lr_ci"], entry["status"], strict=True)
    cells = [entry["recipe"], *(optimum(*one) for one in optima)]
    if len(entry["widths"]) > 1:
        cells += [drift(entry), _regret(entry)]
    return [*cells, "none" if entry["best_loss"][-1] is None else f"{entry['best_loss'][-1]:.3f}"]


def optimum(log2_lr: float | None, ci: Sequence[float] | None, status: str) -> str:
    """Format a best rate, or why there is none."""
    return status if log2_lr is None else f"2^{log2_lr:.2f}{plus_minus(ci, 2)}"


def drift(entry: Mapping[str, Any]) -> str:
    """Format how far a recipe's best rate moves."""
    drift = entry["drift_octaves"]
    if drift is None:
        return "not known"
    return f"{drift:+.2f}{plus_minus(entry['drift_octaves_ci'], 2)} (x {2**drift:.2f})"


def _regret(entry: Mapping[str, Any]) -> str:
    if entry["regret_nats"] is None:
        return "diverged" if entry["regret_diverged"] else "not known"
    return f"{entry['regret_nats']:.3f}{plus_minus(entry['regret_nats_ci'], 3)}"


def notes(summary: Mapping[str, Any]) -> list[str]:
    """Return what the table's columns mean, in lines."""
    return [
        "best lr: vertex of a parabola in log2 lr. drift: widest minus narrowest. regret: loss in nats of",
        "the narrowest optimum run at the widest model, minus the best measured there.",
        *seeds_and_edges(summary["recipes"]),
    ]


def seeds_and_edges(entries: Sequence[Mapping[str, Any]], text: str = "width {}") -> list[str]:
    """Say in lines what the intervals rest on, and what is no optimum.

    Args:
        entries: of the recipes.
        text: of a width, or of what is there in its place.

    Returns:
        The lines.
    """
    lines = []
    seeds = max(entry["seeds"] for entry in entries)  # while runs go on a recipe may have fewer
    if seeds < fit.SEEDS_FOR_AN_INTERVAL:
        lines.append(f"n = {seeds} seed{'s' * (seeds != 1)}: no intervals (they need three).")
    else:
        lines.append(f"n = {seeds} seeds, ± half a 95 % interval, paired over seeds.")
    if any(status.endswith(("edge", "divergence")) for entry in entries for status in entry["status"]):
        lines.append("edge, divergence: the best rate measured lies there, so no optimum is claimed.")
    return [*lines, *_failed(entries, text)]


def _failed(entries: Sequence[Mapping[str, Any]], text: str) -> list[str]:
    """A line for the runs that failed, if any did; summaries of earlier versions lack the key."""
    counts = [
        f"{entry['recipe']} {count} at {text.format(width)}"
        for entry in entries
        for width, count in zip(entry["widths"], entry.get("failed", [0] * len(entry["widths"])), strict=True)
        if count
    ]
    again = "killed twice, counted as diverged; to run one again, delete its line in results.jsonl."
    return [f"failed: {', '.join(counts)}; {again}"] if counts else []


def figure(directory: Path | str) -> Path | None:
    """Draw `transfer.png` into a run directory: loss against log2 lr, a panel per recipe.

    A curve per width is the mean over seeds, pale dots are the seeds, a circle is the fitted optimum with its interval
    over seeds, and crosses at the top are rates that diverged. Panels share the loss axis and the length of an octave.

    Args:
        directory: of a sweep, finished or not.

    Returns:
        The picture's path; None if no run has finished without diverging, so that there is nothing to draw.

    Raises:
        FileNotFoundError: no sweep was started there.
        ValueError: a file is damaged.
    """
    directory = Path(directory)
    summary, records = load(directory)
    axes = shared_axes(summary, records)
    if axes is None:
        return None
    entries = summary["recipes"]
    drawing = Figure(figsize=(0.9 + 3.3 * len(entries), 3.6), layout="constrained", dpi=200)
    panels = drawing.subplots(1, len(entries), sharey=True, squeeze=False)[0]
    for panel, entry in zip(panels, entries, strict=True):
        _panel(panel, entry, records, axes)
    panels[0].set_ylabel("validation loss (nats)", fontsize=10, color=INK)
    drawing.supxlabel("learning rate", fontsize=10, color=INK)
    handles, labels = panels[0].get_legend_handles_labels()
    if lost := [kind for kind in ("diverged", "failed") if any(record.get(kind) for record in records)]:
        handles.append(Line2D([], [], linestyle="", marker="x", color=GREY, markersize=4.5))
        labels.append(" or ".join(lost))
    drawing.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9, title="width")
    path = directory / PICTURE
    drawing.savefig(path)
    return path


def _panel(panel: Axes, entry: Mapping[str, Any], records: Sequence[Record], axes: SharedAxes) -> None:
    widths = entry["widths"]
    colours = [colormaps["viridis_r"](0.15 + 0.8 * i / max(1, len(widths) - 1)) for i in range(len(widths))]
    rates: list[float] = []
    for place, (width, colour) in enumerate(zip(widths, colours, strict=True)):
        means = means_of(records, entry["recipe"], width)
        rates += means
        _curve(panel, means, colour, str(width))
        _crosses(panel, means, colour, len(widths) - 1 - place)
        _seeds(panel, points(records, entry["recipe"], width), colour)
    _optima(panel, entry, records, colours)
    middle = (max(rates, default=0.0) + min(rates, default=0.0)) / 2
    panel.set_xlim(middle - axes.octaves / 2, middle + axes.octaves / 2)
    panel.set_ylim(axes.low, axes.high)
    panel.set_title(entry["recipe"], fontsize=11, pad=20, color=INK)
    panel.text(0.5, 1.02, _headline(entry), transform=panel.transAxes, ha="center", va="bottom", fontsize=9, color=INK)
    panel.xaxis.set_major_locator(MultipleLocator(1 if axes.octaves <= 7 else 2))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"$2^{{{x:.0f}}}$"))
    panel.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    frame(panel, ticks=GREY)


def _curve(panel: Axes, means: Mapping[float, float | None], colour: Colour, label: str) -> None:
    finite = {x: mean for x, mean in means.items() if mean is not None}
    panel.plot(list(finite), list(finite.values()), "-", color=colour, linewidth=1.6, label=label, zorder=2)
    panel.plot(list(finite), list(finite.values()), ".", color=colour, markersize=5, zorder=2)


def _crosses(panel: Axes, means: Mapping[float, float | None], colour: Colour, place: int) -> None:
    """Draw crosses for diverged rates at the top of the panel, a row per width so that none hides another."""
    lost = [x for x, mean in means.items() if mean is None]
    top = panel.get_xaxis_transform()
    rows = [0.975 - CROSS_ROW * place] * len(lost)
    panel.plot(lost, rows, "x", color=colour, markersize=4.5, transform=top)


def _seeds(panel: Axes, measured: Sequence[fit.Point], colour: Colour) -> None:
    if len({point.seed for point in measured}) == 1:
        return
    finite = [(point.log2_lr, point.loss) for point in measured if point.loss is not None]
    x, y = np.array(finite).reshape(-1, 2).T
    panel.scatter(x, y, s=5, color=colour, alpha=0.35, linewidths=0, zorder=1)


def _optima(panel: Axes, entry: Mapping[str, Any], records: Sequence[Record], colours: Sequence[Colour]) -> None:
    """Draw a circle on its curve for each fitted optimum, its interval, and the path from width to width."""
    path = []
    for i, (vertex, ci) in enumerate(zip(entry["best_log2_lr"], entry["best_log2_lr_ci"], strict=True)):
        if vertex is None:
            continue
        means = means_of(records, entry["recipe"], entry["widths"][i])
        finite = {x: mean for x, mean in means.items() if mean is not None}
        height = float(np.interp(vertex, list(finite), list(finite.values())))
        path.append((vertex, height))
        if ci is not None:
            panel.plot(ci, [height] * 2, "-|", color=INK, linewidth=1.4, markersize=9, zorder=4)
        panel.plot(
            vertex, height, "o", color=colours[i], markersize=6.5, markeredgecolor=INK, markeredgewidth=1.0, zorder=5
        )
    if path:
        panel.plot(*zip(*path, strict=True), "--", color=INK, linewidth=1.0, zorder=3)


def _headline(entry: Mapping[str, Any]) -> str:
    if len(entry["widths"]) == 1:
        return ""
    times = entry["widths"][-1] / entry["widths"][0]
    if entry["drift_octaves"] is None:
        return "no drift: an optimum is not interior"
    drift = f"{entry['drift_octaves']:+.2f}".replace("-", "\N{MINUS SIGN}")
    interval = plus_minus(entry["drift_octaves_ci"], 2)
    return f"drift {drift}{interval} octaves over {times:g}\N{MULTIPLICATION SIGN} width"
