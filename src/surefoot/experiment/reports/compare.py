"""A comparison as a table and as a page: who is ahead, by how much, and how sure that is."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import altair as alt

from surefoot.experiment.reports import charts
from surefoot.experiment.reports.page import Chart, Fact, Page, Table
from surefoot.experiment.reports.style import TRAINING, estimate, training
from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.compare import load

FRAME = 1 / 3  # the loss axis spans the losses after this part of the steps: before, all curves fall alike


def table(summary: Mapping[str, Any]) -> Table:
    """Tabulate settings, rate, loss, difference, steps and time of all participants.

    Args:
        summary: the content of `summary.json`.

    Returns:
        The table; its notes say what the columns mean.

    >>> entry = {"name": "muon@0.02", "settings": "published", "tuning_runs": 0, "tuning_diverged": 0,
    ...          "tuning_status": None, "rate_from": "published", "log2_lr": -5.64, "lr": 0.02, "seeds": 1,
    ...          "final_runs": 1, "diverged": 0, "val_loss": 2.1, "val_loss_ci": None, "train_loss": 2.0,
    ...          "difference": None, "difference_ci": None, "p": None, "curve": {}, "steps_to_target": 60.0,
    ...          "steps_ratio": 1.0, "seconds_ratio": 1.0}
    >>> config = {"seeds": 1, "steps": 60, "rates_per_recipe": 7, "tuning_seeds": 1}
    >>> asked = {"baseline": "muon@0.02", "target": None, "finished": True}
    >>> print(str(table({"recipes": [entry], "config": config, **asked})).splitlines()[2][:70])
    | muon@0.02 | published, 0 runs | 2^-5.64 (0.02), published | 2.1000 |
    """
    head = ["recipe", "settings", "best lr", "loss", TRAINING, "difference", "p", "steps", "time", "without a loss"]
    rows = [_row(entry, summary["baseline"]) for entry in summary["recipes"]]
    return Table("Who is ahead", head, rows, _notes(summary))


def _row(entry: Mapping[str, Any], baseline: str) -> list[str]:
    tuning, final, status = _lost(entry, "tuning_"), _lost(entry), entry["tuning_status"]
    rate = "tuning is unfinished" if status == "unfinished" else f"none: {' or '.join(tuning)} at every rate"
    if entry["lr"] is not None:
        source = entry["rate_from"] if entry["rate_from"] != "measured" else f"measured, {status}"
        rate = f"2^{entry['log2_lr']:.2f} ({entry['lr']:.3g}), {source}"
    reached = entry["curve"] is None or entry["steps_to_target"] is not None
    no_ratio = " or ".join(final) or ("not known" if reached else "not reached")
    return [
        entry["name"],
        f"{entry['settings']}, {entry['tuning_runs']} runs",
        rate,
        estimate(entry["val_loss"], entry["val_loss_ci"], ".4f", " or ".join(final) or "none"),
        training(entry["train_loss"], entry["val_loss"]),
        "baseline" if entry["name"] == baseline else estimate(entry["difference"], entry["difference_ci"], "+.4f"),
        estimate(entry["p"], None, ".2g", ""),
        *(estimate(entry[key], None, ".2f", no_ratio) for key in ("steps_ratio", "seconds_ratio")),
        f"{sum(tuning.values())} of {entry['tuning_runs']}, {sum(final.values())} of {entry['final_runs']}",
    ]


def _lost(entry: Mapping[str, Any], stage: str = "") -> dict[str, int]:
    """Runs of a stage that ended without a loss, by why; summaries of earlier versions count them all as diverged."""
    counts = {why: entry.get(f"{stage}{why}", 0) for why in ("diverged", "failed")}
    return {why: count for why, count in counts.items() if count}


def _notes(summary: Mapping[str, Any]) -> list[str]:
    config, n, baseline, target = summary["config"], summary["config"]["seeds"], summary["baseline"], summary["target"]
    tuned = f"{config['rates_per_recipe']} rates x {config['tuning_seeds']} seed{'s' * (config['tuning_seeds'] > 1)}"
    intervals = "± half a 95 % t interval" if n >= fit.SEEDS_FOR_AN_INTERVAL else "no intervals (they need three)"
    until = f"not known, for {baseline} has no final loss; --target gives one."
    if target is not None:
        why = "" if summary["target_asked"] else ", its mean final loss"
        until = f"until the mean over seeds is at loss {target:.4f}, over those of {baseline}{why}."
        if not any(entry["name"] == baseline and entry["steps_to_target"] is not None for entry in summary["recipes"]):
            until = f"no ratios, for {baseline} does not reach loss {target:.4f}."
    going = "UNFINISHED: the table is of the runs that have finished; the same command goes on from there."
    return [
        f"tuned: {tuned} for each recipe. best lr: the vertex of a parabola in log2 lr (fitted) where the best rate",
        "lies inside, else the best one measured; edge, divergence: it lies there, and a better one may lie beyond.",
        f"loss: on validation text after {config['steps']} steps, in nats, mean of n = {n} fresh "
        f"seed{'s' * (n > 1)}, {intervals}.",
        "training: mean loss of the last tenth of the steps, in brackets the validation loss minus it.",
        f"difference: minus {baseline}, paired over seeds; p: two-sided, not corrected for several recipes.",
        f"steps, time: {until}",
        "time: wall time of training in processes of one thread, evaluations not counted.",
        "without a loss: runs of the tuning, and of the final ones, that diverged or failed (killed twice; to run one",
        "again, delete its line and those below it in results.jsonl; if that is of tuning/, the folder final/, too).",
        *([] if summary["finished"] else [going]),
    ]


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
    details = {"Configuration": charts.flat(config), "Machine and versions": summary["environment"]}
    kind = f"comparison of {len(entries)} with equal tuning, width {config['width']}, {config['steps']} steps"
    state = "finished" if summary["finished"] else "under way"
    drawn = [chart for chart in (_curves(summary), *_by_recipe(entries)) if chart.columns["loss"]]
    return Page(directory.name, kind, state, _facts(summary), drawn, [table(summary)], details)


def _facts(summary: Mapping[str, Any]) -> list[Fact]:
    measured = [entry for entry in summary["recipes"] if entry["val_loss"] is not None]
    if not measured:
        return [Fact("Lowest loss", "none yet", "no final run has finished without diverging")]
    best, baseline = min(measured, key=lambda entry: float(entry["val_loss"])), summary["baseline"]
    at = f"at lr {best['lr']:.3g}, {best['settings']}, n = {best['final_runs']} fresh seeds"
    loss = estimate(best["val_loss"], best["val_loss_ci"], ".4f")
    facts = [Fact("Lowest loss", best["name"], f"{loss} nats {at}")]
    if best["name"] != baseline and best["difference"] is not None:
        p = "" if best["p"] is None else f"p = {best['p']:.2g}, two-sided, "
        value = estimate(best["difference"], best["difference_ci"], "+.4f")
        facts.append(Fact(f"Minus {baseline}", f"{value} nats", f"{p}paired over seeds"))
    if best["steps_ratio"] is not None:
        time = "" if best["seconds_ratio"] is None else f"; {best['seconds_ratio']:.2f} of its time"
        steps, note = f"{best['steps_ratio']:.2f} of them", f"to loss {summary['target']:.4f}{time}"
        facts.append(Fact(f"Steps that {baseline} takes", steps, note))
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
    labels = {entry["name"]: _label(entry, summary["baseline"]) for entry in summary["recipes"]}
    what, names = "Validation loss on the way, the mean over seeds.", ("recipe", "step", "loss", "low", "high")
    axes = {"y": charts.scales("linear", domain=_span(rows))}
    return _chart("Loss over steps", what, names, rows, x, labels, layers, axes, "compare.png")


def _label(entry: Mapping[str, Any], baseline: str) -> str:
    """What the legend says of a recipe: its rate where that was tuned, and its loss."""
    if not entry["curve"]:
        return str(entry["name"])
    rate = "" if entry["settings"] == "published" else f", lr {entry['lr']:.3g}"
    return f"{entry['name']}{rate}: {'baseline' if entry['name'] == baseline else format(entry['val_loss'], '.3f')}"


def _span(rows: Sequence[tuple[Any, ...]]) -> list[float]:
    """The range of the loss axis."""
    last = max((row[1] for row in rows), default=0)
    late = [loss for row in rows if row[1] >= FRAME * last for loss in row[3:] if loss is not None]
    if not late:
        return []
    room = 0.05 * (max(late) - min(late)) or 0.1
    return [min(late) - room, max(late) + room]


def _by_recipe(entries: Sequence[Mapping[str, Any]]) -> tuple[Chart, Chart]:
    """The losses of the final runs by seed, and those of the tuning by rate."""
    labels = {entry["name"]: entry["name"] for entry in entries}
    what = "The final loss of each fresh seed; the same seed is the same batches for all, so compare along a column."
    rows = [(entry["name"], *each) for entry in entries for each in entry["val_loss_by_seed"].items()]
    x = alt.X("seed:O", title="seed", axis=alt.Axis(labelAngle=0))
    seeds = _chart("Final loss by seed", what, ("recipe", "seed", "loss"), rows, x, labels)
    what = "What each recipe was tuned with, as many rates for all; the best has neighbours on both sides."
    runs = [(entry["name"], run["log2_lr"], run["val_loss"]) for entry in entries for run in entry["tuning"]]
    rows = [(name, 2**rate, loss) for name, rate, loss in runs if loss is not None]
    axes = {"x": charts.scales(rates=[row[1] for row in rows], padding=12)}
    x = alt.X("lr:Q", title="learning rate")
    return seeds, _chart("Tuning", what, ("recipe", "lr", "loss"), rows, x, labels, axes=axes)


def _chart(
    title: str, what: str, names: Sequence[str], rows: Sequence[tuple[Any, ...]], x: alt.X, labels: Mapping[str, str],
    below: Sequence[alt.Chart] = (), axes: Mapping[str, Mapping[str, Any]] = MappingProxyType({}), file: str = "",
) -> Chart:  # fmt: skip
    """Loss by recipe, against the second column: points, on lines unless that is the seed."""
    color, shape = charts.series("recipe", "recipe", labels, labels)
    y = alt.Y("loss:Q", title="validation loss (nats)")
    other = {"lr": "lr=learning rate|.3g", "step": "step|d", "seed": "seed"}[names[1]]
    shown = charts.tooltip("recipe", other, "loss|.4f")
    lines = [] if names[1] == "seed" else [charts.rows().mark_line(strokeWidth=2, clip=True).encode(x, y)]
    points = charts.rows().mark_point(filled=True, size=60, clip=True).encode(x, y, shape, tooltip=shown)
    spec, columns = charts.spec(*below, *lines, points, color=color), charts.columns(names, rows, 6)
    return Chart(title, what, spec, columns, axes={"y": charts.scales("linear"), **axes}, file=file)
