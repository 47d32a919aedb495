"""A finished coordinate check as a table and as a picture."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from surefoot.experiment.coordcheck import LOGITS, QUANTITIES
from surefoot.experiment.reports.style import INK, PALE, aligned, frame, plus_minus
from surefoot.experiment.sweep import fit

PICTURE = "coordcheck.png"
NAMED = 7  # lines outside the band that get a colour and a name in a panel: the steepest


def statement(summary: Mapping[str, Any]) -> str:
    """Format the slopes of each layer and the verdict, for a terminal.

    Args:
        summary: the content of `coordcheck.json`.

    Returns:
        A padded Markdown table, notes, and the verdict in the last line.

    >>> inside = {"status": "inside", "slope": 0.01, "ci": None, "log2_rms": [0.0, 0.01]}
    >>> outside = {"status": "outside", "slope": 1.0, "ci": None, "log2_rms": [0.0, 1.0]}
    >>> layers = [{"layer": "up", "start": inside, "change": outside}]
    >>> config = {"method": "adamw", "lr": 0.5, "steps": 10}
    >>> text = statement({"layers": layers, "passes": False, "band": 0.1, "widths": [64, 128], "seeds": [0],
    ...                   "config": config})
    >>> print(text.splitlines()[2])
    | up    | +0.01              | +1.00               | change          |
    """
    return "\n".join([aligned(*cells(summary)), "", *notes(summary), "", verdict(summary)])


def cells(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table's columns and, per layer, its cells."""
    rows = [[layer["layer"], *(_cell(layer[q]) for q in QUANTITIES), _leaves(layer)] for layer in summary["layers"]]
    return ["layer", "slope at the start", "slope of the change", "leaves the band"], rows


def verdict(summary: Mapping[str, Any]) -> str:
    """Say in one line whether the check passes, and how many of the failures may be noise."""
    slopes = list(_all(summary))
    wrong = [slope for slope in slopes if slope["status"] not in ("inside", "zero")]
    if summary["passes"]:
        return f"passes: all {len(slopes)} slopes within ±{summary['band']:g}"
    line = f"FAILS: {len(wrong)} of {len(slopes)} slopes leave ±{summary['band']:g}"
    reaching = [slope for slope in wrong if slope["ci"] and max(slope["ci"][0], -slope["ci"][1]) <= summary["band"]]
    more = f"; {len(reaching)} may be noise, their intervals reach into the band: more --seeds would tell"
    return line + (more if reaching else "")


def _all(summary: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for layer in summary["layers"]:
        yield from (layer[quantity] for quantity in QUANTITIES)


def _cell(fitted: Mapping[str, Any]) -> str:
    return fitted["status"] if fitted["slope"] is None else f"{fitted['slope']:+.2f}{plus_minus(fitted['ci'], 2)}"


def _leaves(layer: Mapping[str, Any]) -> str:
    return ", ".join(q for q in QUANTITIES if layer[q]["status"] not in ("inside", "zero"))


def notes(summary: Mapping[str, Any]) -> list[str]:
    """Return what the table's columns mean, in lines."""
    config, widths, n = summary["config"], summary["widths"], len(summary["seeds"])
    intervals = ": no intervals (they need three)" if n < fit.SEEDS_FOR_AN_INTERVAL else ", ± half a 95 % interval"
    return [
        "slope of log2 rms over log2 width: of each layer's output at the start, and of its change after",
        f"{config['steps']} steps of {config['method']} at lr {config['lr']:.4g}; "
        f"widths {' '.join(map(str, widths))}; n = {n} seed{'s' * (n > 1)}{intervals}.",
        f"The {LOGITS} may fall at the start (as width^-1/2, by design): there only growth leaves the band.",
    ]


def figure(summary: Mapping[str, Any], directory: Path) -> Path:
    """Draw `coordcheck.png`: RMS over width, a line per layer (mean over seeds), those outside the band in colour.

    Args:
        summary: the content of `coordcheck.json`.
        directory: where the picture is written.

    Returns:
        The picture's path.
    """
    drawing = Figure(figsize=(9.6, 3.6), layout="constrained", dpi=200)
    panels = drawing.subplots(1, len(QUANTITIES), squeeze=False)[0]
    for panel, quantity in zip(panels, QUANTITIES, strict=True):
        _panel(panel, summary, quantity)
    panels[0].set_ylabel("RMS", fontsize=10, color=INK)
    panels[0].set_title("activations at the start", fontsize=10, color=INK)
    panels[1].set_title(f"their change in {summary['config']['steps']} steps", fontsize=10, color=INK)
    drawing.supxlabel("width", fontsize=10, color=INK)
    drawing.suptitle(f"{summary['config']['method']}: {verdict(summary).split(';')[0]}", fontsize=11, color=INK)
    if any(panel.get_legend_handles_labels()[1] for panel in panels):
        drawing.legend(loc="outside right center", frameon=False, fontsize=8, title="outside the band")
    path = directory / PICTURE
    drawing.savefig(path)
    return path


def _panel(panel: Axes, summary: Mapping[str, Any], quantity: str) -> None:
    drawn = [(layer[quantity], layer["layer"]) for layer in summary["layers"] if layer[quantity]["slope"] is not None]
    drawn.sort(key=lambda pair: -abs(pair[0]["slope"]))
    outside = [name for fitted, name in drawn if fitted["status"] == "outside"][:NAMED]
    for fitted, name in drawn:
        named = name in outside
        colour = colormaps["tab10"](outside.index(name)) if named else PALE
        label = f"{name} {fitted['slope']:+.2f}" if named else None
        line = ".-" if quantity == "change" else ".--"
        panel.plot(
            summary["widths"], fitted["log2_rms"], line, color=colour, linewidth=1.4, label=label, zorder=2 + named
        )
    panel.set_xscale("log", base=2)
    panel.set_xticks(summary["widths"], map(str, summary["widths"]))
    panel.minorticks_off()
    panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"$2^{{{y:g}}}$"))
    frame(panel)
