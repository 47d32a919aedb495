"""What the examples share: `python examples/NAME.py --picture FILE.png` draws what the run found into a file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path


class Picture:
    """The file that `--picture` names; without the option nothing is drawn, and matplotlib is not needed."""

    def __init__(self, text: str | None) -> None:
        parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw into this file")
        self.file = parser.parse_args().picture

    def draw(self, x: str, y: str, lines: Mapping[str, Sequence[Sequence[float]]], style: str = "-", **axes) -> None:
        """Draw lines, each `[heights]` by step or `[places, heights]`, with a legend; `axes` are matplotlib's."""
        if self.file is None:
            return
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 3.6), layout="constrained")
        panel = figure.subplots()
        for label, line in lines.items():
            panel.plot(*line, style, label=label, markersize=4)
        panel.set(xlabel=x, ylabel=y, **axes)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#e6e6e6")
        panel.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        figure.savefig(self.file, dpi=100)
