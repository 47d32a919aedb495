"""The tables of docs/transfer.md about recipes that are searched at the length at which they are compared."""

import numpy as np

from confirm.tables import at_widths
from lengths import gpu, screen
from lengths.run import FINALS, HELD, LAW, RECIPES, RUNS, SEED, SIDES, WIDE, WIDE_STEPS, fitted, loss_of, records
from surefoot import Run
from surefoot.experiment.reports.style import markdown, plus_minus
from surefoot.experiment.sweep import fit


def table() -> str:
    """Every finished search at width 32, then the fresh seeds that there are at other sizes."""
    return "\n\n".join([*map(_searches, (481, 1926)), *(_finals(*each) for each in FINALS if records("steady", *each))])


def _searches(steps: int) -> str:
    """The lowest run of each search that is finished."""
    rows = []
    for recipe in RECIPES:
        done = [r for r in records(recipe, 32, steps) if r["seed"] == SEED]
        if len(done) == RUNS:
            first = min(done, key=loss_of)
            numbers = [f"2^{first[name]:g}" for name in ("log2_lr", "second")]
            rows.append([recipe, str(RUNS), *numbers, *(f"{first[side]:.3f}" for side in SIDES)])
    rows.sort(key=lambda row: float(row[-2]) + float(row[-1]))
    head = ["recipe", "runs", "best rate", "E", "validation loss", "training loss"]
    return f"width 32, {steps:,} steps, the lowest of a search, one seed\n\n{markdown(head, rows)}"


def _finals(width: int, steps: int) -> str:
    """The means over fresh seeds at what the searches found, and what is above the default on the same seeds.

    The default is at the rate and decay of its law where that has as many seeds.
    """
    first = LAW if len(records(LAW, width, steps)) >= len(records("steady", width, steps)) else "steady"
    own, rows = {r["seed"]: r for r in records(first, width, steps)}, []
    for recipe in RECIPES:
        runs = {r["seed"]: r for r in sorted(records(recipe, width, steps), key=loss_of, reverse=True)}  # the lowest
        if not runs:
            continue
        points = {name: dict.fromkeys(f"2^{r[name]:g}" for r in runs.values()) for name in ("log2_lr", "second")}
        cells = [*map(", ".join, points.values()), str(len(runs))]
        cells += [f"{np.mean([r[side] for r in runs.values()]):.3f}" for side in SIDES]
        for side in SIDES:
            above = [runs[seed][side] - own[seed][side] for seed in own.keys() & runs.keys()]
            cells.append(f"{np.mean(above):+.3f}{plus_minus(fit.interval(above), 3)}" if recipe != first else "")
        rows.append([recipe, *cells])
    head = [
        "recipe",
        "rate",
        "E",
        "seeds",
        "validation loss",
        "training loss",
        f"above {first}",
        f"above {first}, training",
    ]
    return f"width {width}, {steps:,} steps, fresh seeds\n\n{markdown(head, rows)}"


def rule() -> str:
    """The runs around the law at the size held out, the lowest first."""
    (width, steps), point = HELD, fitted(LAW, HELD[1])
    done = sorted(records("steady", width, steps), key=loss_of)
    rows = [
        [
            *(f"2^{r[name]:g}" for name in ("log2_lr", "second")),
            *(f"{r[side]:.3f}" for side in SIDES),
            f"{loss_of(r) - loss_of(done[0]):.3f}",
            "of its length" if (r["log2_lr"], r["second"]) == point else "",
        ]
        for r in done
    ]
    return markdown(["rate", "E", "validation loss", "training loss", "mean of both above the lowest", ""], rows)


def widths() -> str:
    """The default's best rate at each width, by the mean of both losses."""
    runs = {width: records("steady", width, WIDE_STEPS) for width in sorted(WIDE)}
    points = {width: [fit.Point(r["log2_lr"], r["seed"], loss_of(r)) for r in own] for width, own in runs.items()}
    return at_widths({width: own for width, own in points.items() if own}, Run(WIDE_STEPS, 16 * 128))


TABLES = {
    "lengths_rule": rule,
    "lengths_widths": widths,
    "lengths_screen": screen.table,
    "lengths_gpu": gpu.curve,
    "lengths_gpu_changes": gpu.changes,
}
