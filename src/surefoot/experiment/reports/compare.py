"""A comparison as a table and as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from surefoot.experiment.reports.style import GREY, INK, aligned, frame, plus_minus
from surefoot.experiment.sweep import fit

PICTURE = "compare.png"
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


def figure(summary: Mapping[str, Any], directory: Path) -> Path | None:
    """Draw `compare.png`: validation loss over steps, a line per recipe (mean over seeds) with a band over seeds.

    The baseline is black, the target a dotted line.

    Args:
        summary: the content of `summary.json`.
        directory: where the picture is written.

    Returns:
        The picture's path; None where no final run has finished without diverging.
    """
    drawn = [entry for entry in summary["recipes"] if entry["curve"]]
    if not drawn:
        return None
    drawing = Figure(figsize=(7.2, 4.2), layout="constrained", dpi=200)
    panel = drawing.subplots()
    others = iter(range(len(drawn)))
    for entry in drawn:
        is_baseline = entry["name"] == summary["baseline"]
        colour = INK if is_baseline else colormaps["tab10"](next(others) % 10)
        _curve(panel, entry, colour, "baseline" if is_baseline else f"{entry['val_loss']:.3f}")
    if summary["target"] is not None:
        panel.axhline(summary["target"], linestyle=":", color=GREY, linewidth=1.0, zorder=1)
    panel.set_ylim(*_span(drawn))
    panel.set_xlabel(f"step (of {_tokens(summary['config'])} tokens)", fontsize=10, color=INK)
    panel.set_ylabel("validation loss (nats)", fontsize=10, color=INK)
    panel.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    frame(panel, ticks=GREY)
    drawing.legend(loc="outside right center", frameon=False, fontsize=9)
    path = directory / PICTURE
    drawing.savefig(path)
    return path


def _curve(panel: Axes, entry: Mapping[str, Any], colour: Any, note: str) -> None:
    columns = zip(*(entry["curve"][key] for key in ("step", "val_loss", "lowest", "highest")), strict=True)
    steps, means, lowest, highest = zip(*(c for c in columns if c[1] is not None), strict=True)
    rate = "" if entry["settings"] == "published" else f", lr {entry['lr']:.3g}"
    label = f"{entry['name']}{rate}\n{note}"
    panel.plot(steps, means, "-", color=colour, linewidth=1.6, label=label, zorder=3)
    panel.fill_between(steps, lowest, highest, color=colour, alpha=0.2, linewidth=0, zorder=2)


def _span(entries: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    late = [
        loss
        for curve in (entry["curve"] for entry in entries)
        for key in ("lowest", "highest")
        for step, loss in zip(curve["step"], curve[key], strict=True)
        if loss is not None and step >= FRAME * curve["step"][-1]
    ]
    room = 0.05 * (max(late) - min(late)) or 0.1
    return min(late) - room, max(late) + room


def _tokens(config: Mapping[str, Any]) -> int:
    return config["settings"]["batch_size"] * config["settings"]["context"]  # type: ignore[no-any-return]
