"""Would a head with whitened gradients lower the loss? Runs beside the default's, paired by seed (decision 29).

    python studies/lengths/whitened.py --data tokens --width 32 --steps 481 --shifts 0 .01 .1 .3 1 --seeds 900 901
    python studies/lengths/whitened.py --table

Model, data and schedule are those of run.py; rate and decay those that the default's searches found there.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

import surefoot as sf
from surefoot import recipes
from surefoot.experiment.files import Log, read_lines
from surefoot.experiment.reports.style import markdown
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train
from surefoot.geometry.base import Extent, State
from surefoot.linalg.bounds import max_abs_or_one

sys.path.append(str(Path(__file__).parent.parent))
from lengths import run
from lengths.searched import at_decay

RESULTS = Path(__file__).with_suffix(".jsonl")


@dataclass(frozen=True)
class Whitened(sf.RowAdam):
    """`RowAdam` of `g (R + shift I)^(-1/2)`: R is the running mean of `g^T g`, its eigenvalues over their mean.

    The root is taken in a basis that follows R's eigenvectors, as in SOAP: one power step and a QR a step. Whatever
    gradients `RowAdam` gets, a row's RMS has its bound.
    """

    extent: ClassVar[Extent] = Extent.WHOLE
    memory: float = 0.98
    shift: float = 0.01

    def init_memory(self, block: Tensor) -> State:
        """A zero factor, and the inputs' own basis."""
        *batch, _, d_in = block.shape
        basis = torch.eye(d_in).repeat(*batch, 1, 1)
        return {**super().init_memory(block), "right": torch.zeros_like(basis), "right_basis": basis}

    def __call__(self, state: State, g: Tensor, active: Tensor | float) -> tuple[State, Tensor]:
        """Whitened, then smoothed."""
        gram = torch.lerp(state["right"], g.mT @ g, (1 - self.memory) * active)
        basis = torch.linalg.qr(gram / max_abs_or_one(gram) @ state["right_basis"] + 1e-5 * state["right_basis"]).Q
        values = (basis * (gram @ basis)).sum(-2, keepdim=True)
        root = (values / values.mean(-1, keepdim=True) + self.shift).rsqrt()
        kept, m = super().__call__(state, g @ (basis * root @ basis.mT), active)
        return {**kept, "right": gram, "right_basis": basis.contiguous()}, m


def recipe(shift: float) -> sf.Recipe:
    """The default, its head whitened with this shift; 0 is the default itself."""
    base = recipes.steady()
    head = replace(base.role("head"), momentum=Whitened(0.9, 0.98, shift=shift)) if shift else base.role("head")
    return replace(base, name=f"whitened:{shift:g}", table={**base.table, "head": head})


def measure(width: int, steps: int, shift: float, seed: int) -> None:
    """Train one model, unless it is there, and write a line."""
    where = {"width": width, "steps": steps, "shift": shift, "seed": seed}
    if any(where.items() <= record.items() for record in (read_lines(RESULTS) if RESULTS.exists() else [])):
        return
    log2_lr, total = run.fitted("steady", steps)
    lr = 2.0**log2_lr
    config = TrainConfig(width=width, depth=4, batch_size=16, context=128, steps=steps, lr=lr, seed=seed)
    result = train(config, run.corpus(), method=at_decay(recipe(shift), 2.0 ** (total + 1) / lr / steps))
    with Log(RESULTS) as log:
        log.append(where | {"val_loss": result.val_loss, "train_loss": result.train_loss})


def table() -> str:
    """Both losses, and their mean minus the default's on the same seeds."""
    records, rows = read_lines(RESULTS), []
    for size in sorted({(r["steps"], r["width"]) for r in records}):
        mine = [r for r in records if (r["steps"], r["width"]) == size]
        found: dict[float, dict[int, Any]] = {}
        for r in mine:
            found.setdefault(r["shift"], {})[r["seed"]] = [r[side] for side in run.SIDES]
        for shift, runs in sorted(found.items()):
            seeds = sorted(runs.keys() & found[0.0].keys())
            gaps = [f"{np.mean(runs[seed]) - np.mean(found[0.0][seed]):+.3f}" for seed in seeds]
            losses = [f"{x:.3f}" for x in np.mean([runs[seed] for seed in seeds], axis=0)]
            rows.append([f"{size[1]}", f"{size[0]:,}", f"{shift:g}" if shift else "the default", *losses])
            rows[-1] += [", ".join(gaps) if shift else ""]
    head = ["width", "steps", "shift", "validation loss", "training loss", "mean of both minus the default's, by seed"]
    return markdown(head, rows)


def main() -> None:
    """Run what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of tokens")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--steps", type=int, default=481)
    parser.add_argument("--shifts", type=float, nargs="+", default=[0.0, 0.01])
    parser.add_argument("--seeds", type=int, nargs="+", default=[900, 901])
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if not options.table:
        os.environ["SUREFOOT_LENGTHS_TOKENS"] = str(Path(options.data).resolve())
        torch.set_num_threads(1)
        for seed in options.seeds:
            for shift in options.shifts:
                measure(options.width, options.steps, shift, seed)
    print(table())


if __name__ == "__main__":
    main()
