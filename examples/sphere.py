"""Training on spheres: every row of the hidden matrix keeps its length at every step, and the loss still falls.

You should see: with the constraint no row's length changes by a thousandth of a per cent. The same steps without it
make one row ten times as long. Both runs separate the two spirals.
"""

from dataclasses import replace
from functools import partial

import torch
from picture import Picture
from torch import nn

import surefoot as sf

picture = Picture(__doc__)
torch.manual_seed(0)
side = torch.arange(400) % 2  # points on two spirals that wind around each other
angle = 1 + 9 * torch.rand(400)
turned = angle + torch.pi * side
points = torch.stack([angle * turned.cos(), angle * turned.sin()], dim=1) / 3

curves = {}
for name, stabiliser in {"rows of fixed length": sf.RowSphere(), "free": sf.Free()}.items():
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))
    plan = sf.Plan.of(model, head="4", overrides=[("2.weight", partial(replace, stabiliser=stabiliser))])
    plan.initialise_(model, seed=0)
    print(f"{name}; the plan's promise: {plan['2.weight'].promise}")
    optimizer = sf.SteepestDescent(model, plan, lr=2**-4)
    before, losses = model[2].weight.detach().norm(dim=1), []
    for _ in range(150):
        loss = nn.functional.cross_entropy(model(points), side)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    change = (model[2].weight.detach().norm(dim=1) / before - 1).abs().max()
    print(f"  loss {losses[0]:.2f} -> {losses[-1]:.2f}; the length of a row changed by {change:.3%} at most")
    curves[name] = [losses]
picture.draw("step", "loss", curves, yscale="log")
