"""The norms of a training run as a table."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.experiment import configs
from surefoot.experiment.files import Record, finite_or_none, read_lines
from surefoot.experiment.reports.page import Table
from surefoot.experiment.training.norm_log import LAYERS, NORMS


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
    if not (lines := read_lines(directory / NORMS, ("step", "norms"))):
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
