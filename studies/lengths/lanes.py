"""How many documents to read side by side: the loss of short runs on long documents, with windows at random beside it.

    python studies/lengths/lanes.py             # the table of docs/data.md; six minutes on one core

The demo's model of width 64 and its text, the standard library's files of 16 kB on average, 150 steps, seeds 0 to 2.
"""

from __future__ import annotations

import statistics

import torch

from surefoot.experiment.data import epochs
from surefoot.experiment.data.sources import load
from surefoot.experiment.reports.style import markdown
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train

LANES = (16, 64, 256, 1024)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    rows = []
    for lanes in (*LANES, None):
        epochs.LANES = lanes or 1
        order, text = "documents" if lanes else "random", load()
        configs = [TrainConfig.of(width=64, steps=150, lr=2.0**-3.25, seed=seed, data_order=order) for seed in range(3)]
        results = [train(config, text) for config in configs]
        validation = statistics.mean(result.val_loss for result in results)
        training = statistics.mean(result.train_loss for result in results)
        gap = f"{validation - training:+.2f}"
        rows.append([f"{lanes} lanes" if lanes else "windows at random", f"{validation:.2f}", f"{training:.2f}", gap])
    print(markdown(["order", "validation loss", "training loss, last tenth", "gap"], rows))


if __name__ == "__main__":
    main()
