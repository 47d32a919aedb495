"""The tables about the law of the best rate: what it is over depths, horizons and batches, and how well it predicts."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from confirm.tables import cell, rate
from sizes import decay
from sizes import run as sizes
from sizes.run import SAME_DECAY, TRUTH
from surefoot.experiment.configs import CONFIG
from surefoot.experiment.reports import extrapolate
from surefoot.experiment.reports.style import markdown
from surefoot.experiment.reports.transfer import optimum
from surefoot.experiment.sweep import fit, sweep
from surefoot.experiment.sweep.axis import AXES
from surefoot.experiment.sweep.extrapolate import load
from surefoot.experiment.sweep.law import power_law
from surefoot.experiment.sweep.summary import optima, points, transfer_rate

NOT_RUN = ["not run"] * 3
WIDTH = 64


def table(out: Path = sizes.HERE) -> str:
    """Every part that was begun, a table for each axis."""
    return "\n\n".join(one for one in (_axis(name, out) for name in AXES) if one)


def depth_gain(out: Path = sizes.HERE) -> str | None:
    """What the default's rule for depth is worth, each way at its own best rate; None before it was measured."""
    ours, flat = (out / f"depth_{name}_{WIDTH}" for name in ("steady", sizes.FLAT))
    if not all((directory / sweep.SUMMARY).exists() for directory in (ours, flat)):
        return None
    (_, with_rule), (_, without) = load(ours), load(flat)
    rows = []
    for blocks in without:
        losses = [
            fit.lowest(points(swept[blocks].records, recipe, WIDTH))
            for swept, recipe in ((with_rule, "steady"), (without, sizes.FLAT))
        ]
        means = [f"{fmean(by_seed.values()):.3f}" for by_seed in losses]
        rows.append([str(blocks), *means, cell(fit.difference(*losses), 3)])
    return markdown(["blocks", "loss with the rule", "without", "difference"], rows)


def decay_gain(out: Path = sizes.HERE) -> str | None:
    """At the longest horizon, the default's decay by the length of the run beside that of short runs."""
    directory, rows = out / f"horizon_steady_{WIDTH}", []
    if not all((directory / truth / sweep.SUMMARY).exists() for truth in (TRUTH, SAME_DECAY)):
        return None
    found = {truth: points(sweep.load(directory / truth)[1], "steady", WIDTH) for truth in (TRUTH, SAME_DECAY)}
    law = power_law(optima(WIDTH, load(directory)[1], "steady"))
    assert law is not None
    predicted = {seed: line.at(load(directory)[0]["target"]) for seed, line in law.by_seed.items()}
    for truth, name in ((TRUTH, "by the length of the run"), (SAME_DECAY, "as in short runs")):
        best, lowest = fit.optimum(found[truth]), fit.lowest(found[truth])
        apart = "" if truth == TRUTH else cell(fit.difference(lowest, fit.lowest(found[TRUTH])), 3)
        error = cell(fit.difference(predicted, best.by_seed), 2)
        rows.append([name, rate(best), error, f"{fmean(lowest.values()):.3f}", apart])
    head = ["decay", "best lr", "predicted minus it, octaves", "lowest loss", "above the first"]
    return markdown(head, rows)


def decay_units() -> str | None:
    """The default's decay times a factor at several horizons and batches; None before anything was measured."""
    rows = []
    for size in filter(decay.Size.finished, (*decay.HORIZONS, *decay.BATCHES)):
        best, losses = size.best(), size.losses()
        lowest = best.best_loss
        assert lowest is not None
        cells = [f"{loss - lowest:.3f}" if (loss := losses.get(x)) else "" for x in decay.FACTORS.values()]
        rows.append([str(size.steps), str(size.batch), f"2^{size.log2_lr:g}", *cells, rate(best)])
    head = ["steps", "batch", "lr", *(f"decay x {2**x:g}" for x in decay.FACTORS.values()), "best factor"]
    return markdown(head, rows) if rows else None


def _axis(name: str, out: Path) -> str | None:
    """All recipes and widths of one axis; None if nothing was begun."""
    directories = sorted(path.parent for path in out.glob(f"{name}_*/{CONFIG}"))
    if not directories:
        return None
    values = sorted({value for directory in directories for value in load(directory)[0]["values"]})
    head = ["recipe", "width", *(f"best lr at {AXES[name].text.format(value)}" for value in values), "power"]
    head += ["off the line", "prediction", "measured there", "error in octaves", "regret in nats"]
    return markdown(head, [_row(directory, values) for directory in directories])


def _row(directory: Path, values: list[int]) -> list[str]:
    """One recipe at one width."""
    summary, _ = load(directory)
    (entry,) = summary["recipes"]
    columns = zip(entry["best_log2_lr"], entry["best_log2_lr_ci"], entry["status"], strict=True)
    best = dict(zip(entry["values"], (optimum(*one) for one in columns), strict=True))
    off = "" if entry["rms_octaves"] is None else f"{entry['rms_octaves']:.2f}"
    cells = [entry["recipe"], str(summary["width"]), *(best.get(value, "") for value in values)]
    return [*cells, extrapolate.power(entry), off, *_test(directory)]


def _test(directory: Path) -> list[str]:
    """Prediction, truth, error and regret: paired over the seeds, which are the same in both."""
    summary, swept = load(directory)
    (entry,), width, target = summary["recipes"], summary["width"], summary["target"]
    if target is None:
        return [""] * 4
    law = power_law(optima(width, swept, entry["recipe"]))
    if law is None:
        return ["no law", *NOT_RUN]
    predicted = law.at(target)
    assert predicted.value is not None
    prediction = f"{optimum(predicted.value, predicted.interval, '')} at {AXES[summary['axis']].text.format(target)}"
    if not (directory / TRUTH / sweep.SUMMARY).exists():
        return [prediction, *NOT_RUN]
    measured = points(sweep.load(directory / TRUTH)[1], entry["recipe"], width)
    truth = fit.optimum(measured)
    error = fit.difference({seed: line.at(target) for seed, line in law.by_seed.items()}, truth.by_seed)
    regret = fit.regret(measured, transfer_rate(predicted.value))
    return [prediction, rate(truth), cell(error, 2), cell(regret, 3, "")]
