"""The tables about the default: what the search found and what the confirmation measured.

The first is in docs/other-recipes.md, the others are in docs/transfer.md.
"""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from scipy.special import stdtrit

from confirm import run as confirm
from confirm.run import BOUND, CENTRES, OTHERS, RIVAL_SEEDS, RIVALS, WIDTHS, Part
from search import rounding
from search.winners import results
from search.winners import searches as searched
from surefoot import Run, recipes
from surefoot.experiment.configs import CONFIG
from surefoot.experiment.files import dumps
from surefoot.experiment.reports.report import draw
from surefoot.experiment.reports.style import markdown, plus_minus
from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.config import SweepConfig
from surefoot.experiment.sweep.search import Grid
from surefoot.experiment.sweep.sweep import RESULTS


def cell(estimate: fit.Estimate, digits: int, sign: str = "+") -> str:
    """A mean with its interval."""
    if estimate.value is None:
        return "not known"
    return f"{estimate.value:{sign}.{digits}f}{plus_minus(estimate.interval, digits)}"


def slope(optima: Mapping[int, fit.Optimum]) -> fit.Estimate:
    """Octaves by which the optimum moves from the narrowest to the widest, by the least-squares line through all.

    The interval propagates each width's standard error over seeds, with Welch and Satterthwaite's degrees of freedom. A
    width with one seed counts with the spread and the freedom of the width before it.
    """
    x = np.log2(list(optima))
    weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum() * (x[-1] - x[0])
    values, variances, freedom = [], [], []
    for optimum in optima.values():
        if optimum.log2_lr is None:
            return fit.Estimate(None, None, 0)
        own = list(optimum.by_seed.values())
        values.append(optimum.log2_lr)
        if len(own) > 1:
            spread, free = np.var(own, ddof=1), len(own) - 1
        variances.append(spread / len(own))
        freedom.append(free)
    moved, parts = float(weights @ values), weights**2 * np.array(variances)
    half = float(stdtrit(parts.sum() ** 2 / (parts**2 / freedom).sum(), 0.975)) * math.sqrt(parts.sum())
    return fit.Estimate(moved, (moved - half, moved + half), min(freedom) + 1)


def rate(optimum: fit.Optimum) -> str:
    """The best rate with its interval."""
    if optimum.log2_lr is None:
        return optimum.status
    return f"2^{optimum.log2_lr:.2f}{plus_minus(optimum.interval, 2)}"


def curves() -> str:
    """Best rates at four widths, and how far they move."""
    rows = []
    for label, recipe, bound in (*((name, name, None) for name in CENTRES), (f"steady, {BOUND}", "steady", BOUND)):
        parts = {width: confirm.curve(recipe, width, bound) for width in WIDTHS}
        if not all(part.finished for part in parts.values()):
            continue
        optima = {width: fit.optimum(parts[width].points()) for width in parts}
        ends = fit.drift(optima[32], optima[256])
        reused = fit.Estimate(None, None, 0)
        if optima[32].log2_lr is not None:
            reused = regret(parts[256].points(), optima[32].log2_lr)
        seeds = ", ".join(str(len(optimum.by_seed)) for optimum in optima.values())
        row = [label, seeds, *map(rate, optima.values()), cell(slope(optima), 2), cell(ends, 2), cell(reused, 3, "")]
        rows.append(row)
    head = ["recipe", "seeds", *(f"best lr at {w}" for w in WIDTHS), "drift by the line", "by the ends"]
    return markdown([*head, "regret at 256"], rows)


def regret(points: list[fit.Point], log2_lr: float) -> fit.Estimate:
    """What the measured rate next to a rate costs."""
    return fit.regret(points, min({point.log2_lr for point in points}, key=lambda one: abs(one - log2_lr)))


def paired() -> str:
    """At width 256 on eight fresh seeds: each at the best rate of its own curve there, and at that of width 32."""
    rows, losses = [], {}
    for recipe, bound in ((name, None) for name in ("steady", "moonlight_tuned", "bounded")):
        bound = BOUND if recipe == "bounded" else bound
        recipe = "steady" if bound else recipe
        if not all(confirm.curve(recipe, width, bound).finished for width in WIDTHS):
            continue
        part = confirm.paired(recipe, bound)
        if not part.finished:
            continue
        table, label = fit.curve(part.points()), f"{recipe}, {BOUND}" if bound else recipe
        for where, one in zip(("its own best rate", "width 32's best rate"), part.rates, strict=False):
            losses[label, where] = table[one] or {}
            rows.append([label, f"{where}, 2^{one:g}", losses[label, where]])
    rival = losses.get(("moonlight_tuned", "its own best rate"), {})
    cells = []
    for label, where, found in rows:
        mean = fit.Estimate(float(np.mean(list(found.values()))), fit.interval(list(found.values())), len(found))
        against = "" if found is rival else cell(fit.difference(found, rival), 3)
        cells.append([label, where, str(len(found)), cell(mean, 3, ""), against])
    return markdown(["recipe", "rate", "seeds", "loss at 256", "minus tuned Muon at its own best rate"], cells)


def wide() -> str:
    """The default from width 32 to the widest that is finished."""
    beyond = [part for part in confirm.parts("wide") if part.finished]
    return from_narrow([*(confirm.curve("steady", width) for width in WIDTHS), *beyond], len(WIDTHS))


def sooner() -> str:
    """The default since decision 31 from width 32 to the widest that is finished."""
    return from_narrow([part for part in confirm.parts("sooner") if part.finished], 1)


def from_narrow(parts: list[Part], first: int) -> str:
    """How far the best rate moves from the first part's width, in a line for each of the others from one on."""
    optima = {part.width: part.optimum() for part in parts}
    if len(parts) <= first or optima[32].log2_lr is None:
        return ""
    rows = []
    for part in parts[first:]:
        here = {width: optimum for width, optimum in optima.items() if width <= part.width}
        seeds, lowest = optima[part.width].by_seed, fit.lowest(part.points())
        line = cell(slope(here), 2)
        moved = cell(fit.drift(optima[32], optima[part.width]), 2)
        reused = cell(regret(part.points(), optima[32].log2_lr), 3, "")
        row = [str(part.width), str(len(seeds)), rate(optima[part.width]), moved, line, reused]
        rows.append([*row, f"{np.mean(list(lowest.values())):.3f}"])
    head = ["width", "seeds", "best lr", "minus that at 32", "drift from 32 by the line"]
    return markdown([*head, "regret of 32's rate", "loss"], rows)


def long() -> str:
    """The default after 1,600 steps of bytes."""
    parts = confirm.parts("long")[::-1]
    if not all(part.finished for part in parts):
        return ""
    return at_widths({part.width: part.points() for part in parts}, Run(confirm.LONG, 16 * 64))


def at_widths(runs: Mapping[int, list[fit.Point]], length: Run) -> str:
    """The default's best rates, and what the narrowest width's and the rate of the law cost."""
    optima = {width: fit.optimum(points) for width, points in runs.items()}
    law, first = math.log2(recipes.steady().rate(length)), next(iter(optima))
    rows = []
    for width, points in runs.items():
        reused = [cell(regret(points, log2_lr), 3, "") for log2_lr in (optima[first].log2_lr, law)]
        rows.append([str(width), rate(optima[width]), *reused, f"{np.mean(list(fit.lowest(points).values())):.3f}"])
    moved = ["", f"{cell(slope(optima), 2)} octave by the line", "", "", ""]
    head = ["width", "best lr", f"regret of {first}'s rate", f"of the law's, 2^{law:.2f}", "loss"]
    return markdown(head, [*rows, moved])


def others() -> str:
    """The default under other conditions, widths 32 to 128."""
    rows = []
    for name in OTHERS:
        parts = confirm.others(name)
        if not all(part.finished for part in parts):
            continue
        optima = [part.optimum() for part in parts]
        reused = fit.Estimate(None, None, 0)
        if optima[0].log2_lr is not None:
            reused = regret(parts[-1].points(), optima[0].log2_lr)
        rows.append([name, *map(rate, optima), cell(fit.drift(optima[0], optima[-1]), 2), cell(reused, 3, "")])
    return markdown(["", *(f"best lr at {w}" for w in (32, 64, 128)), "drift over 4x", "regret at 128"], rows)


def roles() -> str:
    """What bounds on some roles cost at width 64, each at the better of two rates."""
    parts, rows = confirm.roles(), []
    if not all(part.finished for part in parts):
        return ""
    ours = fit.lowest(parts[0].points())
    for part in parts:
        found = fit.lowest(part.points())
        cost = "" if part is parts[0] else cell(fit.difference(found, ours), 3)
        rows.append([part.recipe, str(len(found)), f"{np.mean(list(found.values())):.3f}", cost])
    return markdown(["at width 64", "seeds", "loss", "minus the default's"], rows)


def rivals() -> str:
    """Every family's winner at the search's width and at the widest, beside the default on the same seeds."""
    rows = []
    for name in ("steady", "moonlight_tuned", *RIVALS):
        own = name == "moonlight_tuned"
        parts = [confirm.curve(name, width) for width in (64, 256)] if own else confirm.rival(name)
        if not all(part.finished for part in parts):
            continue
        cells = []
        for part in parts:
            ours = fit.lowest(next(one for one in confirm.rival("steady") if one.width == part.width).points())
            found = {seed: loss for seed, loss in fit.lowest(part.points()).items() if seed in RIVAL_SEEDS}
            gap = "" if name == "steady" else f" ({cell(fit.difference(found, ours), 3)})"
            cells.append(f"{np.mean(list(found.values())):.3f}{gap}")
        rows.append([name, *cells])
    return markdown(["recipe", "loss at 64 (minus the default's)", "loss at 256 (minus the default's)"], rows)


def searches() -> str:
    """The winner of each search."""
    rows = []
    names = (
        "steady",
        "steady_rows",
        "steady_heads",
        "moonlight",
        *itertools.chain.from_iterable(map(searched, RIVALS)),
    )
    for name in names:
        found = list(results(name))
        _, point, wide, narrow = found[0]
        start = next((one for one in found if one[0] == 0), None)
        settings = (
            f"{key} {value}" if isinstance(value, str) else f"{key} {value:.2g}" for key, value in point.items()
        )
        first = "" if start is None else f"{start[2]:.3f}, {min(start[3].values()):.3f}"
        rows.append([name, "180", f"{wide:.3f}, {min(narrow.values()):.3f}", first, ", ".join(settings)])
    return markdown(["search", "runs", "loss at 64, 32", "of the start", "settings of the winner"], rows)


def picture(path: Path) -> None:
    """Draw the curves of the default and of tuned Muon at four widths."""
    drawn = ("steady", "moonlight_tuned")
    parts = [confirm.curve(recipe, width) for recipe in drawn for width in WIDTHS]
    rates = tuple(sorted({rate for part in parts for rate in part.rates}))
    config = SweepConfig(drawn, WIDTHS, parts[0].seeds, confirm.STEPS, Grid(rates))
    with TemporaryDirectory() as merged:
        lines = "".join((part.directory / RESULTS).read_text(encoding="utf-8") for part in parts)
        (Path(merged) / RESULTS).write_text(lines, encoding="utf-8")
        (Path(merged) / CONFIG).write_text(dumps(config.to_json()), encoding="utf-8")
        shutil.copy(draw(Path(merged)), path)


TABLES = {
    "confirm_curves": curves,
    "confirm_paired": paired,
    "confirm_wide": wide,
    "confirm_long": long,
    "confirm_sooner": sooner,
    "confirm_others": others,
    "confirm_roles": roles,
    "confirm_rivals": rivals,
    "search": searches,
    "rounding": rounding.table,
}
