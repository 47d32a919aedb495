"""A ladder as a table and as a page: the predicted loss with its interval, the curve, the run at the target."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import altair as alt

from surefoot.experiment.reports import charts, transfer
from surefoot.experiment.reports.page import Chart, Fact, Page, Table
from surefoot.experiment.reports.style import TRAINING, estimate, training
from surefoot.experiment.sweep.ladder import load, records

_BUT = "it does not contain that the curve bends beyond what was measured"


def statement(summary: Mapping[str, Any]) -> str:
    """Format the rungs, the prediction and how far off it was, for a terminal."""
    return "\n".join([f"{table(summary)}\n", *(f"{fact.label}: {fact.value}; {fact.note}" for fact in facts(summary))])


def table(summary: Mapping[str, Any]) -> Table:
    """Tabulate the rungs, and the target if it was run.

    Args:
        summary: the content of `summary.json`.

    Returns:
        The table, with notes.
    """
    head = ["width", "parameters", "steps", "lr", "seeds", "validation loss", TRAINING]
    rows = [
        [
            str(rung["width"]), f"{rung['parameters']:,}", f"{rung['steps']:,}", f"{2 ** rung['log2_lr']:.3g}",
            str(len(rung["losses"])), estimate(rung["val_loss"], rung["val_loss_ci"], ".3f", "none"),
            training(rung["train_loss"], rung["val_loss"]),
        ]
        for rung in (*summary["rungs"], *([summary["target"]] if summary["target"]["losses"] else []))
    ]  # fmt: skip
    tokens = f"{summary['config']['tokens_per_parameter']:g} tokens a parameter"
    note = f"{summary['recipe']} at the rate of its law, {tokens}; losses in nats, ± half a 95 % interval over seeds."
    return Table("Rungs", head, rows, [note])


def facts(summary: Mapping[str, Any]) -> list[Fact]:
    """Say first what was asked: the loss of the target, how sure that is, and how far off it was.

    Args:
        summary: the content of `summary.json`.

    Returns:
        The facts.
    """
    target, widths = summary["target"], [rung["width"] for rung in summary["rungs"]]
    label = f"Predicted loss at width {target['width']}"
    if summary["no_curve"]:
        return [Fact(label, "none", summary["no_curve"])]
    larger = target["parameters"] / summary["rungs"][-1]["parameters"]
    beyond = f"{larger:.3g} times the parameters of the largest of widths {', '.join(map(str, widths))}"
    interval = Fact("Its 95 % interval", "not known", "it needs a fourth run: --seeds 3, or more --widths, elsewhere")
    if ci := target["predicted_ci"]:
        what = f"for one run, of either curve, {summary['freedom']} degrees of freedom; {_BUT}"
        interval = Fact("Its 95 % interval", f"{ci[0]:.3f} to {ci[1]:.3f}", what)
    off = Fact("Measured there", "not yet", "--train-target trains it")
    if target["off"] is not None:
        inside = ci and ("inside the interval" if ci[0] <= target["val_loss"] <= ci[1] else "OUTSIDE the interval")
        measured = f"the prediction is {target['off']:+.3f} nats off" + (f", {inside}" if inside else "")
        off = Fact("Measured there", f"{target['val_loss']:.3f}", measured)
    elif target["losses"]:
        off = Fact("Measured there", "none", "the run diverged or failed")
    floor, power, free = (summary[name] for name in ("floor", "power", "free_power"))
    curves = f"the prediction is the middle of {floor:.3f} + c parameters^-{power:.3f} and c parameters^-{free:.3f}"
    return [
        Fact(label, f"{target['predicted']:.3f}", beyond),
        interval,
        off,
        Fact("Fitted floor", f"{floor:.3f}", curves),
    ]


def page(directory: Path) -> Page:
    """Describe a ladder, finished or not.

    Args:
        directory: of `surefoot ladder`.

    Returns:
        The page.

    Raises:
        FileNotFoundError: no ladder was started there.
        ValueError: its files are damaged.
    """
    summary = load(directory)
    ran, settings = records(summary, directory), summary["config"]["settings"]
    missing = "unfinished" in (summary["no_curve"] or "")
    details = {"Configuration": charts.flat(settings), "Machine and versions": summary["environment"]}
    drawn = [_curve(summary)] if any(rung["losses"] for rung in summary["rungs"]) else []
    state = f"{'under way' if missing else 'finished'}: {len(ran)} runs"
    tables = [table(summary), transfer.runs(ran)]
    return Page(directory.name, f"ladder: {settings['model']}", state, facts(summary), drawn, tables, details)


def _curve(summary: Mapping[str, Any]) -> Chart:
    target, line = summary["target"], summary["line"]
    rows: list[tuple[Any, ...]] = [
        ("run", rung["parameters"], loss, None, None, str(rung["width"]))
        for rung in (*summary["rungs"], target)
        for loss in rung["losses"].values()
    ]
    if line:
        drawn = zip(line["size"], line["loss"], line["loss_ci"], strict=True)
        rows += [("curve", size, loss, *(ci or (None, None)), None) for size, loss, ci in drawn]
        ends = target["predicted_ci"] or (None, None)
        rows.append(("predicted", target["parameters"], target["predicted"], *ends, str(target["width"])))
    columns = charts.columns(("kind", "size", "loss", "low", "high", "width"), rows)
    shown = charts.tooltip("kind=it is", "width", "size=parameters|,.0f", "loss|.3f", "low=from|.3f", "high=to|.3f")
    x = alt.X("size:Q", title="parameters", scale=alt.Scale(type="log", nice=False), axis=alt.Axis(format=".2s"))
    y, low = (alt.Y(f"{field}:Q", title="validation loss in nats") for field in ("loss", "low"))
    curve, run, predicted = (charts.rows(f"datum.kind == '{kind}'") for kind in ("curve", "run", "predicted"))
    band = charts.rows("datum.kind == 'curve' && datum.low != null")
    ink: dict[str, Any] = {"color": "var(--s0)"}
    layers = [
        band.mark_area(opacity=0.15, aria=False, **ink).encode(low, y2="high:Q"),
        curve.mark_line(strokeWidth=2, **ink).encode(y),
        predicted.transform_filter("datum.low != null").mark_rule(strokeWidth=2, **ink).encode(low, y2="high:Q"),
        predicted.mark_point(filled=False, size=130, strokeWidth=2, **ink).encode(y, tooltip=shown),
        run.mark_point(filled=True, size=55, color="var(--s1)").encode(y, tooltip=shown),
    ]
    what = (
        "A point is a run; the line is the middle of two power laws that were fitted to the small models, with a floor "
        f"and without, the band both 95 % intervals for one run; {_BUT}. The ring is what it predicts."
    )
    axes, spec = {"y": charts.scales("linear")}, charts.spec(*layers, x=x)
    return Chart("Loss against parameters", what, spec, columns, axes=axes, file="ladder.png")
