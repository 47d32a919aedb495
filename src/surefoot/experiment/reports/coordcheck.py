"""A coordinate check as a table and as a page: does it pass, and which layers leave the band."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import altair as alt

from surefoot.experiment import configs
from surefoot.experiment.coordcheck import KINDS, LOGITS, QUANTITIES, RESULTS, SUMMARY, finished
from surefoot.experiment.files import read_lines
from surefoot.experiment.reports import charts
from surefoot.experiment.reports.page import Chart, Choice, Fact, Page, Table
from surefoot.experiment.reports.style import estimate
from surefoot.experiment.sweep import fit

NAMED = 7
"""Lines outside the band that get a colour and a name in a panel: the steepest."""
_PASS = ("inside", "zero")
_LABELS = {"start": "activations at the start", "change": "their change"}
_CHOICES = [Choice(label, {"of": label}) for label in _LABELS.values()]


def statement(summary: Mapping[str, Any]) -> str:
    """Format the slopes of each layer and the verdict, for a terminal.

    Args:
        summary: the content of `coordcheck.json`.

    Returns:
        A padded Markdown table, notes, and the verdict in the last line.

    >>> inside = {"status": "inside", "slope": 0.01, "ci": None, "log2_rms": [0.0, 0.01]}
    >>> outside = {"status": "outside", "slope": 1.0, "ci": None, "log2_rms": [0.0, 1.0]}
    >>> layers = [{"layer": "up", "start": inside, "change": outside}]
    >>> config = {"method": "adamw", "lr": 0.5, "steps": 10}
    >>> text = statement({"layers": layers, "passes": False, "band": 0.1, "widths": [64, 128], "seeds": [0],
    ...                   "config": config})
    >>> print(text.splitlines()[2])
    | up    | +0.01              | +1.00               | change          |
    """
    return f"{_table(summary)}\n\n{verdict(summary)}"


def _table(summary: Mapping[str, Any]) -> Table:
    rows = []
    for layer in summary["layers"]:
        fits = [layer[quantity] for quantity in QUANTITIES]
        slopes = [estimate(fit["slope"], fit["ci"], "+.2f", fit["status"]) for fit in fits]
        leaves = [quantity for quantity in QUANTITIES if layer[quantity]["status"] not in _PASS]
        rows.append([layer["layer"], *slopes, ", ".join(leaves)])
    config, widths, n = summary["config"], summary["widths"], len(summary["seeds"])
    intervals = ": no intervals (they need three)" if n < fit.SEEDS_FOR_AN_INTERVAL else ", ± half a 95 % interval"
    notes = [
        "slope of log2 rms over log2 width: of each layer's output at the start, and of its change after",
        f"{config['steps']} steps of {config['method']} at lr {config['lr']:.4g}; "
        f"widths {' '.join(map(str, widths))}; n = {n} seed{'s' * (n > 1)}{intervals}.",
        f"The {LOGITS} may fall at the start (as width^-1/2, by design): there only growth leaves the band.",
    ]
    head = ["layer", "slope at the start", "slope of the change", "leaves the band"]
    return Table("Slopes by layer", head, rows, notes)


def verdict(summary: Mapping[str, Any]) -> str:
    """Say in one line whether the check passes, and how many of the failures may be noise."""
    slopes = [layer[quantity] for layer in summary["layers"] for quantity in QUANTITIES]
    wrong = [slope for slope in slopes if slope["status"] not in _PASS]
    if summary["passes"]:
        return f"passes: all {len(slopes)} slopes within ±{summary['band']:g}"
    line = f"FAILS: {len(wrong)} of {len(slopes)} slopes leave ±{summary['band']:g}"
    reaching = sum(max(ci[0], -ci[1]) <= summary["band"] for slope in wrong if (ci := slope["ci"]))
    more = f"; {reaching} may be noise, their intervals reach into the band: more --seeds would tell"
    return line + more * bool(reaching)


def load(directory: Path) -> dict[str, Any]:
    """Read the summary of a coordinate check.

    Args:
        directory: of `surefoot coordcheck`.

    Returns:
        The content of `coordcheck.json`.

    Raises:
        ValueError: the check has not finished, or the file is damaged.
    """
    if not (directory / SUMMARY).exists():
        raise ValueError(f"{directory} holds a check that has not finished: the same command goes on with it")
    return configs.read(directory / SUMMARY)


def page(directory: Path) -> Page:
    """Describe a coordinate check, finished or not.

    Args:
        directory: of `surefoot coordcheck`.

    Returns:
        The page.

    Raises:
        ValueError: a file is damaged.
    """
    _, config = configs.kind_of(directory)
    name, details = f"coordinate check of {config['method']}", {"Configuration": charts.flat(config)}
    if not (directory / SUMMARY).exists():
        records = finished(read_lines(directory / RESULTS, KINDS))
        details["Finished runs"] = {f"width {record['width']}, seed {record['seed']}": "" for record in records}
        facts = [Fact("Coordinate check", "under way", "slopes are fitted when all runs have finished")]
        return Page(directory.name, name, f"under way: {len(records)} runs", facts, [], [], details)
    summary = load(directory)
    facts = [
        Fact("Coordinate check", "passes" if summary["passes"] else "FAILS", verdict(summary).partition(": ")[2]),
        Fact("Of", config["method"], f"at lr {config['lr']:.4g}, {config['steps']} steps"),
        Fact("Widths", ", ".join(map(str, summary["widths"])), f"n = {len(summary['seeds'])} seeds"),
    ]
    details["Machine and versions"] = summary.get("environment", {})
    drawn = [_slopes(summary), _sizes(summary)]
    return Page(directory.name, name, "finished", facts, drawn, [_table(summary)], details)


def _slopes(summary: Mapping[str, Any]) -> Chart:
    rows = [
        (of, layer["layer"], fitted["slope"], *(fitted["ci"] or (None, None)), fitted["status"])
        for quantity, of in _LABELS.items()
        for layer in summary["layers"]
        if (fitted := layer[quantity])["slope"] is not None
    ]
    band, status = summary["band"], ["inside", "outside", "zero"]
    slope, low = (alt.X(f"{field}:Q", title="slope of log2 RMS over log2 width") for field in ("slope", "low"))
    colours = alt.Scale(domain=status, range=["var(--s0)", "var(--bad)", "var(--soft)"])
    color = alt.Color("status:N", title="slope", scale=colours)
    shape = alt.Shape("status:N", title="slope", scale=alt.Scale(domain=status, range=["circle", "diamond", "circle"]))
    y = alt.Y("layer:N", title=None, sort=None, axis=alt.Axis(labelLimit=190, grid=True))
    shown = charts.tooltip("layer", "slope|+.3f", "low=from|+.3f", "high=to|+.3f", "status=it is")
    edge = charts.rows().mark_rule(strokeDash=[6, 3], color="var(--ink)", aria=False)
    layers = [
        *(edge.encode(x=alt.X(datum=end)) for end in (-band, band)),
        charts.rows("datum.low != null").mark_rule(strokeWidth=2).encode(low, y, color, x2="high:Q"),
        charts.rows().mark_point(filled=True, size=55).encode(slope, y, color, shape, tooltip=shown),
    ]
    what = f"A point per layer with its 95 % interval. Inside the dashed band, ±{band:g}, its size keeps its scale."
    columns = charts.columns(("of", "layer", "slope", "low", "high", "status"), rows)
    height = 90 + max(250, 16 * len(summary["layers"]))
    return Chart("Slopes", what, charts.spec(*layers), columns, _CHOICES, side_by_side=True, height=height)


def _sizes(summary: Mapping[str, Any]) -> Chart:
    rows = []
    for quantity, of in _LABELS.items():
        fits = {layer["layer"]: layer[quantity] for layer in summary["layers"] if layer[quantity]["slope"] is not None}
        outside = [name for name in fits if fits[name]["status"] == "outside"]
        steepest = sorted(outside, key=lambda name: -abs(fits[name]["slope"]))[:NAMED]
        for name in dict.fromkeys([*steepest, *fits]):
            label = f"{name} {fits[name]['slope']:+.2f}" if name in steepest else None
            sizes = zip(summary["widths"], fits[name]["log2_rms"], strict=True)
            rows += [(of, name, width, 2**size, fits[name]["status"], label) for width, size in sizes]
    columns = charts.columns(("of", "layer", "width", "rms", "status", "name"), rows)
    legend, scale = alt.Legend(columns=2, labelLimit=400, symbolOpacity=1), alt.Scale(range=charts.COLOURS)
    by_name = alt.Color("name:N", title="outside the band", sort=None, scale=scale, legend=legend)
    shown = charts.tooltip("layer", "width", "rms=RMS|.4g", "status=its slope is")
    pale: dict[str, Any] = {"color": alt.value("var(--soft)"), "opacity": alt.value(0.5)}
    layers = [
        charts.rows("datum.name == null").mark_line().encode(**pale),
        charts.rows().mark_point(filled=True, size=30).encode(**pale, tooltip=shown),
    ]
    if any(columns["name"]):  # their points are for the eye: in a panel without any, a reader would meet an empty group
        named = charts.rows("datum.name != null")
        points = named.mark_point(filled=True, size=30, aria=False).encode(by_name, tooltip=shown)
        layers += [named.mark_line().encode(by_name), points]
    x, y = charts.sizes("width", "width", summary["widths"]), alt.Y("rms:Q", title="RMS")
    what = "A line per layer, the mean over seeds. Level lines keep their scale."
    spec = charts.spec(*layers, x=x, y=y, detail=alt.Detail("layer:N"))
    own: Any = {"axes": {"y": charts.scales(rates=columns["rms"])}, "file": "coordcheck.png"}
    return Chart("Sizes against width", what, spec, columns, _CHOICES, side_by_side=True, **own)
