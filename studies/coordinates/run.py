"""The coordinate check of every method: do activations and their changes keep their size as the width grows?

    python studies/coordinates/run.py            # what is missing; resumes, 5 minutes on one core
    python studies/coordinates/run.py --table    # from the committed results, as in docs/stability.md

The demo's model at widths 64 to 256 (the natural recipes and AdamW to 512, as in `surefoot coordcheck`), and the
default and `beyond_mup` on the other reference models; ten steps at each method's own rate, three seeds or ten.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from surefoot.experiment.coordcheck import BAND, QUANTITIES, check
from surefoot.experiment.data.sources import load
from surefoot.experiment.reports.style import markdown
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.names import LOG2_LR

HERE = Path(__file__).parent
WIDTHS, SEEDS, STEPS = (64, 128, 256), (0, 1, 2), 10
WIDER = (
    "steady", "steady_soap", "beyond_mup", "moga_row", "moga_column", "scion", "sign_natural", "adamw", "mup_adamw",
)  # fmt: skip
TEN = tuple(range(10))
PARTS = {
    name: (name, "gpt", (*WIDTHS, 512) if name in WIDER else WIDTHS, TEN if name == "mup_adamw" else SEEDS)
    for name in LOG2_LR
} | {
    f"{name}_{model}": (name, model, (*WIDTHS, 512), range(seeds))
    for name in ("steady", "beyond_mup")
    for model, seeds in (("llama", 10), ("qwen", 10), ("moe", 10), ("tied", 3))
}
"""Directory -> method, model, widths, seeds: more where three cannot tell the slope from the edge of the band."""


def table() -> str:
    """Format the largest slope of every method, and how many leave the band, as a Markdown table."""
    head = [
        "method",
        "model",
        "learning rate",
        "widths",
        "largest slope at the start",
        "of the change",
        "outside 0.1",
        "verdict",
    ]
    rows = []
    for folder, (name, model, *_) in PARTS.items():
        path = HERE / folder / "coordcheck.json"
        if path.exists():
            summary = json.loads(path.read_text())
            slopes = [layer[quantity] for layer in summary["layers"] for quantity in QUANTITIES]
            outside = sum(slope["status"] not in ("inside", "zero") for slope in slopes)
            sizes = [largest(summary["layers"], quantity) for quantity in QUANTITIES]
            widths = f"{summary['widths'][0]} to {summary['widths'][-1]}"
            verdict = "passes" if summary["passes"] else "fails"
            rows.append([name, model, f"2^{LOG2_LR[name]:g}", widths, *sizes, f"{outside} of {len(slopes)}", verdict])
    return markdown(head, rows)


def largest(layers: list[dict[str, Any]], quantity: str) -> str:
    """Format the slope furthest from 0 and its layer, without logits that may fall at the start."""
    slopes = {}
    for layer in layers:
        slope, status = layer[quantity]["slope"], layer[quantity]["status"]
        if slope is not None and not (status == "inside" and abs(slope) > BAND):
            slopes[layer["layer"]] = slope
    name = max(slopes, key=lambda layer: abs(slopes[layer]))
    return f"{slopes[name]:+.2f} ({name})"


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only print the table")
    options = parser.parse_args()
    if not options.table:
        corpus = load(None)
        for folder, (name, model, widths, seeds) in PARTS.items():
            config = TrainConfig(
                data_order="random",
                model=model,
                method=name,
                lr=2.0 ** LOG2_LR[name],
                steps=STEPS,
                warmup=0.0,
                decay=0.0,
            )
            check(
                config,
                corpus,
                HERE / folder,
                widths,
                seeds,
                on_record=lambda record: print(record["width"], file=sys.stderr),
            )
    print(table())


if __name__ == "__main__":
    main()
