"""A sweep as a table and as a page: the rate to use, its interval, and what missing it costs."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.experiment.files import Record
from surefoot.experiment.reports import charts
from surefoot.experiment.reports.loss_curves import curves, measured_within, missed, optima
from surefoot.experiment.reports.page import Fact, Page, Table
from surefoot.experiment.reports.style import TRAINING, estimate, plus_minus, span, training
from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.summary import points
from surefoot.experiment.sweep.sweep import SUMMARY, load
from surefoot.experiment.training.config import TrainConfig

Entry = Mapping[str, Any]
Columns = Mapping[str, Callable[[Entry], str]]

UNFINISHED = "UNFINISHED: a best rate is of a sweep that has finished; the same command goes on from there."
_FACTORS = {-1.0: "half", 1.0: "twice"}
"""Words for a rate so many octaves beside the best one."""


def table(summary: Mapping[str, Any], decimal: bool = False) -> Table:
    """Tabulate the optima, drift, regret and best loss of each recipe.

    Args:
        summary: the content of `summary.json`.
        decimal: as `optimum`.

    Returns:
        The table, with notes.

    >>> entry = {"recipe": "muon", "widths": [32, 64], "best_log2_lr": [-4.0, -4.5],
    ...          "best_log2_lr_ci": [None, None], "best_loss": [2.1, 2.0], "status": ["interior"] * 2,
    ...          "drift_octaves": -0.5, "drift_octaves_ci": None, "regret_nats": 0.01,
    ...          "regret_nats_ci": None, "regret_diverged": False, "seeds": 1, "train_loss": [2.0, 1.9]}
    >>> print(str(table({"recipes": [entry]})).splitlines()[2][-36:])
    | 2.000           | 1.900 (+0.100) |
    """
    widths = summary["recipes"][0]["widths"]
    columns = {"drift in octaves": drift, f"regret at {widths[-1]}": _regret} if len(widths) > 1 else {}
    notes = [
        "best lr: vertex of a parabola in log2 lr. drift: widest minus narrowest. regret: loss in nats of",
        "the narrowest optimum run at the widest model, minus the best measured there. training: mean of the last",
        "tenth of the steps at the best rate (and the validation loss minus it).",
        *seeds_and_edges(summary["recipes"]),
        *[UNFINISHED] * (not summary.get("finished", True)),
    ]
    return recipes(summary["recipes"], [*map(str, widths)], columns, notes, decimal)


def recipes(
    entries: Sequence[Entry], places: Sequence[str], columns: Columns, notes: Sequence[str], decimal: bool
) -> Table:
    """Tabulate the best rate of each recipe at each place, and its best loss at the last.

    Args:
        entries: the summary's, of the recipes.
        places: the widths, or the values of another axis.
        columns: between these: title -> the cell of an entry.
        notes: below.
        decimal: as `optimum`.

    Returns:
        The table.
    """
    losses = [f"best loss at {places[-1]}", TRAINING]  # one below the other where rates have two lines
    head = ["recipe", *(f"best lr at {place}" for place in places), *columns]
    head += losses[:1] if decimal else losses
    rows = []
    for entry in entries:
        optima = zip(entry["best_log2_lr"], entry["best_log2_lr_ci"], entry["status"], strict=True)
        cells = [*(optimum(*one, decimal) for one in optima), *(cell(entry) for cell in columns.values())]
        best, trained = entry["best_loss"][-1], (entry.get("train_loss") or [None])[-1]  # earlier versions lack it
        values = [estimate(best, None, ".3f", "none"), training(trained, best)]
        last = ["\ntraining ".join(values).replace(" (", "\n(")] if decimal else values
        rows.append([entry["recipe"], *cells, *last])
    return Table("Recipes", head, rows, notes)


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
    return "\n".join(
        f"{entry['recipe']}: lr = {2**rate:.3g} at width {entry['widths'][-1]}" + (f" ({span(ci)})" if ci else "")
        for entry in summary["recipes"]
        for rate, ci in [(entry["best_log2_lr"][-1], entry["best_log2_lr_ci"][-1])]
        if rate is not None
    )


def optimum(log2_lr: float | None, ci: Sequence[float] | None, status: str, decimal: bool = False) -> str:
    """Format a best rate, or why there is none.

    Args:
        log2_lr: log2 of it; None if there is none.
        ci: its interval.
        status: why there is none.
        decimal: whether the rate itself stands above the power of two.

    Returns:
        The cell.

    >>> optimum(-3.0, (-3.1, -2.9), "interior"), optimum(None, None, "low edge", True)
    ('2^-3.00 ± 0.10', 'low edge')
    """
    above = f"{2**log2_lr:.3g}\n" if decimal and log2_lr is not None else ""
    return status if log2_lr is None else f"{above}2^{log2_lr:.2f}{plus_minus(ci, 2)}"


def drift(entry: Entry) -> str:
    """Format how far a recipe's best rate moves."""
    octaves = entry["drift_octaves"]
    times = "" if octaves is None else f" (x {2**octaves:.2f})"
    return estimate(octaves, entry["drift_octaves_ci"], "+.2f") + times


def _regret(entry: Entry) -> str:
    none = "diverged" if entry["regret_diverged"] else "not known"
    return estimate(entry["regret_nats"], entry["regret_nats_ci"], ".3f", none)


def seeds_and_edges(entries: Sequence[Mapping[str, Any]], text: str = "width {}") -> list[str]:
    """Notes on what the intervals rest on, and what is no optimum.

    Args:
        entries: of the recipes.
        text: of a width, or of a value of another axis.

    Returns:
        The lines.
    """
    n = max(entry["seeds"] for entry in entries)  # while runs go on a recipe may have fewer
    few, intervals = f"{'s' * (n != 1)}: no intervals (they need three)", "s, ± half a 95 % interval, paired over seeds"
    lines = [f"n = {n} seed{few if n < fit.SEEDS_FOR_AN_INTERVAL else intervals}."]
    if any(status.endswith(("edge", "divergence")) for entry in entries for status in entry["status"]):
        lines.append("edge, divergence: the best rate measured lies there, so no optimum is claimed.")
    failed = [
        f"{entry['recipe']} {count} at {text.format(width)}"
        for entry in entries
        for width, count in zip(entry["widths"], entry.get("failed", ()), strict=False)  # earlier versions lack the key
        if count
    ]
    again = "killed twice, counted as diverged; to run one again, delete its line and those below it in results.jsonl."
    return [*lines, f"failed: {', '.join(failed)}; {again}"] if failed else lines


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
    config = {**summary["config"].get("settings", {}), **summary["config"]}
    model = f"{config['model']}, " if "model" in config else ""
    batch = " of {batch_size} x {context} tokens".format(**config) if config.keys() >= {"batch_size", "context"} else ""
    kind = f"learning-rate transfer over width: {model}{config['steps']} steps{batch}"
    state = f"{'finished' if (directory / SUMMARY).exists() else 'under way'}: {len(records)} runs"
    details = {"Configuration": charts.flat(summary["config"]), "Machine and versions": summary["environment"]}
    drawn = curves(summary, records)
    if drawn and len(config["widths"]) > 1:
        drawn.append(optima(summary))
    tables = [_recipes(summary, records), runs(records)]
    return Page(directory.name, kind, state, _facts(summary, records), drawn, tables, details)


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
        between = f"from width {best['widths'][0]} to {width}, in octaves (factors of two)"
        facts.append(Fact(f"The best rate of {name} moves by", drift(best), between))
    return facts


def whose(name: str) -> str:
    """Name a recipe, and say so if it is the default."""
    return f"{name}, Surefoot's default recipe," if name == TrainConfig.method else name


def missing_it(best: Entry, records: Sequence[Record], at: str = "") -> Fact:
    """Say what half and twice the best rate at the widest model cost, or as far as was measured.

    Args:
        best: the summary's entry of a recipe that has a best rate there.
        records: the finished runs.
        at: where that is, if it needs to be said.

    Returns:
        The fact.
    """
    missing = _missed(best, records)
    costs = "\n".join(f"{cost} at {factor}" for factor, cost in missing)
    note = f"nats of validation loss{at}"
    for (factor, _), end in zip(missing, ("lowest", "highest"), strict=True):
        note += f"; {factor} was the {end} rate tried" if factor not in _FACTORS.values() else ""
    return Fact("Missing it by a factor of two costs", costs, note)


def interval(ends: Sequence[float] | None, seeds: int, has: str = "this sweep has", but: str = "") -> Fact:
    """Say where the rate to use lies, or that it needs more seeds; `but` is what the interval does not contain."""
    value, note = "not measured", f"it needs three seeds and {has} {seeds}: --seeds 3, in another directory"
    if ends is not None:
        value, note = span(ends), f"over {seeds} seeds{but}"
    return Fact("Its 95 % interval", value, note)


def _missed(entry: Entry, records: Sequence[Record]) -> list[tuple[str, str]]:
    """Half and twice the best rate at the widest model, or as far as was measured, and what each costs."""
    if (rate := entry["best_log2_lr"][-1]) is None:
        return []
    measured, found = points(records, entry["recipe"], entry["widths"][-1]), []
    for end in _FACTORS:
        other = measured_within(measured, rate, end)
        octaves, cost = round(other - rate, 6), missed(measured, other)
        costs = estimate(cost.value, cost.interval, "+.3f", "not measured") if cost.value != math.inf else "divergence"
        found.append((_FACTORS.get(octaves, f"{2**octaves:.2g} times"), costs))
    return found


def _recipes(summary: Mapping[str, Any], records: Sequence[Record]) -> Table:
    found = table(summary, decimal=True)
    costs = ["\n".join(f"{factor}: {cost}" for factor, cost in _missed(entry, records)) for entry in summary["recipes"]]
    note = (
        "best loss: the lowest mean that was measured. missing it: the loss at half and at twice the best rate, or as "
        "far as was measured, on the line between two rates, minus the lowest."
    )
    rows = [[*row, cost] for row, cost in zip(found.rows, costs, strict=True)]
    return Table("Recipes", [*found.head, "missing it by two"], rows, [*found.notes, note])


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
