"""The tables and figures of docs/transfer.md, docs/other-recipes.md and others, from the committed results, in seconds.

python studies/report.py            # rewrite the marked parts of the pages, and the figures
python studies/report.py --check    # exit code 1 if a page differs from the results
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator

from beyond import tables as beyond
from confirm import tables as confirmed
from defaults import gains
from pretrain import tables as pretrain
from sizes import tables as sizes
from sources import tables as sources
from surefoot.experiment.files import write_atomic
from surefoot.experiment.reports import report as run_report
from surefoot.experiment.reports.style import markdown, plus_minus
from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.summary import points
from surefoot.experiment.sweep.sweep import load
from transfer import run as transfer

ROOT = Path(__file__).parents[1]
MADE = ("transfer", "other-recipes", "stability", "how-to/migrating", "how-to/fine-tuning")
PAGES = [ROOT / "docs" / f"{name}.md" for name in MADE]
IMAGES = ROOT / "docs" / "images"
MARK = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def entry(name: str) -> dict[str, Any] | None:
    """Return the summary of a part of the transfer study; None while it is not finished."""
    path = transfer.HERE / name / "summary.json"
    return json.loads(path.read_text())["recipes"][0] if path.exists() else None


def rate(value: float | None, ci: Sequence[float] | None, status: str) -> str:
    """Format a best rate with its interval, or why there is none."""
    return status if value is None else f"2^{value:.2f}{plus_minus(ci, 2)}"


def rates(summary: dict[str, Any]) -> list[str]:
    """Format the best rates of all widths."""
    columns = (summary["best_log2_lr"], summary["best_log2_lr_ci"], summary["status"])
    return [rate(*cells) for cells in zip(*columns, strict=True)]


def signed(value: float | None, ci: Sequence[float] | None, digits: int) -> str:
    """Format a number with its sign and interval."""
    return "not known" if value is None else f"{value:+.{digits}f}{plus_minus(ci, digits)}"


def drift_and_regret(summary: dict[str, Any]) -> list[str]:
    """Format the drift in octaves and the regret in nats, two cells."""
    regret = summary["regret_nats"]
    missing = "diverged" if summary["regret_diverged"] else "not known"
    return [
        signed(summary["drift_octaves"], summary["drift_octaves_ci"], 2),
        missing if regret is None else f"{regret:.3f}{plus_minus(summary['regret_nats_ci'], 3)}",
    ]


def widths() -> str:
    """Every recipe at 150 steps."""
    rows = []
    for recipe in transfer.METHODS:
        if summary := entry(f"{recipe}_150"):
            rows.append([recipe, str(summary["seeds"]), *rates(summary), *drift_and_regret(summary)])
    rows.sort(key=lambda row: abs(float(row[-2].split()[0])) if row[-2][0] in "+-" else 99)
    head = ["recipe", "seeds", *(f"best lr at {w}" for w in transfer.WIDTHS), "drift in octaves", "regret at 256"]
    return markdown(head, rows)


def fresh_regret() -> str:
    """The narrowest and the widest optimum at the widest model, on seeds that neither was fitted to."""
    rows = []
    for part in transfer.REGRET:
        if not (part.directory / "summary.json").exists():
            continue
        narrow, wide = part.rates()
        curve = fit.curve(points(load(part.directory)[1], part.recipe, transfer.WIDTHS[-1]))
        transferred, best = curve[narrow] or {}, curve[wide] or {}
        cost = fit.difference(transferred, best)
        both = ((transferred, narrow), (best, wide))
        cells = [f"{mean(list(losses.values()))} at 2^{rate:.2f}" for losses, rate in both]
        rows.append([part.recipe, str(cost.seeds), *cells, signed(cost.value, cost.interval, 3)])
    return markdown(["recipe", "seeds", "width 32's best rate", "width 256's best rate", "regret at 256"], rows)


def losses() -> str:
    """The loss of every recipe at width 256, at equal steps and at equal time."""
    seconds = json.loads(transfer.STEP_SECONDS.read_text())["seconds"]
    rows = []
    for recipe in transfer.METHODS:
        whole = entry(f"{recipe}_150")
        if whole is None:
            continue
        same_steps = list(fit.lowest(points(load(transfer.HERE / f"{recipe}_150")[1], recipe, 256)).values())
        regret = whole["regret_nats"]
        reused = "diverged" if regret is None else f"{whole['best_loss'][-1] + regret:.3f}"
        cells = [recipe, mean(same_steps), reused, f"{seconds[recipe] / seconds['adamw']:.2f}"]
        timed = transfer.EqualTime(recipe).directory
        if (timed / "summary.json").exists():
            summary, records = load(timed)
            cells += [str(summary["config"]["steps"]), mean(list(fit.lowest(points(records, recipe, 256)).values()))]
        rows.append(cells + ["not run"] * (6 - len(cells)))
    rows.sort(key=lambda row: row[1])
    head = ["recipe", "loss after 150 steps", "at width 32's rate", "step / adamw's", "steps in its time", "loss then"]
    return markdown(head, rows)


def mean(values: list[float]) -> str:
    """Format a mean over seeds with its interval."""
    return f"{np.mean(values):.3f}{plus_minus(fit.interval(values), 3)}"


def conditions(names: Sequence[tuple[str, str]], of: Sequence[int]) -> str:
    """The best rates of some parts at these widths, with drift and regret where there are several widths."""
    rows = []
    for label, name in names:
        summary = entry(name)
        if summary is None:
            continue
        chosen = [cell for cell, width in zip(rates(summary), summary["widths"], strict=True) if width in of]
        rows.append([label, *chosen, *(drift_and_regret(summary) if len(of) > 1 else [])])
    head = ["", *(f"best lr at {w}" for w in of)]
    return markdown(head + (["drift in octaves", "regret"] if len(of) > 1 else []), rows)


def horizons() -> str:
    """Equal widths, other numbers of steps."""
    named = {(recipe, steps): f"{recipe}_{steps}" for recipe in ("beyond_mup", "adamw") for steps in (75, 150, 400)}
    return conditions([(f"{recipe}, {n} steps", name) for (recipe, n), name in named.items()], transfer.WIDTHS)


def shapes() -> str:
    """Other depths and batch sizes, width 64."""
    names = [("depth 1", "beyond_mup_depth_1"), ("depth 2, batch 16", "beyond_mup_150")]
    names += [(f"depth {d}", f"beyond_mup_depth_{d}") for d in (4, 8)]
    names += [(f"batch {b}", f"beyond_mup_batch_{b}") for b in (4, 64)]
    return conditions(names, (64,))


def texts() -> str:
    """Other texts, widths 32 to 128."""
    names = [("English (WordNet)", "beyond_mup_wordnet"), ("integer language of known entropy", "beyond_mup_markov")]
    return conditions(names, transfer.WIDTHS[:3])


def models() -> str:
    """Other models, widths 32 to 128."""
    names = [("two of four experts, norms on queries and keys", "beyond_mup_moe"), ("tied head", "beyond_mup_tied")]
    return conditions(names, transfer.WIDTHS[:3])


def tolerance() -> str:
    """The cost of missing the best rate, at width 256."""
    rows = []
    for recipe in ("beyond_mup", "muon_moonlight", "adamw"):
        summary = entry(f"{recipe}_150")
        if summary is None:
            continue
        _, records = load(transfer.HERE / f"{recipe}_150")
        means = {x: m for x, m in fit.mean_curve(points(records, recipe, 256)).items() if m is not None}
        best, vertex = summary["best_loss"][-1], summary["best_log2_lr"][-1]
        costs = [float(np.interp(vertex + off, list(means), list(means.values()))) - best for off in (-1, -0.5, 0.5, 1)]
        rows.append([recipe, *(f"{cost:.3f}" for cost in costs)])
    return markdown(["loss above the best, width 256", "lr / 2", "lr / 1.41", "lr x 1.41", "lr x 2"], rows)


def key_bias() -> str:
    """Gradient, size and effect of a key bias."""
    measured = json.loads((transfer.HERE / "key_bias.json").read_text())
    rows = [
        [
            name,
            f"`{row['rule']}`",
            *(f"{row[key]:.1e}" for key in ("key_gradient", "query_gradient")),
            *(f"{row[key]:.2f}" for key in ("key_bias", "query_bias")),
            f"{row['loss_change_without']:+.1e}",
        ]
        for name, row in measured.items()
    ]
    head = ["recipe", "rule", "gradient rms, key", "query", "final rms, key", "query"]
    return markdown([*head, "loss change if key biases are 0"], rows)


def choices(study: str) -> Callable[[], str]:
    """The gain of every setting over the base."""
    return lambda: gains.table(study) if (gains.HERE / study / "summary.json").exists() else "not run"


STUDIES = {"stabilisers": "stability.run", "lengths": "lengths.tables", "copied": "wiring.copied"}
STUDIES |= {"gpu": "transfer.gpu"} | {
    name: f"{name}.run" for name in ("wiring", "takeover", "finetuning", "coordinates")
}
"""Parts of pages that are all of a study's table: name -> module."""

TABLES: dict[str, Callable[[], str]] = {
    "widths": widths,
    "pretrain": pretrain.table,
    "sizes": sizes.table,
    "beyond_screen": beyond.screened,
    "depth_gain": lambda: sizes.depth_gain() or "not run",
    "decay_gain": lambda: sizes.decay_gain() or "not run",
    "decay_units": lambda: sizes.decay_units() or "not run",
    "beyond_final": lambda: beyond.confirmed() or "not run",
    "beyond_wide": lambda: beyond.alone() or "not run",
    "beyond_widths": lambda: beyond.transferred() or "not run",
    "fresh_regret": fresh_regret,
    "losses": losses,
    "horizons": horizons,
    "shapes": shapes,
    "texts": texts,
    "models": models,
    "tolerance": tolerance,
    "key_bias": key_bias,
    **confirmed.TABLES,
    **sources.TABLES,
    **{name: import_module(module).table for name, module in STUDIES.items()},
    **import_module("lengths.tables").TABLES,
    **import_module("rates.tables").TABLES,
    **{
        f"defaults_{study}": choices(study)
        for study in ("beyond_mup", "beyond_mup_2", "adamw", "moonlight", "moonlight_2")
    },
}


def page(text: str) -> str:
    """Return the page with every marked part rewritten."""
    return MARK.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n\n{m[3]}", text)


def paths() -> Figure:
    """Draw the best rate against width, relative to width 32: a flat line is perfect transfer."""
    drawing = Figure(figsize=(7, 4.2), layout="constrained", dpi=150)
    axes = drawing.subplots()
    summaries = {recipe: entry(f"{recipe}_150") for recipe in transfer.METHODS}
    shown = {recipe: s for recipe, s in summaries.items() if s and s["best_log2_lr"][0] is not None}
    ends = []
    for i, (recipe, summary) in enumerate(shown.items()):
        colour, width = colormaps["tab20"](2 * i % 20 + i // 10), 2.6 if recipe == "beyond_mup" else 1.3
        best = summary["best_log2_lr"]
        xy = [(w, x - best[0]) for w, x in zip(summary["widths"], best, strict=True) if x is not None]
        axes.plot(*zip(*xy, strict=True), "o-", color=colour, linewidth=width, markersize=4)
        ends.append((xy[-1][1], recipe, colour, xy[-1][0]))
    previous = float("inf")
    for height, recipe, colour, width in sorted(ends, reverse=True):
        previous = min(height, previous - 0.17)  # labels that do not overlap
        axes.annotate(recipe, (width, height), (width * 1.06, previous), color=colour, fontsize=8, va="center")
    axes.axhline(0, color="#bbbbbb", linewidth=0.8, zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_xlim(30, 480)
    axes.set_xticks(transfer.WIDTHS)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.yaxis.set_major_locator(MultipleLocator(1))
    axes.set_xlabel("width")
    axes.set_ylabel("best learning rate, octaves from width 32")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return drawing


def main() -> int:
    """Rewrite or check the pages; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--page", type=Path, action="append", help="other pages with marked parts")
    options = parser.parse_args()
    old = {path: path.read_text(encoding="utf-8") for path in options.page or PAGES}
    stale = {path: new for path, text in old.items() if (new := page(text)) != text}
    if options.check:
        print("\n".join(f"{path} is not what the results say: run studies/report.py" for path in stale) or "up to date")
        return int(bool(stale))
    for path, new in stale.items():
        write_atomic(path, new)
    paths().savefig(IMAGES / "transfer_paths.png")
    confirmed.picture(IMAGES / "transfer_steady.png")
    for recipe in ("beyond_mup", "adamw"):
        run_report.draw(transfer.HERE / f"{recipe}_150").replace(IMAGES / f"transfer_{recipe}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
