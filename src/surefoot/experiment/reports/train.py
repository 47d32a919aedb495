"""A training run as a table of norms and as a page: loss, norms against their bounds, updates, alarms, throughput."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import altair as alt

from surefoot.experiment import configs
from surefoot.experiment.files import Record, finite_or_none, read_lines
from surefoot.experiment.reports import charts
from surefoot.experiment.reports.page import Chart, Choice, Fact, Page, Table
from surefoot.experiment.reports.style import TRAINING, estimate, training
from surefoot.experiment.training.norm_log import LAYERS, NORMS

LOG, RESULT, ENVIRONMENT = "log.jsonl", "result.json", "environment.json"
_CHANGES = {
    "moved": ("What each step changed", "The norm of the change by the last step before a measurement, natural units."),
    "updates": ("What the next step can change", "A bound on the change by the next step, promised, in natural units."),
}
_LOSSES = {"loss": "training", "val_loss": "validation", "val_loss_average": "validation, averaged weights"}
_SPEEDS = {
    "tokens_per_second": ("Throughput", "tokens per second", "Over the steps since the record before."),
    "optimizer_share": ("Optimizer's share of a step", "share of the time", "The optimizer's part of a whole step."),
    "lr": ("Learning rate", "learning rate", "That of the last step before the record."),
}
OCTAVES = 2.0
"""A panel of norms spans at least these, so that rounding cannot be taken for growth."""
POINTS = 15_000
"""Numbers of a kind in the page: steps are left out evenly above that, so that it stays small."""


def summarise(directory: Path) -> dict[str, Any]:
    """Reduce a run's norms to one row per role, and list its alarms.

    Args:
        directory: of a run of `surefoot train`.

    Returns:
        `steps`; `kinds`, per role the largest norm of its layers at the first line, over all lines and at the last, in
        the role's unit; `alarms`, in the order of steps.

    Raises:
        ValueError: `norms.jsonl` is empty, missing or damaged.
    """
    if not (lines := read_lines(directory / NORMS, {"step": int, "norms": dict})):
        raise ValueError(f"{directory} has no norms yet: {NORMS} is empty or missing")
    layers = configs.read(directory / LAYERS)
    alarms = [{"step": line["step"], **alarm} for line in lines for alarm in line.get("alarms", [])]
    kinds = []
    for role, curves in by_role(layers, lines).items():
        top = [max(values) for values in zip(*curves.values(), strict=True)]
        name = max(curves, key=lambda name: max(curves[name]))
        bound, limit = (layers[name][end] and layers[name][end] / layers[name]["unit"] for end in ("bound", "limit"))
        start, largest, last = map(finite_or_none, (top[0], max(top), top[-1]))
        kinds.append({
            "role": role, "layers": len(curves), "start": start, "largest": largest, "largest_layer": name,
            "last": last, "bound": bound, "limit": limit,
            "alarms": sum(layers[alarm["layer"]]["role"] == role for alarm in alarms),
        })  # fmt: skip
    return {"steps": lines[-1]["step"], "kinds": kinds, "alarms": alarms}


def by_role(layers: Mapping[str, Any], lines: Sequence[Record]) -> dict[str, dict[str, list[float]]]:
    """Sort a run's norms: role -> layer -> its norm at every line, in the role's unit; inf where it was not finite."""
    roles: dict[str, dict[str, list[float]]] = {}
    for name in lines[0]["norms"]:
        lower = [line["norms"][name][0] for line in lines]
        curve = [math.inf if value is None else value / layers[name]["unit"] for value in lower]
        roles.setdefault(layers[name]["role"], {})[name] = curve
    return roles


def statement(summary: Mapping[str, Any]) -> str:
    """Format the table and the alarms, for a terminal.

    Args:
        summary: of `summarise`.

    Returns:
        A padded Markdown table, a note, and a line per alarm.

    >>> kind = {"role": "linear", "layers": 12, "start": 1.0, "largest": 11.5, "largest_layer": "up.weight",
    ...         "last": 11.0, "bound": None, "limit": 10.0, "alarms": 1}
    >>> alarm = {"step": 40, "layer": "up.weight", "norm": 11.5, "limit": 10.0, "reason": "limit"}
    >>> print(statement({"steps": 120, "kinds": [kind], "alarms": [alarm]}).splitlines()[2])
    | linear | 12     | 1     | 11.5    | up.weight | 11   | none  | 10    | 1      |
    """
    alarms = [
        f"alarm at step {step}: {layer}, norm {norm}, limit {limit} ({reason})"
        for step, layer, norm, limit, reason in alarm_table(summary).rows
    ]
    return "\n".join([str(table(summary)), *alarms])


def table(summary: Mapping[str, Any]) -> Table:
    """Tabulate the norms of each role."""
    keys = ["role", "layers", "start", "largest", "largest_layer", "last", "bound", "limit", "alarms"]
    rows = [[_cell(kind[key], "none" if key == "bound" else "not finite") for key in keys] for kind in summary["kinds"]]
    note = f"{summary['steps']} steps; the largest norm of each kind, in natural units (a head's over log V)."
    return Table("Norms by kind of layer", [key.replace("largest_layer", "of") for key in keys], rows, [note])


def alarm_table(summary: Mapping[str, Any]) -> Table:
    """List the alarms."""
    head = ["step", "layer", "norm", "limit", "reason"]
    return Table("Alarms", head, [[_cell(alarm[key]) for key in head] for alarm in summary["alarms"]])


def _cell(value: Any, none: str = "not finite") -> str:
    return none if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def page(directory: Path) -> Page:
    """Describe a training run, finished or not.

    Args:
        directory: of `surefoot train`.

    Returns:
        The page.

    Raises:
        ValueError: a file is damaged.
    """
    _, config = configs.kind_of(directory)
    log = read_lines(directory / LOG, {"step": int})
    result, layers, environment = (configs.read_if_there(directory / name) for name in (RESULT, LAYERS, ENVIRONMENT))
    lines = read_lines(directory / NORMS, {"step": int, "norms": dict}) if layers else []
    summary = summarise(directory) if lines else {"kinds": [], "alarms": []}
    state = f"step {log[-1]['step'] if log else 0} of {config['steps']}"
    if result:
        state = f"{'diverged after' if result['diverged'] else 'finished:'} {result['steps']} steps"
    what = "Training loss of a batch, and validation loss where it was measured."
    losses = _logged(log, "Loss", "loss (nats)", what, _LOSSES)
    speeds = [chart for key, said in _SPEEDS.items() for chart in _logged(log, *said, {key: said[0]})]
    tables = [table(summary)] if lines else []
    if summary["alarms"]:
        tables.append(alarm_table(summary))
    details = {"Configuration": charts.flat(config), "Machine and versions": environment}
    kind, drawn = f"training of {config['model']}", [*losses, *_layers(layers, lines), *speeds]
    return Page(directory.name, kind, state, _facts(log, result, summary), drawn, tables, details)


def _facts(log: Sequence[Record], result: Mapping[str, Any], summary: Mapping[str, Any]) -> list[Fact]:
    last: Mapping[str, Any] = log[-1] if log else {}
    losses = [(record.get("val_loss"), f"nats, at step {record['step']}") for record in log]
    loss, trained = result.get("val_loss"), result.get("train_loss")
    end = loss, f"nats, at the end; {TRAINING} {training(trained, loss)}" if trained else "nats, at the end"
    validated = [loss for loss in [*losses, end] if loss[0] is not None]
    loss, note = validated[-1] if validated else (last.get("loss"), f"nats, at step {last['step']}" if last else "")
    alarms, kinds = len(summary["alarms"]), summary["kinds"]
    norm = f"{alarms} alarm{'s' * (alarms > 1)}" if alarms else "inside their bands"
    bounded = f"{sum(kind['bound'] is not None for kind in kinds)} of {len(kinds)} kinds of layer have a bound"
    facts = [
        Fact("Validation loss" if validated else "Training loss", estimate(loss, None, ".4f", "none yet"), note),
        Fact("Norms", norm, bounded) if kinds else Fact("Norms", "not measured yet"),
    ]
    if last.get("tokens_per_second"):
        facts.append(Fact("Throughput", f"{last['tokens_per_second']:,.0f} tokens/s", "at the end of the log"))
    if last.get("optimizer_share") is not None:
        used = "" if last.get("utilisation") is None else f"; {last['utilisation']:.1%} of the devices' FLOPs are used"
        facts.append(Fact("Optimizer's share of a step", f"{last['optimizer_share']:.1%}", f"of the time{used}"))
    return facts


def _logged(log: Sequence[Record], title: str, unit: str, what: str, named: Mapping[str, str]) -> list[Chart]:
    """A line for each of these keys of the log's records, if any has values; several have a legend."""
    rows = [
        (record["step"], record[key], name)
        for key, name in named.items()
        for record in log
        if record.get(key) is not None
    ]
    columns = charts.columns(("step", next(iter(named)), "of"), rows)
    names = dict.fromkeys(columns["of"]) if len(named) > 1 else ()
    return [_lines(title, what, columns, unit, names)] if rows else []


def _layers(layers: Mapping[str, Any], lines: Sequence[Record]) -> list[Chart]:
    if not lines:
        return []
    every = len(lines) * len(layers) // POINTS + 1
    kept = [line for i, line in enumerate(lines) if i % every == 0 or i == len(lines) - 1 or "alarms" in line]
    roles = sorted(by_role(layers, kept).items(), key=lambda role: role[0] != "linear")  # of most layers, first
    curves = [(role, name, curve) for role, own in roles for name, curve in own.items()]
    bands = {name: _band(layers[name]) for _, name, _ in curves}
    choices = [
        Choice(f"every {role} layer ({len(own)})", {"role": role}, "kinds", _domain(own, bands)) for role, own in roles
    ]
    choices += [Choice(name, {"layer": name}, role, _domain({name: curve}, bands)) for role, name, curve in curves]
    alarms = {(line["step"], alarm["layer"]): alarm["reason"] for line in kept for alarm in line.get("alarms", [])}
    rows = [
        (role, name, line["step"], value if value < math.inf else None, *bands[name], alarms.get((line["step"], name)))
        for role, name, curve in curves
        for line, value in zip(kept, curve, strict=True)
    ]
    drawn = [_norms(charts.columns(("role", "layer", "step", "norm", "band", "kind", "alarm"), rows), choices)]
    for key, (title, what) in _CHANGES.items():
        changes = [
            (role, name, line["step"], line[key][name])
            for role, name, _ in curves
            for line in kept
            if (line.get(key) or {}).get(name) is not None
        ]
        if changes:
            there = {part for role, name, *_ in changes for part in (("role", role), ("layer", name))}
            some = [replace(choice, domains={}) for choice in choices if choice.where.items() <= there]
            columns = charts.columns(("role", "layer", "step", "change"), changes)
            drawn.append(_lines(title, what, columns, "norm of the change", choices=some))
    return drawn


def _band(layer: Mapping[str, Any]) -> tuple[float, str]:
    """The end of the band that a layer's norm should not leave, in the role's unit, and whether it is promised."""
    kind = "bound" if layer["bound"] else "limit"
    return layer[kind] / layer["unit"], kind


def _domain(curves: Mapping[str, Sequence[float]], bands: Mapping[str, tuple[float, str]]) -> dict[str, list[float]]:
    """The range of the axis of norms, which includes the ends of their bands."""
    drawn = [value for curve in curves.values() for value in curve if 0 < value < math.inf]
    low, high = (math.log2(end([*drawn, *(bands[name][0] for name in curves)])) for end in (min, max))
    room = 0.05 * (high - low) + max(0.0, OCTAVES - (high - low)) / 2
    return {"y": [2 ** (low - room), 2 ** (high + room)]}


def _norms(columns: Mapping[str, Sequence[Any]], choices: Sequence[Choice]) -> Chart:
    shown = charts.tooltip("layer", "step", "norm|.4g", "band=end of its band|.4g", "kind=which is a", "alarm")
    title, layer = "norm, in the role's unit", alt.Detail("layer:N")
    norm, at, end = (alt.Y(field, type="quantitative", title=title) for field in ("shown", "at", "band"))
    first_to_last = alt.Scale(scheme=alt.SchemeParams(name="viridis", extent=[0.15, 0.85]))
    color = alt.Color("layer:O", sort=None, scale=first_to_last, legend=None)
    dash = alt.Scale(domain=["bound", "limit"], range=[[6, 3], [2, 3]])
    ends = alt.StrokeDash("kind:N", title="end of the band", scale=dash)
    drawn = charts.rows().transform_calculate(shown="datum.norm > 0 ? datum.norm : null")  # the axis is logarithmic
    alarm = charts.crosses("datum.alarm != null").transform_calculate(at="datum.norm > 0 ? datum.norm : datum.band")
    layers = [
        drawn.mark_line(strokeWidth=1.5, opacity=0.8).encode(norm, color),
        drawn.mark_point(filled=True, size=22).encode(norm, color, tooltip=shown),
        charts.rows().mark_line(strokeWidth=2, color="var(--ink)").encode(end, layer, ends),
        alarm.encode(at, color=alt.value("var(--bad)"), tooltip=shown),
    ]
    what = (
        "A line per layer, in natural units; dashed: a bound that is promised; dotted: a limit above which an alarm is "
        "raised; a cross is an alarm."
    )
    spec, axes = charts.spec(*layers, x=charts.steps()), {"y": charts.scales()}
    return Chart("Norms", what, spec, columns, choices, axes=axes, file="norms.png")


def _lines(
    title: str, what: str, columns: Mapping[str, Sequence[Any]], unit: str, names: Iterable[str] = (),
    choices: Sequence[Choice] = (),
) -> Chart:  # fmt: skip
    """A line over the steps for each layer or kind of number, which a legend names where names are given."""
    by = "layer" if "layer" in columns else "of"
    value = next(name for name in columns if name not in ("step", "role", by))
    mark: Any = {"detail": alt.Detail(by, type="nominal"), "color": alt.value("var(--s0)")}
    line, point = charts.rows().mark_line(strokeWidth=1.5, opacity=0.8), charts.rows().mark_point(filled=True, size=22)
    if names:
        color, shape = charts.series(by, "", names)
        mark, point = {"color": color}, point.encode(shape)
    shown = charts.tooltip(by, "step", f"{value}={unit}|.4g")
    y = alt.Y(value, type="quantitative", title=unit)
    spec = charts.spec(line, point.encode(tooltip=shown), x=charts.steps(), y=y, **mark)
    return Chart(title, what, spec, columns, choices, axes={"y": charts.scales("linear")})
