"""The tables of docs/other-recipes.md and docs/stability.md about what the sources remark."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from confirm import run as confirm
from confirm.tables import cell, rate, slope
from sources import run as study
from sources.run import BOUNDED, PARTS, WION_RADIUS, Part
from surefoot.experiment.reports.style import markdown
from surefoot.experiment.sweep import fit, sweep

WIDTHS = (32, 64, 128, 256)


def default_on(part: Part) -> list[fit.Point]:
    """The default's own runs at the width, rates and seeds of a part."""
    points = confirm.curve("steady", part.width).points()
    return [point for point in points if point.seed in part.seeds and point.log2_lr in part.rates]


def bounded() -> str:
    """The default under a bound in units of the step's factor, in place of its decay and beside it."""
    rows = []
    parts = {recipe: {width: study.bounded(recipe, width) for width in WIDTHS} for recipe in BOUNDED}
    curves: dict[str, dict[int, list[fit.Point]]] = {
        "steady": {width: default_on(part) for width, part in parts[BOUNDED[1]].items()},
        **{name: {width: part.points() for width, part in own.items()} for name, own in parts.items()},
    }
    for name, own in curves.items():
        optima = {width: fit.optimum(points) for width, points in own.items()}
        rows.append([name, *map(rate, optima.values()), cell(slope(optima), 2), regret(own[32], own[256])])
    return markdown(["", *(f"best lr at {w}" for w in WIDTHS), "drift by the line", "regret at 256"], rows)


def regret(narrow: list[fit.Point], wide: list[fit.Point]) -> str:
    """What the narrow optimum costs at the wide model, at the measured rate nearest to it."""
    best = fit.optimum(narrow).log2_lr
    if best is None:
        return "not known"
    return cell(fit.regret(wide, min(fit.curve(wide), key=lambda one: abs(one - best))), 3, "")


def cost() -> str:
    """Loss minus the default's on the same seeds: each at its best rate, and both at the two rates next to the best."""
    rows = []
    for recipe in BOUNDED:
        for width in WIDTHS:
            part = study.bounded(recipe, width)
            ours, theirs = part.points(), default_on(part)
            at, against = fit.curve(ours), fit.curve(theirs)
            same = [cell(fit.difference(at[one] or {}, against[one] or {}), 3) for one in (-3.25, -3.0)]
            lowest = cell(fit.difference(fit.lowest(ours), fit.lowest(theirs)), 3)
            rows.append([recipe, str(width), str(len(part.seeds)), lowest, *same])
    return markdown(["", "width", "seeds", "at the best rates", "both at 2^-3.25", "both at 2^-3"], rows)


def hidden(name: str) -> str:
    """Hidden matrices alone under a rule of their own."""
    parts = PARTS[name]
    if not all(part.finished for part in parts):
        return "not run"
    optima: Mapping[int, fit.Optimum] = {part.width: fit.optimum(part.points()) for part in parts}
    row = [*map(rate, optima.values()), cell(fit.drift(optima[32], optima[128]), 2)]
    return markdown([*(f"best hidden lr at {w}" for w in optima), "drift over 4x"], [row])


def heads() -> str:
    """The default with heads of several sizes at one width."""
    parts = PARTS["heads"]
    if not all(part.finished for part in parts):
        return "not run"
    curves = {part.settings["head_dim"]: part.points() for part in parts}
    optima = {size: fit.optimum(points) for size, points in curves.items()}
    cells = [*map(rate, optima.values()), cell(fit.drift(optima[8], optima[32]), 2), regret(curves[16], curves[64])]
    names = (f"best lr at head dimension {size}" for size in optima)
    return markdown([*names, "drift from 8 to 32", "regret of 16's rate at 64"], [cells])


def mean(values: np.ndarray) -> str:
    """A mean over seeds with its interval."""
    return cell(fit.Estimate(float(values.mean()), fit.interval(list(values)), len(values)), 3)


def wion() -> str:
    """The largest norm of a hidden matrix over the radius, at its highest and at the end of the run."""
    rows = []
    for part in PARTS["wion"]:
        if not part.finished:
            return "not run"
        records = sweep.load(part.directory)[1]
        for log2_lr in part.rates:
            runs = [record["facts"]["norms"] for record in records if record["log2_lr"] == log2_lr]
            excess = np.array([list(run.values()) for run in runs]) / WION_RADIUS - 1
            steps = [int(step) for step in runs[0]]
            when = ", ".join(str(steps[place]) for place in excess.argmax(axis=1))
            peak, half, end = map(mean, (excess.max(axis=1), excess[:, steps.index(75)], excess[:, -1]))
            vectors = part.recipe.removeprefix("wion_")
            rows.append([vectors, f"2^{log2_lr:g}", peak, when, half, end])
    head = ["vectors", "lr", "largest norm / radius - 1", "at step", "after 75 steps", "after 150"]
    return markdown(head, rows)


TABLES: dict[str, Callable[[], str]] = {
    "sources_bounded": bounded,
    "sources_cost": cost,
    "sources_moonlight": lambda: hidden("moonlight"),
    "sources_graft": lambda: hidden("graft"),
    "sources_heads": heads,
    "sources_wion": wion,
}
