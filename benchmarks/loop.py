"""Tokens a second of the training loop, beside a plain AdamW loop around the same model in the same run.

    python benchmarks/loop.py                               # width 256, 8,192 tokens a step, one thread
    python benchmarks/loop.py --json benchmarks/results/loop.json

The plain loop is written out here: batch, forward, backward, fused AdamW, nothing else, nothing logged. Ours is what
`surefoot train` runs between two lines of its log, under AdamW (the loop's own cost) and under the default recipe
(the optimizer's). Every round steps each once, in turn; the median counts. `--compile` adds compiled models.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from common import environment
from surefoot.experiment.data import Corpus, load
from surefoot.experiment.run import Run, TrainConfig, build

PLAIN = "plain AdamW loop"


def plain(config: TrainConfig, corpus: Corpus, compiled: bool) -> Callable[[], None]:
    """A step of the loop that everybody writes."""
    model = build(config, corpus.vocab)
    if compiled:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    state = {"step": 0}

    def step() -> None:
        tokens, targets = corpus.batch("train", 0, state["step"], config.batch_size, config.context)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] += 1

    return step


def measure(config: TrainConfig, rounds: int, compiled: bool) -> list[dict[str, object]]:
    """A row for each loop."""
    corpus = load(None)
    prepare = torch.nn.Module.compile if compiled else None
    methods = {"surefoot train, adamw": "adamw", "surefoot train, beyond_mup": "beyond_mup"}
    loops = {PLAIN: plain(config, corpus, compiled)}
    for name, method in methods.items():
        settings = {**vars(config), "method": method}
        loops[name] = Run(TrainConfig(**settings), corpus, prepare=prepare).advance
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(rounds + 2):  # two to warm up, and to compile
        for name, step in loops.items():
            start = time.perf_counter()
            step()
            if turn >= 2:
                seconds[name].append(time.perf_counter() - start)
    tokens = config.batch_size * config.context
    median = {name: statistics.median(times) for name, times in seconds.items()}
    return [
        {
            "loop": name + (", compiled" if compiled else ""),
            "tokens_per_second": tokens / median[name],
            "against_plain": median[PLAIN] / median[name],
        }
        for name in loops
    ]


def table(rows: list[dict[str, object]]) -> str:
    """Markdown."""
    lines = [f"| {row['loop']} | {row['tokens_per_second']:,.0f} | {row['against_plain']:.2f} |" for row in rows]
    return "\n".join(["| loop | tokens a second | of the plain loop's |", "|---|---|---|", *lines])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="compiled models, too")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = TrainConfig(
        width=options.width,
        depth=options.depth,
        batch_size=options.batch_size,
        context=options.context,
        lr=2.0**-6,
        steps=options.rounds + 2,
    )
    rows = measure(config, options.rounds, compiled=False)
    if options.compile:
        rows += measure(config, options.rounds, compiled=True)
    if options.json:
        facts = {"environment": environment(options.threads), "config": vars(config), "rows": rows}
        options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
