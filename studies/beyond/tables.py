"""The tables of the parts beyond Muon: what each is worth, what averages are, and steps to tuned Muon's final loss."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from statistics import mean
from typing import Any

import numpy as np

from beyond import run as beyond
from beyond.run import RIVAL, SCREEN_WIDTH, STEPS, WIDTHS, Final, Search, Widths, finals, finished, screening, tuning
from beyond.variants import BASES, Way
from confirm.tables import cell
from surefoot.experiment.reports.style import markdown, plus_minus
from surefoot.experiment.reports.transfer import optimum
from surefoot.experiment.sweep import fit, sweep

TIMES = beyond.HERE / "times.json"


def records(part: Search | Final) -> list[dict[str, Any]]:
    """The results of a part."""
    return sweep.load(part.directory)[1]


def named(prefix: str) -> list[Way]:
    """The ways of training with finished directories of a stage, by base, then by name."""
    found = {path.parent.name.removeprefix(prefix) for path in beyond.HERE.glob(f"{prefix}*/{sweep.SUMMARY}")}
    bases = list(BASES)
    return sorted(map(Way, found), key=lambda way: (bases.index(way.base), len(way.parts), way.name))


def state(part: Search | Final) -> str:
    """State in bytes a parameter."""
    return f"{mean(r['facts']['state_bytes'] for r in records(part)):.1f}"


def times() -> dict[str, Any]:
    """What `times.py` measured; empty before it has."""
    return json.loads(TIMES.read_text()) if TIMES.exists() else {}


def alone() -> str:
    """The optimizer's own step on a wide block, over the default's."""
    if "alone" not in times():
        return ""
    seconds = times()["alone"]["seconds"]
    rows = [[name, f"{1e3 * found:.0f}", f"{found / seconds['steady']:.1f}"] for name, found in seconds.items()]
    return markdown([f"optimizer's step, a block of width {times()['alone']['width']}", "ms", "/ the default's"], rows)


def slower(way: Way, other: str) -> str:
    """A step's time over another's, of `times.py`, at the screen's width; empty if one was not measured."""
    seconds = times().get("seconds", {})
    return f"{seconds[way.name] / seconds[other]:.2f}" if {way.name, other} <= seconds.keys() else ""


def by_seed(losses: Mapping[int, float], others: Mapping[int, float]) -> str:
    """The mean difference, and that of each seed: two have no interval."""
    apart = [losses[seed] - others[seed] for seed in losses]
    return f"{mean(apart):+.4f} ({', '.join(f'{value:+.4f}' for value in apart)})"


def screened() -> str:
    """Every part at its own best rate, and its differences from its base over the same seeds."""
    rows = []
    for way in named("screen_"):
        base = screening(Way(way.base))
        own, part = fit.lowest(screening(way).points()), screening(way)
        against = "" if way.name == way.base else by_seed(own, fit.lowest(base.points()))
        best = f"2^{fit.optimum(part.points()).best_rate:g}"
        row = [way.name, state(part), slower(way, way.base), best, f"{mean(own.values()):.4f}", against]
        rows.append(row)
    head = ["at width 64", "state, bytes a parameter", "step / its base's", "best rate", "loss", "minus its base's"]
    return markdown(head, rows) if rows else ""


def averaged() -> str:
    """The weights' averages, read at the best rate of each kind of reading."""
    rows = []
    for way in named("screen_"):
        lines = [r for r in records(screening(way)) if not r["diverged"]]
        plain = fit.lowest(screening(way).points())
        for kind, shares in beyond.READ.items():
            for share in (f"{share:g}" for share in shares):
                found = [fit.Point(r["log2_lr"], r["seed"], r["facts"]["read"][str(kind)][share]) for r in lines]
                cells = [f"2^{fit.optimum(found).best_rate:g}", by_seed(fit.lowest(found), plain)]
                rows.append([way.name, str(kind), share, *cells])
    head = ["at width 64", "average", "share of the way to it", "best rate", "minus the weights' own"]
    return markdown(head, rows) if rows else ""


def transferred() -> str:
    """The best rate at each width, its drift, and the regret of the narrowest one's at the widest."""
    rows = []
    for way in named("widths_"):
        (entry,) = sweep.load(Widths(way).directory)[0]["recipes"]
        columns = zip(entry["best_log2_lr"], entry["best_log2_lr_ci"], entry["status"], strict=True)
        drift = fit.Estimate(entry["drift_octaves"], entry["drift_octaves_ci"], entry["seeds"])
        regret = fit.Estimate(entry["regret_nats"], entry["regret_nats_ci"], entry["seeds"])
        cells = [cell(drift, 2), cell(regret, 3, "")]
        rows.append([way.name, *(optimum(*one) for one in columns), *cells])
    head = ["", *(f"best lr at {width}" for width in WIDTHS), "drift in octaves", f"regret at {WIDTHS[-1]}"]
    return markdown(head, rows) if rows else ""


def ratio(losses: Mapping[int, Mapping[int, float]], target: Mapping[int, float]) -> fit.Estimate:
    """Steps until a recipe ends at the target's final loss, over the target's steps.

    A line through the recipe's loss minus the target's, over the log of the steps: it is 0 at the ratio. Each seed's
    own is one Newton step from that of the mean, so that their mean is it.

    Args:
        losses: steps -> seed -> final loss of a run of that length.
        target: seed -> final loss at `STEPS` steps.

    Returns:
        The ratio with its interval over the seeds; None where losses do not fall, or far from the steps that were run.

    >>> found = {n: {s: 2 - math.log(n / 320) + s for s in range(3)} for n in (280, 360, 400)}
    >>> round(ratio(found, {s: 2.0 + s for s in range(3)}).value, 3)
    0.8
    """
    x = np.log([steps / STEPS for steps in losses])
    gaps = np.array([[own[seed] - target[seed] for own in losses.values()] for seed in target])
    slope, height = np.polyfit(x, gaps.mean(0), 1)
    if slope >= 0:
        return fit.Estimate(None, None, 0)
    root = -height / slope
    if not 2 * x.min() <= root <= -x.min():
        return fit.Estimate(None, None, 0)
    own = [root - np.polyval(np.polyfit(x, gap, 1), root) / slope for gap in gaps]
    interval = fit.interval(own)
    ends = None if interval is None else (math.exp(interval[0]), math.exp(interval[1]))
    return fit.Estimate(math.exp(root), ends, len(own))


def steps_to(target: Mapping[int, float], way: Way) -> str:
    """`ratio` of a way of training; empty where its shorter runs are missing."""
    if not all(map(finished, finals(way))):
        return ""
    found = ratio({part.steps: part.losses() for part in finals(way)}, target)
    return "not known" if found.value is None else f"{found.value:.3f}{plus_minus(found.interval, 3)}"


def confirmed() -> str:
    """At width 128 on eight seeds: final losses, and steps to tuned Muon's."""
    rival, rows = Final(Way(RIVAL), STEPS), []
    if not finished(rival):
        return ""
    theirs = rival.losses()
    for way in named("tune_"):
        last, *_ = finals(way)
        if not finished(last):
            continue
        own = last.losses()
        cells = [way.name, f"2^{tuning(way).rate():g}", state(last), slower(way, RIVAL), f"{mean(own.values()):.4f}"]
        if way.name != RIVAL:
            apart = fit.difference(own, theirs)
            cells.append(f"{apart.value:+.4f}{plus_minus(apart.interval, 4)}")
            cells.append(steps_to(theirs, way))
        rows.append(cells + [""] * (7 - len(cells)))
    head = [
        "at width 128",
        "rate",
        "state, bytes a parameter",
        f"step / tuned Muon's at {SCREEN_WIDTH}",
        "loss",
        "minus tuned Muon's",
    ]
    return markdown([*head, "steps to its loss / its steps"], rows)


ALL = (screened, averaged, confirmed, alone, transferred)
"""Every table."""
