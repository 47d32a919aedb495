"""Tables of docs/transfer.md from the searches of run.py."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from functools import partial

import numpy as np
from scipy.special import stdtrit

from confirm import run as confirm
from rates import families
from rates.run import BUDGET, CENTRES, curve, given, lowest, means, records, regret
from rates.settings import SETTINGS
from surefoot.experiment.reports.style import markdown, plus_minus
from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.search import next_rates
from surefoot.scaling import LAWS


def optimum(losses: Mapping[float, Mapping[int, float]]) -> fit.Optimum:
    """The best rate of losses by rate and seed."""
    return fit.optimum([fit.Point(rate, seed, loss) for rate, own in losses.items() for seed, loss in own.items()])


def table(recipe: str = "steady") -> str:
    """Every finished setting: the rate that its run gives, the best one, and what the difference costs."""
    rows = []
    for name, setting in SETTINGS.items():
        start, found = given(recipe, setting), means(recipe, name)
        if start not in found or next_rates(found, start, BUDGET):
            continue
        best, cost = optimum(curve(recipe, name)), regret(recipe, name)
        vertex = best.status if best.log2_lr is None else f"2^{best.log2_lr:.2f}{plus_minus(best.interval, 2)}"
        lost = f"{cost.value:.3f}{plus_minus(cost.interval, 3) if cost.value else ''}"
        if records("steady_fresh", name):
            other = regret("steady_fresh", name)
            lost += f"; on {other.seeds} other seeds {other.value:.3f}{plus_minus(other.interval, 3)}"
        cells = [f"2^{start:.2f}", vertex, f"{found[start]:.3f}", lost]
        rows.append(["held out" if setting.held else "seen", name, *cells])
    head = ["", "setting", "rate of its length", "best rate", "loss at the given rate", "above the lowest"]
    return markdown(head, rows)


def law() -> str:
    """The law beside one that is fitted to every search of a language model here, and at widths 32 to 1024.

    By least squares, each search as one point; intervals are of 95 %, by Student's t.
    """
    found = [(150, 1024, part.optimum().log2_lr) for part in confirm.parts("sooner") if part.finished]
    for name, setting in SETTINGS.items():
        if not setting.pictures:
            found.append((setting.steps, setting.run.tokens, optimum(curve("steady", name)).log2_lr))
    found = [each for each in found if each[2] is not None]
    rates = np.array([best for *_, best in found])
    design = np.array([(1, math.log2(max(100, steps) / 150), math.log2(tokens / 1024)) for steps, tokens, _ in found])
    used = LAWS["steady"]
    ours = np.array([used.log2_rate, used.by_steps, used.by_tokens])
    fitted = np.linalg.lstsq(design, rates, rcond=None)[0]
    off = [rates - design @ each for each in (ours, fitted)]
    free = len(rates) - 3
    half = stdtrit(free, 0.975) * np.sqrt(off[1] @ off[1] / free * np.diag(np.linalg.inv(design.T @ design)))
    head = ["", "searches", "log2 of the rate for 150 steps of 1,024 tokens", "power of the steps", "of the tokens"]
    texts = [f"{x:.2f} ± {h:.2f}" for x, h in zip(fitted, half, strict=True)]
    rows = [["the law", "", *(f"{x:g}" for x in ours)], ["fitted to all", str(len(rates)), *texts]]
    rows = [[*row, f"{x.mean():+.2f}, {x.std():.2f}"] for row, x in zip(rows, off, strict=True)]
    return markdown([*head, "best rates above it, octaves: mean, scatter"], rows)


def changed(before: str, now: str) -> str:
    """The settings that were searched with the default as it was and as it is: best rates and paired losses."""
    rows = []
    for name, setting in SETTINGS.items():
        later = (each for each in (now, "steady_two", "steady") if records(each, name))  # with the next change, if any
        both = next(later, now), before
        found = [means(recipe, name) for recipe in both]
        if not all(each and not next_rates(each, given("steady", setting), BUDGET) for each in found):
            continue
        losses = [curve(recipe, name) for recipe in both]
        if losses[0] == losses[1]:  # a model without what was changed
            continue
        pairs = [given("steady", setting)] * 2, [min(each, key=lambda rate: each[rate] or math.inf) for each in found]
        gains = [fit.difference(losses[0][after], losses[1][first]) for after, first in pairs]
        rates = [optimum(each) for each in losses]
        best = [each.status if each.log2_lr is None else f"2^{each.log2_lr:.2f}" for each in rates[::-1]]
        above = [f"{regret(recipe, name).value:.3f}" for recipe in both[::-1]]
        rows.append([name, *best, *(f"{each.value:+.3f}{plus_minus(each.interval, 3)}" for each in gains), *above])
    head = ["setting", "best rate before", "after", "loss at the given rate, minus that before"]
    return markdown([*head, "at the best of each", "above the lowest before", "and after"], rows)


def one_rate(recipe: str) -> tuple[float, dict[str, float]]:
    """Of the half octaves, the rate of the lowest mean regret over held-out settings, and the regret in each.

    It is chosen after all of them were run, to the recipe's advantage; likewise the loss at a rate beyond those of a
    search is that of its nearest, and between two it is interpolated. A diverged run counts as 10 nats.
    """
    losses = {}
    for name, setting in SETTINGS.items():
        found = {rate: 10.0 if mean is None else mean for rate, mean in means(recipe, name).items()}
        if setting.held and found and not next_rates(means(recipe, name), given(recipe, setting), BUDGET):
            losses[name] = found
    grid = np.arange(-20, 1) / 2
    lost = {name: np.interp(grid, [*found], [*found.values()]) - min(found.values()) for name, found in losses.items()}
    best = int(np.argmin(np.mean([*lost.values()], axis=0)))
    return float(grid[best]), {name: float(own[best]) for name, own in lost.items()}


def rivals() -> str:
    """The rate that a run's length gives beside the best single rate of each rival, over the settings held out."""
    ours = {name: regret("steady", name).value for name in one_rate("steady")[1]}
    rows = {("steady", "of the length"): ours}
    for recipe in ("steady", *CENTRES):
        rate, lost = one_rate(recipe)
        rows[f"{recipe}, one rate", f"2^{rate:g}"] = lost
    cells = []
    for (label, rate), lost in rows.items():
        worst = max(lost, key=lost.__getitem__)
        recipe = label.partition(",")[0]
        ahead = [means(recipe, name)[lowest(recipe, name)] - at_given(name) for name in lost]
        searched = (
            "" if recipe == "steady" else f"{statistics.mean(ahead):+.3f} ({min(ahead):+.3f} to {max(ahead):+.3f})"
        )
        summary = [str(len(lost)), f"{statistics.mean(lost.values()):.3f}", f"{lost[worst]:.3f}", worst]
        cells.append([label, rate, *summary, searched])
    head = ["", "rate", "settings", "mean above the lowest", "largest", "in"]
    return markdown([*head, "at the best rate of each setting, minus steady at the given one"], cells)


def at_given(name: str) -> float:
    """The default's mean loss at the rate that the run gives."""
    return means("steady", name)[given("steady", SETTINGS[name])]


TABLES = {
    "rates": table,
    "rates_law": law,
    "one_rate": rivals,
    "biases": partial(changed, "steady_quarter", "steady_even"),
    "queries": partial(changed, "steady_even", "steady_small"),
    "small_rows": partial(changed, "steady_small", "steady_two"),
    "head_sizes": partial(changed, "steady_two", "steady"),
    "families": families.table,
}
