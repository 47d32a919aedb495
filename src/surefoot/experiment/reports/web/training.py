"""The page of a training run: loss, norms against their bounds, updates, alarms, throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.experiment import configs
from surefoot.experiment.files import Record, read_lines
from surefoot.experiment.reports import norms
from surefoot.experiment.reports.web import vega
from surefoot.experiment.reports.web.page import Chart, Choice, Fact, Page, Table
from surefoot.experiment.training.norm_log import LAYERS, NORMS

LOG, RESULT, ENVIRONMENT = "log.jsonl", "result.json", "environment.json"
_CHANGES = {
    "moved": ("What each step changed", "The norm of the change by the last step before a measurement, natural units."),
    "updates": ("What the next step can change", "A bound on the change by the next step, promised, in natural units."),
}
_SPEEDS = {
    "tokens_per_second": ("Throughput", "tokens per second", "Over the steps since the record before."),
    "optimizer_share": ("Optimizer's share of a step", "share of the time", "The optimizer's part of a whole step."),
    "lr": ("Learning rate", "learning rate", "That of the last step before the record."),
}
POINTS = 15_000
"""Numbers of a kind in the page: steps are left out evenly above that, so that it stays small."""


def page(directory: Path, config: Mapping[str, Any]) -> Page:
    """Describe a training run, finished or not.

    Args:
        directory: of `surefoot train`.
        config: of the run.

    Returns:
        The page.

    Raises:
        ValueError: a file is damaged.
    """
    log = read_lines(directory / LOG, ("step",))
    result, layers = (_read(directory / name) for name in (RESULT, LAYERS))
    lines = read_lines(directory / NORMS, ("step", "norms")) if layers else []
    summary = norms.summarise(directory) if lines else {"kinds": [], "alarms": []}
    step = log[-1]["step"] if log else 0
    state = f"step {step} of {config['steps']}"
    if result:
        state = (
            f"diverged after {result['steps']} steps" if result["diverged"] else f"finished: {result['steps']} steps"
        )
    charts = [*_losses(log), *_layers(layers, lines), *_speed(log)]
    tables = []
    if lines:
        tables.append(Table("Norms by kind of layer", *norms.cells(summary), [norms.note(summary)]))
        tables += [_alarms(summary["alarms"])] if summary["alarms"] else []
    details = {"Configuration": vega.flat(config), "Machine and versions": _read(directory / ENVIRONMENT)}
    facts = _facts(log, result, summary)
    return Page(directory.name, f"training of {config['model']}", state, facts, charts, tables, details)


def _read(path: Path) -> dict[str, Any]:
    """The content of a JSON file; empty where there is none."""
    try:
        return configs.read(path)
    except FileNotFoundError:
        return {}


def _facts(log: Sequence[Record], result: Mapping[str, Any], summary: Mapping[str, Any]) -> list[Fact]:
    last: Mapping[str, Any] = log[-1] if log else {}
    validated = [record for record in log if record.get("val_loss") is not None]
    if result.get("val_loss") is not None:
        loss = Fact("Validation loss", f"{result['val_loss']:.4f}", "nats, at the end")
    elif validated:
        loss = Fact("Validation loss", f"{validated[-1]['val_loss']:.4f}", f"nats, at step {validated[-1]['step']}")
    else:
        value = "none yet" if last.get("loss") is None else f"{last['loss']:.4f}"
        loss = Fact("Training loss", value, f"nats, at step {last['step']}" if last else "")
    alarms, bounded = summary["alarms"], [kind for kind in summary["kinds"] if kind["bound"] is not None]
    norm = "inside their bands" if not alarms else f"{len(alarms)} alarm{'s' * (len(alarms) > 1)}"
    kinds = len(summary["kinds"])
    note = f"{len(bounded)} of {kinds} kinds of layer have a bound" if kinds else "not measured yet"
    facts = [loss, Fact("Norms", norm if kinds else "not measured yet", note if kinds else "")]
    if last.get("tokens_per_second"):
        facts.append(Fact("Throughput", f"{last['tokens_per_second']:,.0f} tokens/s", "at the end of the log"))
    if last.get("optimizer_share") is not None:
        used = "" if last.get("utilisation") is None else f"; {last['utilisation']:.1%} of the devices' FLOPs are used"
        facts.append(Fact("Optimizer's share of a step", f"{last['optimizer_share']:.1%}", f"of the time{used}"))
    return facts


def _losses(log: Sequence[Record]) -> list[Chart]:
    named = {"loss": "training", "val_loss": "validation", "val_loss_average": "validation, averaged weights"}
    rows = [
        (record["step"], record[key], name)
        for key, name in named.items()
        for record in log
        if record.get(key) is not None
    ]
    columns, there = vega.columns(("step", "loss", "of"), rows), dict.fromkeys(row[2] for row in rows)
    chart = _lines(
        "Loss",
        "Training loss of a batch, and validation loss where it was measured.",
        columns,
        "loss (nats)",
        "of",
        there,
    )
    return [chart] if rows else []


def _layers(layers: Mapping[str, Any], lines: Sequence[Record]) -> list[Chart]:
    if not lines:
        return []
    every = max(1, len(lines) * len(layers) // POINTS + 1)
    kept = [line for i, line in enumerate(lines) if i % every == 0 or i == len(lines) - 1 or "alarms" in line]
    roles = norms.by_role(layers, kept)
    roles = {role: roles[role] for role in sorted(roles, key=lambda role: role != "linear")}  # of most layers, first
    names = [name for curves in roles.values() for name in curves]
    choices = [Choice(f"every {role} layer ({len(curves)})", {"role": role}, "kinds") for role, curves in roles.items()]
    choices += [Choice(name, {"layer": name}, role) for role, curves in roles.items() for name in curves]
    alarms = {(line["step"], alarm["layer"]): alarm["reason"] for line in kept for alarm in line.get("alarms", [])}
    rows = [
        (role, name, line["step"], _finite(value), *_band(layers[name]), alarms.get((line["step"], name)))
        for role, curves in roles.items()
        for name, curve in curves.items()
        for line, value in zip(kept, curve, strict=True)
    ]
    columns = vega.columns(("role", "layer", "step", "norm", "band", "kind", "alarm"), rows)
    charts = [_norms(columns, choices)]
    for key, (title, what) in _CHANGES.items():
        measured = [
            (layers[name]["role"], name, line["step"], line[key][name])
            for name in names
            for line in kept
            if (line.get(key) or {}).get(name) is not None
        ]
        if measured:
            own = vega.columns(("role", "layer", "step", "change"), measured)
            there = {row[1] for row in measured}
            kinds = {row[0] for row in measured}
            some = [c for c in choices if c.where.get("layer") in there or c.where.get("role") in kinds]
            charts.append(_lines(title, what, own, "norm of the change", "layer", (), some))
    return charts


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None


def _band(layer: Mapping[str, Any]) -> tuple[float, str]:
    """The end of the band that a layer's norm should not leave, in the role's unit, and whether it is promised."""
    kind = "bound" if layer["bound"] else "limit"
    return layer[kind] / layer["unit"], kind


def _norms(columns: Mapping[str, Sequence[Any]], choices: Sequence[Choice]) -> Chart:
    shown = vega.tooltip(
        layer="layer", step="step", norm="norm|.4g", band="end of its band|.4g", kind="which is a", alarm="alarm"
    )
    norm, one = vega.number("norm", "norm, in the role's unit"), {"field": "layer"}
    dash = {"domain": ["bound", "limit"], "range": [[6, 3], [2, 3]]}
    ends = {"field": "kind", "title": "end of the band", "scale": dash}
    band = {"y": vega.number("band", ""), "detail": one, "strokeDash": ends, "color": {"value": "var(--ink)"}}
    blue = {"y": norm, "detail": one, "color": {"value": "var(--s0)"}}
    alarm = {"y": norm, "color": {"value": "var(--bad)"}, "tooltip": shown}
    layers = [
        vega.layer("line", blue, strokeWidth=1.5, opacity=0.8),
        vega.points({**blue, "tooltip": shown}, size=22),
        vega.layer("line", band, strokeWidth=2),
        vega.crosses(alarm, "datum.alarm != null"),
    ]
    return Chart(
        "Norms",
        "A line per layer, in natural units; dashed: a bound that is promised; dotted: a limit above which an alarm is "
        "raised; a cross is an alarm.",
        {"encoding": {"x": vega.steps()}, "layer": layers},
        columns,
        choices,
        axes={"y": vega.scales()},
    )


def _speed(log: Sequence[Record]) -> list[Chart]:
    charts = []
    for key, (title, unit, what) in _SPEEDS.items():
        rows = [(record["step"], record[key], title) for record in log if record.get(key) is not None]
        if rows:
            charts.append(_lines(title, what, vega.columns(("step", key, "of"), rows), unit, "of", ()))
    return charts


def _alarms(alarms: Sequence[Mapping[str, Any]]) -> Table:
    head = ["step", "layer", "norm", "limit", "reason"]
    rows = [
        [
            str(alarm["step"]), alarm["layer"], "not finite" if alarm["norm"] is None else f"{alarm['norm']:.3g}",
            f"{alarm['limit']:.3g}", alarm["reason"],
        ]
        for alarm in alarms
    ]  # fmt: skip
    return Table("Alarms", head, rows)


def _lines(
    title: str, description: str, columns: Mapping[str, Sequence[Any]], unit: str, by: str,
    names: Any, choices: Sequence[Choice] = (),
) -> Chart:  # fmt: skip
    """A line over the steps for each value of a column; named in a legend where names are given."""
    value = next(name for name in columns if name not in ("step", "role", by))
    marks: dict[str, Any] = {"detail": {"field": by}, "color": {"value": "var(--s0)"}}
    if names:
        marks = vega.series(by, "", list(names))
    shown = vega.tooltip(**{by: by if by == "layer" else "of", "step": "step", value: f"{unit}|.4g"})
    drawn = {"x": vega.steps(), "y": vega.number(value, unit), **marks}
    shape = {"shape": drawn.pop("shape")} if names else {}
    layers = [vega.layer("line", strokeWidth=1.5, opacity=0.8), vega.points({"tooltip": shown, **shape}, size=22)]
    spec = {"encoding": drawn, "layer": layers}
    axes = {"y": dict(reversed(vega.scales().items()))}
    return Chart(title, description, spec, columns, choices, axes=axes)
