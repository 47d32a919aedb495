"""A sweep as a table and as a page: the rate to use, its interval, and what missing it costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from surefoot.experiment.files import Record
from surefoot.experiment.reports import charts
from surefoot.experiment.reports.loss_curves import curves, measured_within, missed, optima, shared_axes
from surefoot.experiment.reports.page import Fact, Page, Table
from surefoot.experiment.reports.style import aligned, lr, plus_minus
from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.summary import points
from surefoot.experiment.sweep.sweep import SUMMARY, load
from surefoot.experiment.training.config import Optimisation

Entry = Mapping[str, Any]


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


def page(directory: Path) -> Page:
    """Describe a sweep, finished or not.

    Args:
        directory: of `surefoot transfer`.

    Returns:
        The page.

    Raises:
        FileNotFoundError: no sweep was started there.
        ValueError: its files are damaged.
    """
    summary, records = load(directory)
    state = f"finished: {len(records)} runs" if (directory / SUMMARY).exists() else f"under way: {len(records)} runs"
    details = {"Configuration": charts.flat(summary["config"]), "Machine and versions": summary["environment"]}
    tables, kind = [_recipes(summary, records), runs(records)], f"learning-rate transfer over width{_size(summary)}"
    drawn = []
    if axes := shared_axes(summary, records):
        drawn = [curves(summary, records, axes), *([optima(summary)] if len(summary["config"]["widths"]) > 1 else [])]
    return Page(directory.name, kind, state, _facts(summary, records), drawn, tables, details)


def _size(summary: Mapping[str, Any]) -> str:
    config = {**summary["config"].get("settings", {}), **summary["config"]}
    model, steps = config.get("model"), f"{config['steps']} steps"
    batch = " of {batch_size} x {context} tokens".format(**config) if config.keys() >= {"batch_size", "context"} else ""
    return f": {model}, {steps}{batch}" if model else f": {steps}{batch}"


def _facts(summary: Mapping[str, Any], records: Sequence[Record]) -> list[Fact]:
    """Say first what to do: the rate of the recipe whose loss at the widest model is the lowest."""
    if not (found := [entry for entry in summary["recipes"] if entry["best_log2_lr"][-1] is not None]):
        return [Fact("Rate to use", "none yet", "no recipe's best rate lies inside the rates that were measured")]
    best = min(found, key=lambda entry: float(entry["best_loss"][-1]))
    name, width, rate = best["recipe"], best["widths"][-1], best["best_log2_lr"][-1]
    others = f", which has the lowest loss of {len(found)} recipes" if len(found) > 1 else ""
    longer = f"; longer runs than these of {summary['config']['steps']} steps want less"
    facts = [
        Fact("Rate to use", f"{2**rate:.3g}", f"2^{rate:.2f}, for {whose(name)} at width {width}{others}{longer}"),
        interval(best["best_log2_lr_ci"][-1], best["seeds"]),
        missing_it(best, records),
    ]
    if len(best["widths"]) > 1:
        span = f"from width {best['widths'][0]} to {width}, in octaves (factors of two)"
        facts.append(Fact(f"The best rate of {name} moves by", drift(best), span))
    return facts


def whose(name: str) -> str:
    """Name a recipe, and say so if it is the default."""
    return f"{name}, Surefoot's default recipe," if name == Optimisation.method else name


def missing_it(best: Entry, records: Sequence[Record], at: str = "") -> Fact:
    """Say what half and twice the best rate at the widest model cost, or as far as was measured.

    Args:
        best: the summary's entry of a recipe that has a best rate there.
        records: the finished runs.
        at: where that is, if the reader does not expect it there.

    Returns:
        The fact.
    """
    missing = _missed(best, records)
    costs = "\n".join(f"{cost} at {factor}" for factor, cost in missing)
    ends = [
        f"; {factor} was the {end} rate tried" for (factor, _), end in zip(missing, ("lowest", "highest"), strict=True)
    ]
    short = "".join(end for end in ends if not end.startswith(("; half", "; twice")))
    return Fact("Missing it by a factor of two costs", costs, f"nats of validation loss{at}{short}")


def interval(ends: Sequence[float] | None, seeds: int, has: str = "this sweep has", but: str = "") -> Fact:
    """Say where the rate to use lies, or that it needs more seeds; `but` is what the interval does not contain."""
    if ends is None:
        note = f"it needs three seeds and {has} {seeds}: --seeds 3, in another directory"
        return Fact("Its 95 % interval", "not measured", note)
    low, high = map(lr, ends)
    return Fact("Its 95 % interval", f"{low:.3g} to {high:.3g}", f"over {seeds} seeds{but}")


def _missed(entry: Entry, records: Sequence[Record]) -> list[tuple[str, str]]:
    """Half and twice the best rate at the widest model, or as far as was measured, and what each costs."""
    if (rate := entry["best_log2_lr"][-1]) is None:
        return []
    measured = points(records, entry["recipe"], entry["widths"][-1])
    rates = [measured_within(measured, rate, octaves) for octaves in (-1.0, 1.0)]
    return [(_factor(other - rate), _cost(missed(measured, other))) for other in rates]


def _factor(octaves: float) -> str:
    return {-1.0: "half", 1.0: "twice"}.get(round(octaves, 6), f"{2**octaves:.2g} times")


def _cost(cost: fit.Estimate) -> str:
    if cost.value is None:
        return "not measured"
    return "divergence" if cost.value == math.inf else f"+{cost.value:.3f}{plus_minus(cost.interval, 3)}"


def _recipes(summary: Mapping[str, Any], records: Sequence[Record]) -> Table:
    head, rows = cells(summary)
    costs = ["\n".join(f"{factor}: {cost}" for factor, cost in _missed(entry, records)) for entry in summary["recipes"]]
    below = [
        *notes(summary),
        "best loss: the lowest mean that was measured. missing it: the loss at half and at twice the best rate, or as "
        "far as was measured, on the line between two rates, minus the lowest.",
    ]
    both = [[*row, cost] for row, cost in zip(rates_first(rows, summary["recipes"]), costs, strict=True)]
    return Table("Recipes", [*head, "missing it by two"], both, below)


def rates_first(rows: Sequence[Sequence[str]], entries: Sequence[Entry]) -> list[list[str]]:
    """Write each best rate itself above the power of two that a table of recipes gives it as.

    Args:
        rows: of the table: a recipe's name, its best rate at each width, and other cells.
        entries: the summary's, of the same recipes.

    Returns:
        The rows.

    >>> rates_first([["muon", "2^-3.00 ± 0.09", "low edge"]], [{"best_log2_lr": [-3.0, None]}])
    [['muon', '0.125\\n2^-3.00 ± 0.09', 'low edge']]
    """
    rates = [["", *("" if x is None else f"{2**x:.3g}\n" for x in entry["best_log2_lr"])] for entry in entries]
    return [[rate + cell for rate, cell in zip_longest(*both, fillvalue="")] for both in zip(rates, rows, strict=True)]


def runs(records: Sequence[Record], of: str = "width") -> Table:
    """List every run.

    Args:
        records: of the runs.
        of: what their width is called.

    Returns:
        The table.
    """
    head = ["recipe", of, "lr", "seed", "steps", "validation loss", "training loss", "seconds", "state"]
    rows = [
        [
            r["recipe"], str(r["width"]), f"{2 ** r['log2_lr']:.3g} (2^{r['log2_lr']:.3f})", str(r["seed"]),
            str(r["steps"]), *("" if r[loss] is None else f"{r[loss]:.4f}" for loss in ("val_loss", "train_loss")),
            f"{r['seconds']:.1f}", str(r.get("failed") or ("diverged" if r["diverged"] else "finished")),
        ]
        for r in records
    ]  # fmt: skip
    return Table("Every run", head, rows)
