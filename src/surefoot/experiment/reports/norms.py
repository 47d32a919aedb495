"""The norms of a training run as a table."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.experiment import configs
from surefoot.experiment.files import Record, finite_or_none, read_lines
from surefoot.experiment.reports.style import aligned
from surefoot.experiment.training.norm_log import LAYERS, NORMS


def load(directory: Path) -> tuple[dict[str, Any], list[Record]]:
    """Read a run's norms.

    Args:
        directory: of a run of `surefoot train`.

    Returns:
        `(layers, lines)`: the content of `layers.json`, by layer name, and the records of `norms.jsonl`.

    Raises:
        ValueError: `norms.jsonl` is empty, missing or damaged.
    """
    lines = read_lines(directory / NORMS, ("step", "norms"))
    if not lines:
        raise ValueError(f"{directory} has no norms yet: {NORMS} is empty or missing")
    return configs.read(directory / LAYERS), lines


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
    layers, lines = load(directory)
    alarms = [{"step": line["step"], **alarm} for line in lines for alarm in line.get("alarms", [])]
    return {"steps": lines[-1]["step"], "kinds": _kinds(layers, lines, alarms), "alarms": alarms}


def _kinds(layers: Mapping[str, Any], lines: Sequence[Record], alarms: Sequence[Record]) -> list[dict[str, Any]]:
    kinds = []
    for role, curves in by_role(layers, lines).items():
        top = [max(values) for values in zip(*curves.values(), strict=True)]
        largest = max(curves, key=lambda name: max(curves[name]))
        kinds.append({
            "role": role,
            "layers": len(curves),
            "start": finite_or_none(top[0]),
            "largest": finite_or_none(max(top)),
            "largest_layer": largest,
            "last": finite_or_none(top[-1]),
            "bound": layers[largest]["bound"] and layers[largest]["bound"] / layers[largest]["unit"],
            "limit": layers[largest]["limit"] / layers[largest]["unit"],
            "alarms": sum(layers[alarm["layer"]]["role"] == role for alarm in alarms),
        })  # fmt: skip
    return kinds


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
    return "\n".join([aligned(*cells(summary)), "", note(summary), *map(_sentence, summary["alarms"])])


def cells(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table's columns and, per role, its cells."""
    head = ["role", "layers", "start", "largest", "of", "last", "bound", "limit", "alarms"]
    keys = ["role", "layers", "start", "largest", "largest_layer", "last", "bound", "limit", "alarms"]
    return head, [[_cell(key, kind[key]) for key in keys] for kind in summary["kinds"]]


def note(summary: Mapping[str, Any]) -> str:
    """Return what the table's numbers are."""
    return f"{summary['steps']} steps; the largest norm of each kind, in natural units (a head's over log V)."


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "none" if key == "bound" else "not finite"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _sentence(alarm: Mapping[str, Any]) -> str:
    norm = "not finite" if alarm["norm"] is None else f"{alarm['norm']:.3g}"
    return (
        f"alarm at step {alarm['step']}: {alarm['layer']}, norm {norm}, limit {alarm['limit']:.3g} ({alarm['reason']})"
    )
