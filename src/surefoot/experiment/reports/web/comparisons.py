"""The page of a comparison: who is ahead, by how much, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.experiment.compare.run import load
from surefoot.experiment.reports import compare
from surefoot.experiment.reports.style import plus_minus
from surefoot.experiment.reports.web import vega
from surefoot.experiment.reports.web.page import Chart, Fact, Page, Table


def page(directory: Path) -> Page:
    """Describe a comparison, finished or not.

    Args:
        directory: of `surefoot compare`.

    Returns:
        The page.

    Raises:
        FileNotFoundError: no comparison was started there.
        ValueError: its files are damaged.
    """
    summary = load(directory)
    entries, config = summary["recipes"], summary["config"]
    table = Table("Who is ahead", *compare.cells(summary), compare.notes(summary))
    details = {"Configuration": vega.flat(config), "Machine and versions": summary["environment"]}
    kind = f"comparison of {len(entries)} with equal tuning, width {config['width']}, {config['steps']} steps"
    state = "finished" if summary["finished"] else "under way"
    charts = [chart for chart in (_curves(entries), _seeds(entries), _tuning(entries)) if chart]
    return Page(directory.name, kind, state, _facts(summary), charts, [table], details)


def _facts(summary: Mapping[str, Any]) -> list[Fact]:
    measured = [entry for entry in summary["recipes"] if entry["val_loss"] is not None]
    if not measured:
        return [Fact("Lowest loss", "none yet", "no final run has finished without diverging")]
    best = min(measured, key=lambda entry: float(entry["val_loss"]))
    at = f"at lr {best['lr']:.3g}, {best['settings']}, n = {best['final_runs']} fresh seeds"
    loss = f"{best['val_loss']:.4f}{plus_minus(best['val_loss_ci'], 4)} nats"
    facts = [Fact("Lowest loss", best["name"], f"{loss} {at}")]
    if best["name"] != summary["baseline"] and best["difference"] is not None:
        p = "" if best["p"] is None else f"p = {best['p']:.2g}, two-sided, "
        value = f"{best['difference']:+.4f}{plus_minus(best['difference_ci'], 4)} nats"
        facts.append(Fact(f"Minus {summary['baseline']}", value, f"{p}paired over seeds"))
    if best["steps_ratio"] is not None:
        time = "" if best["seconds_ratio"] is None else f"; {best['seconds_ratio']:.2f} of its time"
        note = f"to loss {summary['target']:.4f}{time}"
        facts.append(Fact(f"Steps that {summary['baseline']} takes", f"{best['steps_ratio']:.2f} of them", note))
    return facts


def _curves(entries: Sequence[Mapping[str, Any]]) -> Chart | None:
    rows = [
        (entry["name"], step, loss)
        for entry in entries
        if entry["curve"]
        for step, loss in zip(entry["curve"]["step"], entry["curve"]["val_loss"], strict=True)
    ]
    what = "Validation loss on the way, the mean over seeds."
    return _chart("Loss over steps", what, ("recipe", "step", "loss"), rows, entries, line=True)


def _seeds(entries: Sequence[Mapping[str, Any]]) -> Chart | None:
    rows = [
        (entry["name"], seed, loss)
        for entry in entries
        for seed, loss in entry["val_loss_by_seed"].items()
        if loss is not None
    ]
    what = "The final loss of each fresh seed; the same seed is the same batches for all, so compare along a column."
    return _chart("Final loss by seed", what, ("recipe", "seed", "loss"), rows, entries, line=False)


def _tuning(entries: Sequence[Mapping[str, Any]]) -> Chart | None:
    rows = [
        (entry["name"], 2 ** point["log2_lr"], point["val_loss"])
        for entry in entries
        for point in entry["tuning"]
        if point["val_loss"] is not None
    ]
    what = "What each recipe was tuned with, as many rates for all; the best has neighbours on both sides."
    return _chart("Tuning", what, ("recipe", "lr", "loss"), rows, entries, line=True)


def _chart(
    title: str, what: str, names: Sequence[str], rows: Sequence[tuple[Any, ...]],
    entries: Sequence[Mapping[str, Any]], line: bool,
) -> Chart | None:  # fmt: skip
    """Loss against the second column, by the first."""
    if not rows:
        return None
    columns = vega.columns(names, rows, 6)
    marks = vega.series("recipe", "recipe", [entry["name"] for entry in entries])
    other = names[1]
    label, form = {"lr": ("learning rate", "|.3g"), "step": ("step", "|d"), "seed": ("seed", "")}[other]
    x = vega.steps() if other == "step" else vega.number(other, label)
    if other == "seed":
        x |= {"type": "ordinal", "axis": {"labelAngle": 0}}
    shown = vega.tooltip(**{"recipe": "recipe", other: label + form, "loss": "loss|.4f"})
    point = {
        "mark": {"type": "point", "filled": True, "size": 60},
        "encoding": {"shape": marks["shape"], "tooltip": shown},
    }
    spec = {
        "encoding": {"x": x, "y": vega.number("loss", "validation loss (nats)"), "color": marks["color"]},
        "layer": [*([{"mark": {"type": "line", "strokeWidth": 2}}] if line else []), point],
    }
    axes = {"y": dict(reversed(vega.scales().items()))}
    if other == "lr":
        axes["x"] = vega.scales(columns["lr"], padding=12)
    return Chart(title, what, spec, columns, axes=axes)
