"""A finished coordinate check as a table and as a picture."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from surefoot.experiment.coordcheck import LOGITS, QUANTITIES
from surefoot.experiment.reports.transfer import aligned, plus_minus
from surefoot.experiment.sweep import fit

PICTURE = "coordcheck.png"
NAMED = 7  # of a panel's lines outside the band, the steepest: they get a colour and a name of their own
_INK, _PALE = "#222222", "#b0b0b0"


def statement(summary: Mapping[str, Any]) -> str:
    """The slopes of each layer and the verdict, for a terminal.

    >>> inside = {"status": "inside", "slope": 0.01, "ci": None, "log2_rms": [0.0, 0.01]}
    >>> outside = {"status": "outside", "slope": 1.0, "ci": None, "log2_rms": [0.0, 1.0]}
    >>> layers = [{"layer": "up", "start": inside, "change": outside}]
    >>> config = {"method": "adamw", "lr": 0.5, "steps": 10}
    >>> text = statement({"layers": layers, "passes": False, "band": 0.1, "widths": [64, 128], "seeds": [0],
    ...                   "config": config})
    >>> print(text.splitlines()[2])
    | up    | +0.01              | +1.00               | change          |
    """
    rows = [[layer["layer"], *(_cell(layer[q]) for q in QUANTITIES), _leaves(layer)] for layer in summary["layers"]]
    head = ["layer", "slope at the start", "slope of the change", "leaves the band"]
    return "\n".join([aligned(head, rows), "", *_notes(summary), "", verdict(summary)])


def verdict(summary: Mapping[str, Any]) -> str:
    """Pass or fail in a line, and how sure that is."""
    judged = list(_all(summary))
    wrong = [found for found in judged if found["status"] not in ("inside", "zero")]
    if summary["passes"]:
        return f"passes: all {len(judged)} slopes within ±{summary['band']:g}"
    line = f"FAILS: {len(wrong)} of {len(judged)} slopes leave ±{summary['band']:g}"
    reaching = [found for found in wrong if found["ci"] and max(found["ci"][0], -found["ci"][1]) <= summary["band"]]
    more = f"; {len(reaching)} may be noise, their intervals reach into the band: more --seeds would tell"
    return line + (more if reaching else "")


def _all(summary: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for layer in summary["layers"]:
        yield from (layer[quantity] for quantity in QUANTITIES)


def _cell(found: Mapping[str, Any]) -> str:
    return found["status"] if found["slope"] is None else f"{found['slope']:+.2f}{plus_minus(found['ci'], 2)}"


def _leaves(layer: Mapping[str, Any]) -> str:
    return ", ".join(q for q in QUANTITIES if layer[q]["status"] not in ("inside", "zero"))


def _notes(summary: Mapping[str, Any]) -> list[str]:
    config, widths, n = summary["config"], summary["widths"], len(summary["seeds"])
    intervals = ": no intervals (they need three)" if n < fit.SEEDS_FOR_AN_INTERVAL else ", ± half a 95 % interval"
    return [
        "slope of log2 rms over log2 width: of each layer's output at the start, and of its change after",
        f"{config['steps']} steps of {config['method']} at lr {config['lr']:.4g}; "
        f"widths {' '.join(map(str, widths))}; n = {n} seed{'s' * (n > 1)}{intervals}.",
        f"The {LOGITS} may fall at the start (as width^-1/2, by design): there only growth leaves the band.",
    ]


def figure(summary: Mapping[str, Any], directory: Path) -> Path:
    """Draw ``coordcheck.png``: rms over width, a line per layer (mean over seeds), those outside the band in colour."""
    drawing = Figure(figsize=(9.6, 3.6), layout="constrained", dpi=200)
    panels = drawing.subplots(1, len(QUANTITIES), squeeze=False)[0]
    for panel, quantity in zip(panels, QUANTITIES, strict=True):
        _panel(panel, summary, quantity)
    panels[0].set_ylabel("RMS", fontsize=10, color=_INK)
    panels[0].set_title("activations at the start", fontsize=10, color=_INK)
    panels[1].set_title(f"their change in {summary['config']['steps']} steps", fontsize=10, color=_INK)
    drawing.supxlabel("width", fontsize=10, color=_INK)
    drawing.suptitle(f"{summary['config']['method']}: {verdict(summary).split(';')[0]}", fontsize=11, color=_INK)
    if any(panel.get_legend_handles_labels()[1] for panel in panels):
        drawing.legend(loc="outside right center", frameon=False, fontsize=8, title="outside the band")
    path = directory / PICTURE
    drawing.savefig(path)
    return path


def _panel(panel: Axes, summary: Mapping[str, Any], quantity: str) -> None:
    drawn = [(layer[quantity], layer["layer"]) for layer in summary["layers"] if layer[quantity]["slope"] is not None]
    drawn.sort(key=lambda pair: -abs(pair[0]["slope"]))
    outside = [name for found, name in drawn if found["status"] == "outside"][:NAMED]
    for found, name in drawn:
        named = name in outside
        colour = colormaps["tab10"](outside.index(name)) if named else _PALE
        label = f"{name} {found['slope']:+.2f}" if named else None
        line = ".-" if quantity == "change" else ".--"
        panel.plot(
            summary["widths"], found["log2_rms"], line, color=colour, linewidth=1.4, label=label, zorder=2 + named
        )
    panel.set_xscale("log", base=2)
    panel.set_xticks(summary["widths"], map(str, summary["widths"]))
    panel.minorticks_off()
    panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"$2^{{{y:g}}}$"))
    panel.tick_params(labelsize=9, color=_PALE, labelcolor=_INK)
    panel.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
