"""From the finished runs of sweeps over an axis to `summary.json`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from surefoot.experiment.extrapolate.axis import AXES
from surefoot.experiment.extrapolate.law import Law, power_law
from surefoot.experiment.files import Record, dumps
from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.summary import columns, pair, points

UNFINISHED = "unfinished"
LINE_POINTS = 17  # at which the law is drawn: its interval is curved on logarithmic axes, and widest at the ends


@dataclass(frozen=True)
class Swept:
    """What there is of one value's sweep.

    Args:
        records: of the runs that have finished.
        finished: whether these are all.
    """

    records: Sequence[Record] = ()
    finished: bool = False


def optima(width: int, swept: Mapping[int, Swept], recipe: str) -> dict[int, fit.Optimum]:
    """Fit a recipe's optimum at each value; there is none where the sweep is unfinished.

    Args:
        width: of the models.
        swept: by value.
        recipe: name of a method.

    Returns:
        The optima, by value.
    """
    found = {value: fit.optimum(points(one.records, recipe, width)) for value, one in swept.items()}
    return {value: best if swept[value].finished else _unsettled(best) for value, best in found.items()}


def _unsettled(best: fit.Optimum) -> fit.Optimum:
    """What is the best so far, without a vertex, which the rest of the search may move."""
    return replace(best, status=UNFINISHED, log2_lr=None, interval=None, by_seed={})


def summarise(
    config: Mapping[str, Any], swept: Mapping[int, Swept], target: int | None, environment: Mapping[str, Any]
) -> dict[str, Any]:
    """Compute the content of `summary.json`.

    Args:
        config: the content of `config.json`.
        swept: by value, in the order of `config["values"]`.
        target: the value at which each recipe's law is read off; None for none.
        environment: joins the summary.

    Returns:
        JSON values; an entry for each recipe, in `recipes`.
    """
    summary = {
        "axis": config["axis"],
        "values": list(swept),
        "width": config["width"],
        "target": target,
        "finished": all(one.finished for one in swept.values()),
        "recipes": [_entry(config, swept, target, recipe) for recipe in config["recipes"]],
        "config": dict(config),
        "environment": dict(environment),
    }
    return json.loads(dumps(summary))  # type: ignore[no-any-return]


def _entry(config: Mapping[str, Any], swept: Mapping[int, Swept], target: int | None, recipe: str) -> dict[str, Any]:
    best = optima(config["width"], swept, recipe)
    law, none = power_law(best), fit.Estimate(None, None, 0)
    power, there = (law.power if law else none), (law.at(target) if law and target else none)
    first, last = (best[value] for value in (min(best), max(best)))
    runs = [[record for record in one.records if record["recipe"] == recipe] for one in swept.values()]
    return {
        "recipe": recipe,
        "values": list(best),
        **columns(list(best.values()), fit.drift(first, last)),
        "power": power.value,
        "power_ci": pair(power.interval),
        "rms_octaves": law.rms_octaves if law else None,
        "no_law": None if law else _why(config["axis"], best),
        "target_log2_lr": there.value,
        "target_log2_lr_ci": pair(there.interval),
        "line": _drawn(law, [*best, *([target] if target else [])]) if law else None,
        "seeds": len({record["seed"] for own in runs for record in own}),
        "runs": [len(own) for own in runs],
        "diverged": [sum(record["diverged"] for record in own) for own in runs],
        "failed": [sum("failed" in record for record in own) for own in runs],
    }


def _why(axis: str, best: Mapping[int, fit.Optimum]) -> str:
    """Which values have no optimum that a law could go through, and why."""
    return "; ".join(
        f"{AXES[axis].text.format(value)}: {one.status}" for value, one in best.items() if not one.interior
    )


def _drawn(law: Law, sizes: Sequence[int]) -> dict[str, list[Any]]:
    """The law from the lowest of these sizes to the highest, with its interval, by column."""
    drawn = np.geomspace(min(sizes), max(sizes), LINE_POINTS).tolist()
    rates = [law.at(size) for size in drawn]
    return {
        "size": drawn,
        "log2_lr": [rate.value for rate in rates],
        "log2_lr_ci": [pair(rate.interval) for rate in rates],
    }
