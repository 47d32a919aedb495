"""The gains of the variants over their base, from the committed results."""

from __future__ import annotations

from pathlib import Path

from surefoot.experiment.reports.style import markdown, plus_minus
from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.summary import points
from surefoot.experiment.sweep.sweep import load

HERE = Path(__file__).parent
BASE, BIASED = "base", "with biases, bias 1.0"


def table(name: str) -> str:
    """Format every variant's gain over the base in nats, with intervals paired over seeds, as a table; best first."""
    summary, records = load(HERE / name)
    widths = summary["config"]["widths"]
    ranked = []
    for row in summary["recipes"]:
        variant = row["recipe"]
        base = BIASED if variant.startswith("with biases") else BASE
        curves = [[points(records, r, width) for r in (base, variant)] for width in widths]
        gains = [fit.difference(*map(fit.lowest, pair)) for pair in curves]
        ranked.append((-sum(gain.value or 0 for gain in gains), row, gains))
    head = ["setting", *(f"{what} at {width}" for width in widths for what in ("best lr", "gain in nats"))]
    rows = []
    for _, row, gains in sorted(ranked, key=lambda entry: entry[0]):
        cells = [row["recipe"]]
        for rate, status, gain in zip(row["best_log2_lr"], row["status"], gains, strict=True):
            cells += [
                status if rate is None else f"2^{rate:.2f}",
                "none" if gain.value is None else f"{gain.value:+.3f}{plus_minus(gain.interval, 3)}",
            ]
        rows.append(cells)
    return markdown(head, rows, rule="---")
