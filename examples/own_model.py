"""Training a model of your own in ten lines; the README shows them and a test runs them."""

import torch
from torch import nn

import surefoot as sf

body = (nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
model = nn.Sequential(nn.Embedding(256, 64), *body, nn.Linear(64, 256, bias=False))
run = sf.Run(steps=20, tokens=8 * 64)  # steps, and tokens of each: batch * context * accumulation * processes
plan = sf.Plan.of(model, run=run)  # every parameter's role and why, or an error that names it
print(plan)
plan.initialise_(model, seed=0)
optimizer = sf.SteepestDescent(model, plan)  # the run gives the learning rate and the decay; lr=... wins over it
schedule = run.schedule(optimizer)  # up over a tenth of the steps, then down to 0
tokens = torch.randint(256, (8, 64), generator=torch.Generator().manual_seed(0))
for _ in range(run.steps):
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
numbers = optimizer.stability()["2.weight"]
print(f"loss {loss.item():.3f}, norm of the first matrix {numbers['forward_lower']:.2f}")
