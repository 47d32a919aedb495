"""The time of a step with each part, measured in turn on one thread while nothing else runs.

    python studies/beyond/times.py            # eight minutes; rewrites times.json

A step is a whole one, gradients and optimizer, of the screen's model and batch. All ways take their
steps in rounds of ten, one after the other, so that a slow minute of the machine is everyone's; a way's time is the
fastest of its rounds. Beside that the optimizer's step alone, on one block as wide as GPT-2 Small's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))  # the studies, by their folders' names

from beyond.run import RIVAL, SCREEN_WIDTH, corpus
from beyond.tables import TIMES, named
from beyond.variants import Way
from surefoot.experiment.files import dumps, write_atomic
from surefoot.experiment.sweep.summary import environment
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.run import Run

STEPS, ROUNDS = 10, 15
WIDE, HEAD_DIM, WIDE_ROUNDS = 768, 64, 3
PARTS = {"": STEPS, "+soap_short": STEPS, "+soap10_short": STEPS, "+soap": 1, "+whitened": 1}
"""What on top of the default is timed on a block of GPT-2 Small, and the steps of a round."""

Steps = tuple[Callable[[], object], int]
"""A step, and how many make a round."""


def in_turn(steps: Mapping[str, Steps], number: int) -> dict[str, float]:
    """Seconds of each step by its name, the fastest of a number of rounds."""
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(number + 1):
        for name, (step, times) in steps.items():
            started = time.perf_counter()
            for _ in range(times):
                step()
            if turn > 0:  # the first allocates
                rounds[name].append((time.perf_counter() - started) / times)
    return {name: min(seconds) for name, seconds in rounds.items()}


def start(way: Way, width: int = SCREEN_WIDTH, **settings: int) -> Run:
    """A run of a way before its first step."""
    steps = STEPS * (ROUNDS + 1)
    rate = 2.0 ** way.centre(SCREEN_WIDTH)
    return Run(
        TrainConfig(data_order="random", width=width, lr=rate, seed=0, steps=steps, **settings),
        corpus(),
        way.method(steps),
    )


def wide(way: Way) -> Callable[[], object]:
    """The optimizer's step of a wide block, the gradients being noise."""
    run = start(way, WIDE, depth=1, head_dim=HEAD_DIM)
    for p in run.model.parameters():
        p.grad = torch.randn_like(p)
    return lambda: run.optimizer.step()  # its scheduler knows it by a weak reference alone


if __name__ == "__main__":
    torch.set_num_threads(1)
    ways = dict.fromkeys([Way(RIVAL), *named("screen_"), *named("tune_")])
    seconds = in_turn({way.name: (start(way).advance, STEPS) for way in ways}, ROUNDS)
    alone = in_turn(
        {f"steady{part}": (wide(Way(f"steady{part}")), times) for part, times in PARTS.items()}, WIDE_ROUNDS
    )
    found = environment() | {"seconds": seconds, "alone": {"width": WIDE, "seconds": alone}}
    write_atomic(TIMES, dumps(found, indent=2) + "\n")
    print(TIMES.read_text())
