"""Tokens a second of the training loop, interleaved with a plain AdamW loop around the same model.

    python benchmarks/loop.py --json benchmarks/results/loop.json
    python benchmarks/loop.py --compile        # compiled models, too

The plain loop is written out here: batch, forward, backward, fused AdamW, and nothing else. Ours is the loop of
`surefoot train` between two lines of its log: with AdamW it shows the cost of the loop, with the default recipe that of
the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from common import TIMES, Columns, Row, at_threads, interleave, publish, timing
from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.data.sources import load
from surefoot.experiment.distributed.processes import Layout
from surefoot.experiment.training.build import build
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.run import Run

PLAIN = "plain AdamW loop"
OURS = {
    "surefoot train, adamw": {"method": "adamw"},
    "surefoot train, steady": {"method": "steady"},
    "surefoot train, steady, --autocast bfloat16": {"method": "steady", "autocast": "bfloat16"},
}
FULL = {
    "bytes": TrainConfig(width=256, depth=4, batch_size=32, context=256, lr=2.0**-6, steps=1000),
    "bpe:4096": TrainConfig(width=64, depth=4, batch_size=16, context=128, lr=2.0**-6, steps=1000),
}
"""Data, and a run of 8,192 and of 2,048 tokens a step."""
SMOKE = {"bytes": TrainConfig(width=32, depth=1, batch_size=2, context=16, lr=2.0**-6, steps=1000)}
COLUMNS: Columns = {
    "loop": ("loop", ""),
    "model": ("model", ""),
    "threads": ("threads", "d"),
    **TIMES,
    "tokens a second": ("tokens_per_second", ",.0f"),
    "/ plain": ("ratio", ".2f"),
}


def plain(
    config: TrainConfig, corpus: Corpus, prepare: Callable[[torch.nn.Module], object] | None
) -> Callable[[], None]:
    """Return a step of the plain loop."""
    model = build(config, corpus.vocab)
    if prepare is not None:
        prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    taken = 0

    def step() -> None:
        nonlocal taken
        tokens, targets = corpus.batch("train", 0, taken, config.batch_size, config.context)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        taken += 1

    return step


def measure(data: str, config: TrainConfig, rounds: int, compiled: bool) -> Iterator[Row]:
    """Yield a row per loop."""
    corpus = load(None if data == "bytes" else data)
    prepare = torch.nn.Module.compile if compiled else None
    loops = {PLAIN: plain(config, corpus, prepare)} | {
        name: Run(config.replace(**changes), corpus, layout=Layout(prepare=prepare)).advance
        for name, changes in OURS.items()
    }
    times = interleave(loops, rounds)
    for name, time in times.items():
        yield {
            "loop": f"{name}, compiled" if compiled else name,
            "model": f"gpt, width {config.width}, depth {config.depth}, {data}",
            **time.columns(),
            "tokens_per_second": 1e3 * config.batch_size * config.context / time.typical_ms,
            "ratio": times[PLAIN].typical_ms / time.typical_ms,
        }


def main() -> None:
    """Run the benchmark."""
    parser = timing(__doc__)
    parser.add_argument("--compile", action="store_true", help="compiled models, too")
    options = parser.parse_args()

    def rows() -> Iterator[Row]:
        for compiled in (False, True)[: 1 + options.compile]:
            for data, config in (SMOKE if options.smoke else FULL).items():
                yield from measure(data, config, options.rounds, compiled)

    publish(options.json, {"rows": (at_threads(options.threads, rows), COLUMNS)})


if __name__ == "__main__":
    main()
