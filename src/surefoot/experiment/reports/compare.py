"""A comparison as a table and as a page: who is ahead, by how much, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import altair as alt

from surefoot.experiment.compare.run import load
from surefoot.experiment.reports import charts
from surefoot.experiment.reports.page import Chart, Fact, Page, Table
from surefoot.experiment.reports.style import aligned, plus_minus
from surefoot.experiment.sweep import fit

FRAME = 1 / 3  # the loss axis spans the losses after this part of the steps: before, all curves fall alike


def table(summary: Mapping[str, Any]) -> str:
    """Format settings, rate, loss, difference, steps and time of all who take part as a Markdown table.

    Args:
        summary: the content of `summary.json`.

    Returns:
        Padded Markdown, for a terminal.

    >>> entry = {"name": "muon@0.02", "settings": "published", "tuning_runs": 0, "tuning_diverged": 0,
    ...          "tuning_status": None, "rate_from": "published", "log2_lr": -5.64, "lr": 0.02, "seeds": 1,
    ...          "final_runs": 1, "diverged": 0, "val_loss": 2.1, "val_loss_ci": None, "difference": None,
    ...          "difference_ci": None, "p": None, "curve": {}, "steps_to_target": 60.0, "steps_ratio": 1.0,
    ...          "seconds_ratio": 1.0}
    >>> print(table({"recipes": [entry], "baseline": "muon@0.02"}).splitlines()[2][:70])
    | muon@0.02 | published, 0 runs | 2^-5.64 (0.02), published | 2.1000 |
    """
    return aligned(*cells(summary))


def cells(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table's columns and, for each who takes part, its cells."""
    head = ["recipe", "settings", "best lr", "loss", "difference", "p", "steps", "time", "without a loss"]
    return head, [_row(entry, summary["baseline"]) for entry in summary["recipes"]]


def statement(summary: Mapping[str, Any]) -> str:
    """Format the table and what its columns mean, for a terminal."""
    return "\n".join([table(summary), "", *notes(summary)])


def _row(entry: Mapping[str, Any], baseline: str) -> list[str]:
    return [
        entry["name"],
        f"{entry['settings']}, {entry['tuning_runs']} runs",
        _rate(entry),
        _loss(entry),
        "baseline" if entry["name"] == baseline else _difference(entry),
        "" if entry["p"] is None else f"{entry['p']:.2g}",
        _ratio(entry, "steps_ratio"),
        _ratio(entry, "seconds_ratio"),
        f"{_count(entry, 'tuning_')} of {entry['tuning_runs']}, {_count(entry)} of {entry['final_runs']}",
    ]


def _count(entry: Mapping[str, Any], stage: str = "") -> int:
    """How many runs of a stage ended without a loss; summaries of earlier versions count them all as diverged."""
    count: int = entry[f"{stage}diverged"] + entry.get(f"{stage}failed", 0)
    return count


def _why(entry: Mapping[str, Any], stage: str = "") -> str:
    """Why runs of a stage ended without a loss."""
    return " or ".join(kind for kind in ("diverged", "failed") if entry.get(f"{stage}{kind}"))


def _rate(entry: Mapping[str, Any]) -> str:
    status = entry["tuning_status"]
    if entry["lr"] is None:
        return "tuning is unfinished" if status == "unfinished" else f"none: {_why(entry, 'tuning_')} at every rate"
    source = entry["rate_from"] if entry["rate_from"] != "measured" else f"measured, {status}"
    return f"2^{entry['log2_lr']:.2f} ({entry['lr']:.3g}), {source}"


def _loss(entry: Mapping[str, Any]) -> str:
    if entry["val_loss"] is None:
        return _why(entry) or "none"
    return f"{entry['val_loss']:.4f}{plus_minus(entry['val_loss_ci'], 4)}"


def _difference(entry: Mapping[str, Any]) -> str:
    if entry["difference"] is None:
        return "not known"
    return f"{entry['difference']:+.4f}{plus_minus(entry['difference_ci'], 4)}"


def _ratio(entry: Mapping[str, Any], key: str) -> str:
    if entry[key] is not None:
        return f"{entry[key]:.2f}"
    if why := _why(entry):
        return why
    return "not known" if entry["curve"] is None or entry["steps_to_target"] is not None else "not reached"


def notes(summary: Mapping[str, Any]) -> list[str]:
    """Return what the table's columns mean, in lines."""
    config, seeds = summary["config"], summary["config"]["seeds"]
    tuned = f"{config['rates_per_recipe']} rates x {config['tuning_seeds']} seed{'s' * (config['tuning_seeds'] > 1)}"
    intervals = "± half a 95 % t interval" if seeds >= fit.SEEDS_FOR_AN_INTERVAL else "no intervals (they need three)"
    lines = [
        f"tuned: {tuned} for each recipe. best lr: the vertex of a parabola in log2 lr (fitted) where the best rate",
        "lies inside, else the best one measured; edge, divergence: it lies there, and a better one may lie beyond.",
        f"loss: on validation text after {config['steps']} steps, in nats, mean of n = {seeds} fresh "
        f"seed{'s' * (seeds > 1)}, {intervals}.",
        f"difference: minus {summary['baseline']}, paired over seeds; p: two-sided, not corrected for several recipes.",
        _target_note(summary),
        "time: wall time of training in processes of one thread, evaluations not counted.",
        "without a loss: runs of the tuning, and of the final ones, that diverged or failed (killed twice; to run one",
        "again, delete its line in results.jsonl of tuning/ or final/).",
    ]
    if not summary["finished"]:
        lines.append("UNFINISHED: the table is of the runs that have finished; the same command goes on from there.")
    return lines


def _target_note(summary: Mapping[str, Any]) -> str:
    baseline, target = summary["baseline"], summary["target"]
    if target is None:
        return f"steps, time: not known, for {baseline} has no final loss; --target gives one."
    entry = next(entry for entry in summary["recipes"] if entry["name"] == baseline)
    why = "" if summary["target_asked"] else ", its mean final loss"
    if entry["steps_to_target"] is None:
        return f"steps, time: no ratios, for {baseline} does not reach loss {target:.4f}."
    return f"steps, time: until the mean over seeds is at loss {target:.4f}, over those of {baseline}{why}."


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
    table = Table("Who is ahead", *cells(summary), notes(summary))
    details = {"Configuration": charts.flat(config), "Machine and versions": summary["environment"]}
    kind = f"comparison of {len(entries)} with equal tuning, width {config['width']}, {config['steps']} steps"
    state = "finished" if summary["finished"] else "under way"
    drawn = [chart for chart in (_curves(summary), _seeds(entries), _tuning(entries)) if chart.columns["loss"]]
    return Page(directory.name, kind, state, _facts(summary), drawn, [table], details)


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


def _curves(summary: Mapping[str, Any]) -> Chart:
    settings, keys = summary["config"]["settings"], ("step", "val_loss", "lowest", "highest")
    rows = [
        (entry["name"], *point)
        for entry in summary["recipes"]
        if entry["curve"]
        for point in zip(*(entry["curve"][key] for key in keys), strict=True)
    ]
    sized = settings.keys() >= {"batch_size", "context"}
    x = charts.steps(f" (of {settings['batch_size'] * settings['context']} tokens)" if sized else "")
    layers = [charts.rows().mark_area(opacity=0.2, clip=True, aria=False).encode(x, alt.Y("low:Q"), alt.Y2("high:Q"))]
    if summary["target"] is not None:
        target = charts.rows().mark_rule(strokeDash=[2, 3], aria=False)
        layers.append(target.encode(y=alt.Y(datum=summary["target"]), color=alt.value("var(--soft)")))
    chart = _chart(
        "Loss over steps",
        "Validation loss on the way, the mean over seeds.",
        charts.columns(("recipe", "step", "loss", "low", "high"), rows, 6),
        x,
        {entry["name"]: _label(entry, summary["baseline"]) for entry in summary["recipes"]},
        layers,
    )
    axes = {"y": charts.scales("linear", domain=_span(rows))}
    return replace(chart, axes=axes, file="compare.png")


def _label(entry: Mapping[str, Any], baseline: str) -> str:
    """What the legend says of a recipe: its rate where that was tuned, and its loss."""
    if not entry["curve"]:
        return str(entry["name"])
    rate = "" if entry["settings"] == "published" else f", lr {entry['lr']:.3g}"
    return f"{entry['name']}{rate}: {'baseline' if entry['name'] == baseline else format(entry['val_loss'], '.3f')}"


def _span(rows: Sequence[tuple[Any, ...]]) -> list[float]:
    """What the loss axis spans."""
    last = max((row[1] for row in rows), default=0)
    late = [loss for row in rows if row[1] >= FRAME * last for loss in row[3:] if loss is not None]
    if not late:
        return []
    room = 0.05 * (max(late) - min(late)) or 0.1
    return [min(late) - room, max(late) + room]


def _seeds(entries: Sequence[Mapping[str, Any]]) -> Chart:
    rows = [
        (entry["name"], seed, loss)
        for entry in entries
        for seed, loss in entry["val_loss_by_seed"].items()
        if loss is not None
    ]
    what = "The final loss of each fresh seed; the same seed is the same batches for all, so compare along a column."
    x = alt.X("seed:O", title="seed", axis=alt.Axis(labelAngle=0))
    return _chart("Final loss by seed", what, charts.columns(("recipe", "seed", "loss"), rows, 6), x, _names(entries))


def _tuning(entries: Sequence[Mapping[str, Any]]) -> Chart:
    rows = [
        (entry["name"], 2 ** point["log2_lr"], point["val_loss"])
        for entry in entries
        for point in entry["tuning"]
        if point["val_loss"] is not None
    ]
    what = "What each recipe was tuned with, as many rates for all; the best has neighbours on both sides."
    columns, x = charts.columns(("recipe", "lr", "loss"), rows, 6), alt.X("lr:Q", title="learning rate")
    chart = _chart("Tuning", what, columns, x, _names(entries))
    return replace(chart, axes={**chart.axes, "x": charts.scales(rates=columns["lr"], padding=12)})


def _names(entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    return {entry["name"]: entry["name"] for entry in entries}


def _chart(
    title: str, what: str, columns: Mapping[str, list[Any]], x: alt.X, labels: Mapping[str, str],
    below: Sequence[alt.Chart] = (),
) -> Chart:  # fmt: skip
    """Loss by recipe, against the second column: points, on lines unless that is the seed."""
    other = [*columns][1]
    color, shape = charts.series("recipe", "recipe", labels, labels)
    y = alt.Y("loss:Q", title="validation loss (nats)")
    seen = {"lr": "learning rate|.3g", "step": "step|d", "seed": "seed"}[other]
    shown = charts.tooltip(**{"recipe": "recipe", other: seen, "loss": "loss|.4f"})
    lines = [] if other == "seed" else [charts.rows().mark_line(strokeWidth=2, clip=True).encode(x, y)]
    points = charts.rows().mark_point(filled=True, size=60, clip=True).encode(x, y, shape, tooltip=shown)
    spec = charts.spec(*below, *lines, points, color=color)
    return Chart(title, what, spec, columns, axes={"y": charts.scales("linear")})
