"""A GPT in the style of nanoGPT's model file: fused q, k, v, learned positions, a head tied to the embedding.

You should see: the tied table and its positions have the head's rule. The shape of `c_attn` does not say that it is
three matrices, so an override does; nanoGPT's own has `n_head` and needs none. One rate trains both widths.
"""

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from picture import Picture
from torch import Tensor, nn

import surefoot as sf

picture, curves, SHOWN = Picture(__doc__), {}, ("wte.weight", "wpe.weight", "h.0.c_attn.weight")
text = torch.tensor(list((Path(__file__).parents[1] / "LICENSE").read_bytes()))
starts = torch.randint(len(text) - 64, (80, 16, 1), generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.ln_1, self.c_attn, self.c_proj = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, 16)).transpose(1, 2) for y in self.c_attn(self.ln_1(x)).chunk(3, dim=-1))
        x = x + self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.wte, self.wpe, self.h = nn.Embedding(128, d), nn.Embedding(64, d), nn.Sequential(Block(d), Block(d))
        self.ln_f, self.lm_head = nn.LayerNorm(d), nn.Linear(d, 128, bias=False)
        self.lm_head.weight = self.wte.weight  # tied

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.ln_f(self.h(self.wte(tokens) + self.wpe.weight)))


for width in (32, 128):
    model = GPT(width)
    plan = sf.Plan.of(model, overrides=[("*.c_attn.*", lambda role: replace(role, view=sf.views.Fused(3)))])
    plan.initialise_(model, seed=0)
    optimizer, losses = sf.SteepestDescent(model, plan, lr=2**-4), []
    for rows in text[starts + torch.arange(65)]:
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"width {width}: loss {losses[0]:.2f} -> {sum(losses[-10:]) / 10:.2f}")
    curves[f"width {width}"] = [losses]
print("\n".join(f"{name}: {plan[name].role.name}, {plan[name].blocks}, {plan[name].why}" for name in SHOWN))
picture.draw("step", "loss", curves)
