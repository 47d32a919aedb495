"""How many places of the text to read side by side: the losses of a short run, with windows at random beside it.

    python studies/lengths/lanes.py --data tokens           # the table of docs/data.md; six minutes on one core

The tokens are those of run.py, and so is the model, at width 32; 481 steps at the rate 2^-3.5, one seed. Validation is
on three times as many windows as `surefoot train` reads.
"""

from __future__ import annotations

import argparse

import torch

from surefoot.experiment.data import epochs
from surefoot.experiment.data.sources import load
from surefoot.experiment.reports.style import markdown
from surefoot.experiment.training import run
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train

LANES = (1, 16, 64, 256, 4096)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of tokens")
    torch.set_num_threads(1)
    text, rows = load(f"bin:{parser.parse_args().data}"), []
    run.VALIDATION_BATCHES = 48
    documents = len(text.document_ends)
    for lanes in (*LANES, documents, None):
        order = "documents" if lanes else "random"
        text.epochs_of[128] = epochs.Epochs(text.document_ends, 128, lanes)
        config = TrainConfig(
            width=32, depth=4, batch_size=16, context=128, lr=2.0**-3.5, seed=800, steps=481, data_order=order
        )
        result = train(config, text)
        losses = [f"{loss:.3f}" for loss in (result.val_loss, result.train_loss)]
        name = f"{lanes} lane{'s' * (lanes > 1)}" if lanes else "windows at random"
        rows.append([name, *losses, f"{result.val_loss - result.train_loss:+.3f}"])
    print(markdown(["order", "validation loss", "training loss, last tenth", "gap"], rows))


if __name__ == "__main__":
    main()
