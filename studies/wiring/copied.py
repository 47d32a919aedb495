"""The code that people copy: the default beside AdamW, from scratch, with the attention of twelve well-known libraries.

    python studies/wiring/copied.py                   # what is missing; resumes, 40 minutes on 2 cores
    python studies/wiring/copied.py NanoGPT Megatron  # these only
    python studies/wiring/copied.py --table           # from the committed results, as docs/transfer.md has it

The models of `tests/unit/inputs/attention_models.py`: three blocks of width 64 with the attention as it is written
there, found by one forward pass, `Plan.of(model, inputs=tokens)`. Text, batches, steps, schedule and search are those
of `run.py`; where attention sees all positions, bytes behind a mask are predicted, in 400 steps.
"""

from __future__ import annotations

import argparse
import functools
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.experiment.reports.style import markdown, plus_minus
from surefoot.experiment.sweep import fit
from surefoot.experiment.sweep.config import SweepConfig, Trial, TrialResult
from surefoot.experiment.sweep.search import Bracket
from surefoot.experiment.sweep.summary import points
from surefoot.experiment.sweep.sweep import load, run

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parents[1] / "tests/unit/inputs")]
import attention_models as copied  # noqa: E402

from wiring.run import CENTRES, DEFAULTS, RATES, SEEDS, STEPS, corpus, train  # noqa: E402

WAYS = ("steady", "adamw")
BIDIRECTIONAL = ("TimmViT", "OpenCLIP", "TorchEncoder")
LONG = 4 * STEPS  # of these: after `STEPS` nobody has learned more than how often a byte is
copied.VOCAB, copied.CONTEXT = 257, 64  # bytes and a mask token


@dataclass(frozen=True)
class Copied:
    """A model with one repository's attention.

    Args:
        name: of its class in `attention_models`.
    """

    name: str
    tied = False

    def build(self, width: int, seed: int, tied: bool) -> nn.Module:
        """The model with its own initial values."""
        torch.manual_seed(seed)
        return copied.Decoder(copied.ALL[self.name])

    def loss(self, model: nn.Module, tokens: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
        """Of the next byte; where attention sees it, of bytes behind a mask."""
        if self.name not in BIDIRECTIONAL:
            return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        hidden = torch.rand(tokens.shape, generator=generator) < 0.15
        return F.cross_entropy(model(tokens.masked_fill(hidden, 256))[hidden], tokens[hidden])


def run_trial(trial: Trial, name: str) -> TrialResult:
    """Train one model on one thread."""
    return train(trial, Copied(name), torch.zeros(1, copied.CONTEXT, dtype=torch.int64))


def table() -> str:
    """Markdown: losses at each way's best rate, and their difference on the same seeds."""
    rows = []
    for name in copied.ALL:
        if (HERE / "copied" / name / "summary.json").exists():
            _, records = load(HERE / "copied" / name)
            cells, lowest = [], []
            for way in WAYS:
                lowest.append(fit.lowest(points(records, way, copied.WIDTH)))
                rate = fit.optimum(points(records, way, copied.WIDTH)).best_rate
                cells.append(
                    f"{sum(lowest[-1].values()) / len(lowest[-1]):.3f} at {'?' if rate is None else f'2^{rate:.2f}'}"
                )
            against = fit.difference(lowest[0], lowest[1])
            rows.append(
                [
                    name,
                    str(LONG if name in BIDIRECTIONAL else STEPS),
                    *cells,
                    f"{against.value:+.3f}{plus_minus(against.interval, 3)}",
                ]
            )
    return markdown(["attention of", "steps", *(f"{way}, loss" for way in WAYS), "steady - adamw"], rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(copied.ALL)}; default: all")
    parser.add_argument("--table", action="store_true", help="only print the table")
    options = parser.parse_args()
    for name in () if options.table else options.names or copied.ALL:
        search = Bracket({way: (CENTRES | DEFAULTS)[way] for way in WAYS}, budget=RATES)
        steps = LONG if name in BIDIRECTIONAL else STEPS
        sweep = SweepConfig(WAYS, (copied.WIDTH,), tuple(range(SEEDS)), steps, search)
        cell = functools.partial(run_trial, name=name)
        run(sweep, HERE / "copied" / name, cell, environment={"corpus_sha256": corpus().sha256})
    print(table())


if __name__ == "__main__":
    main()
