"""The tables of docs/other-recipes.md about long runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from confirm.tables import cell
from pretrain import run as pretrain
from pretrain.run import BUDGET, CENTRES, RATIOS, SEEDS, Setting
from surefoot.experiment.reports.style import markdown
from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.sweep import load

SEARCHED = {
    "steady": 540, "moga_row_1.5": 360, "moga_row_2": 360, "moga_row_3": 360, "muon": 0, "muon_tuned": 180,
    "moonlight": 0, "moonlight_tuned": 180, "scion": 360, "adamw": 360, "mup_adamw": 360,
}  # fmt: skip
"""Runs of `studies/search` behind a recipe's other settings; 0: as published."""

BASELINE = "steady"
PARTS = (0.25, 0.5, 0.75, 1.0)


def table() -> str:
    """Every setting that was begun."""
    return "\n\n".join(one for one in map(_one, _settings()) if one)


def _settings() -> list[Setting]:
    names = sorted(path.name for path in pretrain.HERE.glob("[a-z]*_*") if path.is_dir())
    return [Setting(name.split("_")[0], int(name.split("_")[1]), ratio) for name in names for ratio in RATIOS]


def _one(setting: Setting) -> str | None:
    """The recipes at one width and horizon, by their losses, of the runs there are; or their tuning."""
    if not setting.directory("final").exists():
        return _tuning(setting)
    records = load(setting.directory("final"))[1]
    tuning = load(replace(setting, ratio=RATIOS[0]).directory("tuning"))[1]
    runs = {name: {r["seed"]: r for r in records if r["recipe"] == name} for name in CENTRES}
    losses = {name: {seed: r["val_loss"] for seed, r in own.items() if not r["diverged"]} for name, own in runs.items()}
    means = {
        name: fit.difference(own, dict.fromkeys(own, 0.0))
        for name, own in losses.items()
        if len(own) == len(runs[name])
    }
    rows = []
    for name in sorted((name for name in means if runs[name]), key=lambda name: means[name].value or 0.0):
        rates = sorted(r["log2_lr"] for r in tuning if r["recipe"] == name)
        best = next(iter(runs[name].values()))["log2_lr"]
        differences = [_difference(runs[name], runs[BASELINE], part, setting.steps) for part in PARTS]
        rows.append([
            name, str(SEARCHED[name]) if SEARCHED[name] else "published", str(len(rates)), f"2^{best:g}",
            str(means[name].seeds), cell(means[name], 3, ""),
            *("" if name == BASELINE else cell(one, 3) for one in differences),
        ])  # fmt: skip
    head = ["recipe", "earlier search, runs", f"rates tried at {RATIOS[0]}", "lr", "seeds", "validation loss"]
    head += [f"above {BASELINE} at {part:.0%}" for part in PARTS]
    tokens = setting.steps * pretrain.BATCH * pretrain.CONTEXT
    title = (
        f"`{setting.model}`, width {setting.width}, {setting.ratio} tokens a parameter: {setting.steps:,} steps, "
        f"{tokens / 1e6:.1f} million tokens"
    )
    if not setting.finished("final"):
        title += f"; under way, {len(records)} of {len(CENTRES) * len(SEEDS)} runs"
    return f"{title}\n\n{markdown(head, rows)}"


def _tuning(setting: Setting) -> str | None:
    """How far the tuning of a setting has come."""
    if not setting.directory("tuning").exists():
        return None
    rows = []
    tuning = load(setting.directory("tuning"))[1]
    for name in CENTRES:
        own = {r["log2_lr"]: r["val_loss"] for r in tuning if r["recipe"] == name and not r["diverged"]}
        if own:
            best = min(own, key=own.__getitem__)
            rows.append([name, str(len(own)), f"2^{best:g}", f"{own[best]:.3f}"])
    title = (
        f"`{setting.model}`, width {setting.width}, {setting.ratio} tokens a parameter: under way, {len(tuning)} of "
        f"{len(CENTRES) * BUDGET} tuning runs, one seed, nothing to conclude from"
    )
    return f"{title}\n\n{markdown(['recipe', 'rates so far', 'best of them', 'validation loss'], rows)}"


def _difference(
    ours: Mapping[int, Mapping[str, Any]], theirs: Mapping[int, Mapping[str, Any]], part: float, steps: int
) -> fit.Estimate:
    """The paired difference of validation losses after a part of the steps."""
    return fit.difference(*({seed: _at(r, part, steps) for seed, r in own.items()} for own in (ours, theirs)))


def _at(record: Mapping[str, Any], part: float, steps: int) -> float:
    """The validation loss that was measured nearest to a part of the steps."""
    if part == 1:
        loss: float = record["val_loss"]
        return loss
    curve = {int(step): loss for step, loss in record["facts"].items()}
    return float(curve[min(curve, key=lambda step: abs(step - part * steps))])
