"""Statistics of a comparison: paired differences with their p values, the mean curve, and when it is at a target."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import stdtr

from surefoot.experiment.sweep import fit


def mean(losses: Mapping[int, float]) -> fit.Estimate:
    """Average the losses of several seeds.

    Args:
        losses: seed -> loss.

    Returns:
        The mean and Student's interval; a value of None without a seed.
    """
    return fit.difference(losses, dict.fromkeys(losses, 0.0))


def p_value(losses: Mapping[int, float], others: Mapping[int, float]) -> float | None:
    """Compute the two-sided p value of Student's t test of paired differences.

    Args:
        losses: seed -> loss.
        others: seed -> loss to compare with.

    Returns:
        The p value; None below three common seeds, as for the interval.

    >>> round(p_value({1: 2.0, 2: 2.2, 3: 2.1}, {1: 1.5, 2: 1.9, 3: 1.7}), 4)
    0.0202
    """
    differences = [loss - others[seed] for seed, loss in losses.items() if seed in others]
    n = len(differences)
    if n < fit.SEEDS_FOR_AN_INTERVAL:
        return None
    error = float(np.std(differences, ddof=1)) / math.sqrt(n)
    middle = float(np.mean(differences))
    if error == 0.0:
        return 1.0 if middle == 0.0 else 0.0
    return 2 * float(stdtr(n - 1, -abs(middle) / error))


def mean_curve(curves: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Average the curves of several seeds, all evaluated after the same steps.

    Args:
        curves: each with the lists "step", "val_loss" (None where it was not finite) and "seconds".

    Returns:
        "step"; "val_loss", its mean, with the "lowest" and the "highest" seed's, None where one is; mean "seconds".
    """
    losses = [values if None not in values else None for values in zip(*(c["val_loss"] for c in curves), strict=True)]
    return {
        "step": list(curves[0]["step"]),
        "val_loss": [None if values is None else float(np.mean(values)) for values in losses],
        "lowest": [None if values is None else min(values) for values in losses],
        "highest": [None if values is None else max(values) for values in losses],
        "seconds": [float(np.mean(values)) for values in zip(*(c["seconds"] for c in curves), strict=True)],
    }


def reached(curve: Mapping[str, Sequence[Any]], target: float) -> tuple[float, float] | None:
    """Find when a curve first is at a target loss, linear between evaluations.

    Args:
        curve: of `mean_curve`.
        target: a loss in nats.

    Returns:
        `(steps, seconds)`; None where it is above the target throughout.

    >>> reached({"step": [0, 10, 20], "val_loss": [4.0, 3.0, 2.0], "seconds": [0.0, 1.0, 3.0]}, 2.5)
    (15.0, 2.0)
    """
    losses = curve["val_loss"]
    place = next((i for i, loss in enumerate(losses) if loss is not None and loss <= target), None)
    if place is None:
        return None
    before, here = losses[place - 1] if place else None, losses[place]
    at = place if before is None else place - 1 + (before - target) / (before - here)
    places = range(len(losses))
    return float(np.interp(at, places, curve["step"])), float(np.interp(at, places, curve["seconds"]))
