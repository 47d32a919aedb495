"""The time of a step with each part, measured in turn on one thread while nothing else runs.

    python studies/beyond/times.py            # two minutes; rewrites times.json

A step is a whole one, gradients and optimizer, of the screen's model and batch. All ways take their
steps in rounds of ten, one after the other, so that a slow minute of the machine is everyone's; a way's time is the
median of its rounds.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

import torch

sys.path.append(str(Path(__file__).parents[1]))  # the studies, by their folders' names

from beyond.run import RIVAL, SCREEN_WIDTH, corpus
from beyond.tables import TIMES, named
from beyond.variants import Way
from surefoot.experiment.files import dumps, write_atomic
from surefoot.experiment.sweep.summary import environment
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.run import Run

STEPS, ROUNDS = 10, 5


def measure(ways: list[Way]) -> dict[str, float]:
    """Seconds of a step by the way's name."""
    torch.set_num_threads(1)
    runs = {way.name: start(way) for way in ways}
    rounds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(ROUNDS + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            for _ in range(STEPS):
                run.advance()
            if turn > 0:  # the first allocates
                rounds[name].append((time.perf_counter() - started) / STEPS)
    return {name: median(seconds) for name, seconds in rounds.items()}


def start(way: Way) -> Run:
    """A run of a way before its first step."""
    steps = STEPS * (ROUNDS + 1)
    rate = 2.0 ** way.centre(SCREEN_WIDTH)
    return Run(TrainConfig.of(width=SCREEN_WIDTH, lr=rate, seed=0, steps=steps), corpus(), way.method(steps))


if __name__ == "__main__":
    ways = [Way(RIVAL), *named("screen_"), *named("tune_")]
    found = environment() | {"seconds": measure(list(dict.fromkeys(ways)))}
    write_atomic(TIMES, dumps(found, indent=2) + "\n")
    print(TIMES.read_text())
