"""The effect of every rule on a key bias, whose true gradient is zero; writes key_bias.json in seconds.

Without rotary positions a key bias adds the same number to all logits of a query. The softmax is unchanged, so that the
bias's gradient is rounding error. Measured on the study's model with biases and learned positions, width 64, 150 steps,
at each method's own best rate, three seeds.
"""

from __future__ import annotations

from pathlib import Path

import torch

from surefoot import recipes
from surefoot.experiment.data.sources import load
from surefoot.experiment.files import dumps, write_atomic
from surefoot.experiment.models.decoder import Decoder, GPTConfig, LearnedPositions, Size
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.methods import AdamW, Method, Steepest
from surefoot.experiment.training.run import Run

METHODS: dict[str, tuple[str, Method, float]] = {
    "beyond_mup": ("g / rms(g)", Steepest(recipes.beyond_mup()), 2.0**-4),
    "moga_row_2": ("sign(g)", Steepest(recipes.moga_row()), 2.0**-4),
    "adamw": ("Adam", AdamW(), 2.0**-6),
}
SEEDS = (0, 1, 2)


def model(width: int) -> Decoder:
    """Return the study's model with all biases, and learned positions, under which a key bias has no effect."""
    return Decoder(
        GPTConfig(Size(width, depth=2, head_dim=16, vocab=256), positions=LearnedPositions(64), biases="all")
    )


def rms(tensors: list[torch.Tensor]) -> float:
    """Return the root of the mean square of all entries."""
    return float(torch.cat([t.detach().flatten() for t in tensors]).square().mean().sqrt())


def measure(method: Method, lr: float, seed: int) -> dict[str, float]:
    """Train once; return gradients at step 10, biases and losses at the end."""
    run = Run(TrainConfig(data_order="random", model="key_bias:model", lr=lr, seed=seed, steps=150), load(None), method)
    biases = {
        kind: [p for name, p in run.model.named_parameters() if name.endswith(f"{kind}.bias")]
        for kind in ("key", "query")
    }
    gradients: dict[str, float] = {}
    for step in range(150):
        run.advance()
        if step == 10:
            gradients = {k: rms([p.grad for p in b if p.grad is not None]) for k, b in biases.items()}
    row = {f"{kind}_gradient": value for kind, value in gradients.items()}
    row |= {f"{kind}_bias": rms(list(b)) for kind, b in biases.items()}
    before = run.validate() or float("nan")
    with torch.no_grad():
        for p in biases["key"]:
            p.zero_()
    return row | {"loss": before, "loss_change_without": (run.validate() or float("nan")) - before}


def main() -> None:
    """Measure all rules, and write the means over seeds."""
    torch.set_num_threads(1)
    rows = {}
    for name, (rule, method, lr) in METHODS.items():
        runs = [measure(method, lr, seed) for seed in SEEDS]
        rows[name] = {"rule": rule, **{key: sum(r[key] for r in runs) / len(runs) for key in runs[0]}}
        print(name, rows[name], flush=True)
    write_atomic(Path(__file__).with_suffix(".json"), dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
