"""The norms of a training run as a table and as a picture."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from surefoot.experiment.norms import LAYERS, NORMS
from surefoot.experiment.records import Record, read_lines
from surefoot.experiment.report import aligned

PICTURE = "norms.png"
COLUMNS = 3  # of panels, at most
_INK, _PALE, _RED = "#222222", "#b0b0b0", "#c0392b"

Curves = Mapping[str, list[float]]


def load(directory: Path) -> tuple[dict[str, Any], list[Record]]:
    """Layers by name, and the lines of `norms.jsonl`.

    Raises:
        ValueError: there are none.
    """
    lines = read_lines(directory / NORMS)
    if not lines:
        raise ValueError(f"{directory} has no norms yet: {NORMS} is empty or missing")
    return json.loads((directory / LAYERS).read_text(encoding="utf-8")), lines


def summarise(directory: Path) -> dict[str, Any]:
    """Of each kind of layer the largest norm at the first look, at any and at the last, and the alarms.

    Raises:
        ValueError: no norms there.
    """
    layers, lines = load(directory)
    alarms = [{"step": line["step"], **alarm} for line in lines for alarm in line.get("alarms", [])]
    return {"steps": lines[-1]["step"], "kinds": _kinds(layers, lines, alarms), "alarms": alarms}


def _kinds(layers: Mapping[str, Any], lines: Sequence[Record], alarms: Sequence[Record]) -> list[dict[str, Any]]:
    kinds = []
    for role, curves in _by_role(layers, lines).items():
        top = [max(values) for values in zip(*curves.values(), strict=True)]
        largest = max(curves, key=lambda name: max(curves[name]))
        kinds.append({
            "role": role,
            "layers": len(curves),
            "first": _finite(top[0]),
            "largest": _finite(max(top)),
            "largest_layer": largest,
            "last": _finite(top[-1]),
            "bound": layers[largest]["bound"] and layers[largest]["bound"] / layers[largest]["unit"],
            "limit": layers[largest]["limit"] / layers[largest]["unit"],
            "alarms": sum(layers[alarm["layer"]]["role"] == role for alarm in alarms),
        })  # fmt: skip
    return kinds


def _by_role(layers: Mapping[str, Any], lines: Sequence[Record]) -> dict[str, dict[str, list[float]]]:
    """Role -> layer -> its norms over the lines, in the role's unit; inf where it was not finite."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in lines[0]["norms"]:
        lower = [line["norms"][name][0] for line in lines]
        curve = [math.inf if value is None else value / layers[name]["unit"] for value in lower]
        found.setdefault(layers[name]["role"], {})[name] = curve
    return found


def statement(summary: Mapping[str, Any]) -> str:
    """The table and the alarms, for a terminal.

    >>> kind = {"role": "linear", "layers": 12, "first": 1.0, "largest": 11.5, "largest_layer": "up.weight",
    ...         "last": 11.0, "bound": None, "limit": 10.0, "alarms": 1}
    >>> alarm = {"step": 40, "layer": "up.weight", "norm": 11.5, "limit": 10.0, "reason": "limit"}
    >>> print(statement({"steps": 120, "kinds": [kind], "alarms": [alarm]}).splitlines()[2])
    | linear | 12     | 1.00  | 11.5    | up.weight | 11.0 | none  | 10.0  | 1      |
    """
    head = ["role", "layers", "first", "largest", "of", "last", "bound", "limit", "alarms"]
    keys = ["role", "layers", "first", "largest", "largest_layer", "last", "bound", "limit", "alarms"]
    rows = [[_cell(key, kind[key]) for key in keys] for kind in summary["kinds"]]
    notes = [
        f"{summary['steps']} steps; the largest norm of each kind, in natural units (a head's over log V).",
        *(_sentence(alarm) for alarm in summary["alarms"]),
    ]
    return "\n".join([aligned(head, rows), "", *notes])


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "none" if key == "bound" else "not finite"
    return f"{value:#.3g}" if isinstance(value, float) else str(value)


def _sentence(alarm: Mapping[str, Any]) -> str:
    norm = "not finite" if alarm["norm"] is None else f"{alarm['norm']:.3g}"
    return (
        f"alarm at step {alarm['step']}: {alarm['layer']}, norm {norm}, limit {alarm['limit']:.3g} ({alarm['reason']})"
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def figure(directory: Path) -> Path:
    """Draw ``norms.png``: norm over step, a panel per kind of layer, a line per layer from first (dark) to last.

    The bound is dashed, the limit where there is no bound dotted; a cross is an alarm.

    Raises:
        ValueError: no norms there.
    """
    layers, lines = load(directory)
    roles = _by_role(layers, lines)
    columns = min(COLUMNS, len(roles))
    rows = math.ceil(len(roles) / columns)
    drawing = Figure(figsize=(0.6 + 3.2 * columns, 0.5 + 2.5 * rows), layout="constrained", dpi=200)
    panels = drawing.subplots(rows, columns, squeeze=False, sharex=True).flatten()
    for panel, (role, curves) in zip(panels, roles.items(), strict=False):
        _panel(panel, role, curves, layers, lines)
    for panel in panels[len(roles) :]:
        panel.set_visible(False)
    drawing.supxlabel("step", fontsize=10, color=_INK)
    drawing.supylabel("norm, in the role's unit", fontsize=10, color=_INK)
    path = directory / PICTURE
    drawing.savefig(path)
    return path


def _panel(panel: Axes, role: str, curves: Curves, layers: Mapping[str, Any], lines: Sequence[Record]) -> None:
    steps = [line["step"] for line in lines]
    for i, (name, curve) in enumerate(curves.items()):
        shown = [value if 0 < value < math.inf else math.nan for value in curve]
        colour = colormaps["viridis"](0.9 * i / max(1, len(curves) - 1))
        panel.plot(steps, shown, ".-", color=colour, linewidth=0.9, markersize=2, zorder=2)
        told = [i for i, line in enumerate(lines) if name in {alarm["layer"] for alarm in line.get("alarms", [])}]
        panel.plot([steps[i] for i in told], [shown[i] for i in told], "x", color=_RED, markersize=6, zorder=3)
    bounds = {layers[name]["bound"] / layers[name]["unit"] for name in curves if layers[name]["bound"]}
    limits = {layers[name]["limit"] / layers[name]["unit"] for name in curves if not layers[name]["bound"]}
    for levels, style in ((bounds, "--"), (limits, ":")):
        for level in levels:
            panel.axhline(level, linestyle=style, color=_INK, linewidth=1.0, zorder=1)
    panel.set_yscale("log", base=2)
    panel.yaxis.set_major_formatter("{x:g}")
    panel.set_title(f"{role} ({len(curves)})", fontsize=10, color=_INK)
    panel.tick_params(labelsize=8, color=_PALE, labelcolor=_INK)
    panel.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
