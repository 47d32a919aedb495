"""Losses of 30 float32 steps under every recipe and stabiliser, to the last bit: run it on two trees and compare.

    python tools/trajectories.py > here; PYTHONPATH=../other/src python tools/trajectories.py | diff here -

A change that should change no number shows no difference. The model has every kind of parameter: a table, positions,
fused projections, norms, experts, a router, a convolution, a head; several of each, so that batches are cut.
"""

import argparse
import hashlib

import torch
import torch.nn.functional as F
from torch import nn

import surefoot as sf

WIDTH, VOCAB, CONTEXT, BLOCKS = 48, 64, 16, 3


class Experts(nn.Module):
    """Four gated feed-forward experts in two stacked weights, mixed by a router."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Parameter(torch.zeros(4, 2 * WIDTH, WIDTH))
        self.down = nn.Parameter(torch.zeros(4, WIDTH, 2 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(torch.einsum("btd,ehd->bteh", x, self.up))
        return torch.einsum("bteh,edh,bte->btd", hidden, self.down, self.gate(x).softmax(-1))


class Block(nn.Module):
    """Attention with fused queries, keys and values, a depthwise convolution, experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        x = x + self.conv(x.mT)[..., :CONTEXT].mT
        return x + self.experts(self.norm2(x))


class Model(nn.Module):
    """A small decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Parameter(torch.zeros(1, CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.ones(()))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.scale * self.norm(self.blocks(self.tokens(tokens) + self.positions)))


RECIPES = {
    "steady": sf.recipes.steady(),
    "steady_whole": sf.recipes.steady(per_head=False),
    "steady_bounded": sf.recipes.steady_bounded(),
    "steady_soap": sf.recipes.steady_soap(),
    "beyond_mup": sf.recipes.beyond_mup(),
    "moga_row": sf.recipes.moga_row(1.5),
    "moga_column": sf.recipes.moga_column(3.0),
    "muon": sf.recipes.muon(),
    "moonlight": sf.recipes.muon(sf.Moonlight()),
    "scion": sf.recipes.scion(),
    "lion": sf.recipes.lion(),
    "sign_sgd": sf.recipes.sign_sgd(),
    "sign_natural": sf.contrib.sign_natural(),
    "hyperball": sf.recipes.hyperball(),
    "frobenius_sphere": sf.contrib.frobenius_sphere(),
    "mano": sf.recipes.mano(),
    "moonlight_published": sf.recipes.moonlight(),
    "muon_squared": sf.contrib.muon_squared(),
    "normalised_sgd": sf.recipes.normalised_sgd(),
    "normuon": sf.recipes.normuon(),
    "rmnp": sf.recipes.rmnp(),
    "scale": sf.recipes.scale(),
    "shampoo_muon": sf.contrib.shampoo_muon(),
    "signum": sf.contrib.signum(),
    "wion": sf.recipes.wion(),
}
STABILISERS: dict[str, sf.Stabiliser | None] = {
    "own": None,
    "free": sf.Free(),
    "weight_decay": sf.WeightDecay(0.5),
    "post_clip": sf.PostClip(1.2),
    "post_clip:1": sf.PostClip(1.2, period=1),
    "pre_decay": sf.PreDecay(0.7),
    "rescale": sf.Rescale(1.2),
    "normalise": sf.Normalise(1.0),
    "spectral_sphere": sf.SpectralSphere(1.0),
    "stiefel": sf.Stiefel(1.0),
    "row_sphere": sf.RowSphere(),
    "column_sphere": sf.ColumnSphere(),
    "hyperball_on_all": sf.Hyperball(),
    "streaming_post_clip": sf.StreamingPostClip(1.2, vectors=2),
    "streaming_pre_decay": sf.StreamingPreDecay(0.7),
}


def losses(recipe: sf.Recipe, stabiliser: sf.Stabiliser | None, steps: int) -> list[float]:
    """The loss before each step, and after the last."""
    torch.manual_seed(0)
    model = Model()
    overrides = [("*.experts.up", "experts"), ("*.experts.down", "experts"), ("*.experts.gate.weight", "router")]
    plan = sf.Plan.of(model, recipe, stabiliser=stabiliser, overrides=overrides)
    plan.initialise_(model, seed=1)
    nn.init.normal_(model.positions, generator=torch.Generator().manual_seed(2))
    optimizer = sf.SteepestDescent(model, plan, lr=2.0**-4)
    data, out = torch.Generator().manual_seed(3), []
    for _ in range(steps + 1):
        tokens = torch.randint(VOCAB // 4, (4, CONTEXT + 1), generator=data).cumsum(1) % VOCAB
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        out.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="steps of each run (default: 30)")
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=RECIPES, help="default: all")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.recipes:
        for scheme, stabiliser in STABILISERS.items():
            run = losses(RECIPES[name], stabiliser, arguments.steps)
            digest = hashlib.sha256(" ".join(x.hex() for x in run).encode()).hexdigest()[:16]
            print(f"{name} {scheme} {run[-1].hex()} {run[-1]:.4f} {digest}", flush=True)


if __name__ == "__main__":
    main()
