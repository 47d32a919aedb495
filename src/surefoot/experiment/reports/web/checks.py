"""The page of a coordinate check: does it pass, and which layers leave the band."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surefoot.experiment import configs
from surefoot.experiment.coordcheck import QUANTITIES, RESULTS, SUMMARY, finished
from surefoot.experiment.files import read_lines
from surefoot.experiment.reports import coordcheck
from surefoot.experiment.reports.web import vega
from surefoot.experiment.reports.web.page import Chart, Choice, Fact, Page, Table

_LABELS = {"start": "activations at the start", "change": "their change"}


def page(directory: Path, config: Mapping[str, Any]) -> Page:
    """Describe a coordinate check, finished or not.

    Args:
        directory: of `surefoot coordcheck`.
        config: of its runs.

    Returns:
        The page.

    Raises:
        ValueError: a file is damaged.
    """
    if not (directory / SUMMARY).exists():
        return _unfinished(directory, config)
    summary = configs.read(directory / SUMMARY)
    verdict = coordcheck.verdict(summary)
    facts = [
        Fact("Coordinate check", "passes" if summary["passes"] else "FAILS", verdict.partition(": ")[2]),
        Fact("Of", config["method"], f"at lr {config['lr']:.4g}, {config['steps']} steps"),
        Fact("Widths", ", ".join(map(str, summary["widths"])), f"n = {len(summary['seeds'])} seeds"),
    ]
    table = Table("Slopes by layer", *coordcheck.cells(summary), coordcheck.notes(summary))
    details = {"Configuration": vega.flat(config), "Machine and versions": summary.get("environment", {})}
    name = f"coordinate check of {config['method']}"
    return Page(directory.name, name, "finished", facts, [_slopes(summary), _sizes(summary)], [table], details)


def _unfinished(directory: Path, config: Mapping[str, Any]) -> Page:
    records = finished(read_lines(directory / RESULTS, ("width", "seed")))
    runs = [f"width {record['width']}, seed {record['seed']}" for record in records]
    facts = [Fact("Coordinate check", "under way", "slopes are fitted when all runs have finished")]
    details = {"Configuration": vega.flat(config), "Finished runs": dict.fromkeys(runs, "")}
    name, state = f"coordinate check of {config['method']}", f"under way: {len(records)} runs"
    return Page(directory.name, name, state, facts, [], [], details)


def _choices() -> list[Choice]:
    return [Choice(_LABELS[quantity], {"of": _LABELS[quantity]}) for quantity in QUANTITIES]


def _slopes(summary: Mapping[str, Any]) -> Chart:
    rows = [
        (_LABELS[quantity], layer["layer"], fitted["slope"], *(fitted["ci"] or (None, None)), fitted["status"])
        for quantity in QUANTITIES
        for layer in summary["layers"]
        if (fitted := layer[quantity])["slope"] is not None
    ]
    title, band, (colour, shape) = "slope of log2 RMS over log2 width", summary["band"], _marks("var(--s0)")
    shown = vega.tooltip(layer="layer", slope="slope|+.3f", low="from|+.3f", high="to|+.3f", status="it is")
    edges = [
        vega.layer("rule", {"x": {"datum": edge}, "y": None}, strokeDash=[6, 3], color="var(--ink)", aria=False)
        for edge in (-band, band)
    ]
    interval = {"x": vega.number("low", title), "x2": {"field": "high"}, "color": colour}
    point = {"x": vega.number("slope", title), "color": colour, "shape": shape, "tooltip": shown}
    y = {"field": "layer", "type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": 190, "grid": True}}
    layers = [*edges, vega.layer("rule", interval, "datum.low != null", strokeWidth=2), vega.points(point)]
    return Chart(
        "Slopes",
        f"A point per layer with its 95 % interval. Inside the dashed band, ±{band:g}, its size keeps its scale.",
        {"encoding": {"y": y}, "layer": layers},
        vega.columns(("of", "layer", "slope", "low", "high", "status"), rows),
        _choices(),
        side_by_side=True,
        height=90 + max(250, 16 * len(summary["layers"])),
    )


def _sizes(summary: Mapping[str, Any]) -> Chart:
    rows = [
        (_LABELS[quantity], layer["layer"], width, 2**size, layer[quantity]["status"])
        for quantity in QUANTITIES
        for layer in summary["layers"]
        if layer[quantity]["slope"] is not None
        for width, size in zip(summary["widths"], layer[quantity]["log2_rms"], strict=True)
    ]
    shown = vega.tooltip(layer="layer", width="width", rms="RMS|.4g", status="its slope is")
    shared = {
        "x": vega.widths(summary["widths"]),
        "y": vega.number("rms", "RMS"),
        "color": _marks("var(--soft)")[0],
        "detail": {"field": "layer"},
    }
    return Chart(
        "Sizes against width",
        "A line per layer, the mean over seeds. Level lines keep their scale.",
        {"encoding": shared, "layer": [vega.layer("line"), vega.points({"tooltip": shown}, size=30)]},
        vega.columns(("of", "layer", "width", "rms", "status"), rows),
        _choices(),
        side_by_side=True,
        axes={"y": vega.scales()},
    )


def _marks(inside: str) -> tuple[vega.Spec, vega.Spec]:
    """Colour and shape by whether a slope is in the band."""
    status, domain = {"field": "status", "type": "nominal", "title": "slope"}, ["inside", "outside", "zero"]
    colours, shapes = [inside, "var(--bad)", "var(--soft)"], ["circle", "diamond", "circle"]
    return (
        {**status, "scale": {"domain": domain, "range": colours}},
        {**status, "scale": {"domain": domain, "range": shapes}},
    )
