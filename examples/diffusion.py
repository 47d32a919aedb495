"""A small diffusion model: an MLP learns to remove noise from points in the plane, until they lie on two moons.

You should see: the squared error of the predicted noise falls to 0.3 (the rest cannot be predicted). Samples start
as pure noise, with 1 in 8 within 0.1 of a moon; more than 8 in 10 end there.
"""

import torch
from picture import Picture
from torch import Tensor, nn

import surefoot as sf

picture = Picture(__doc__)
LEVELS = 50  # of noise, from almost none to almost all
kept = torch.cos(torch.linspace(0.03, 0.98, LEVELS) * torch.pi / 2).square()  # the part of the variance that is left


def moons(n: int) -> Tensor:
    angle, upper = torch.rand(n, 1) * torch.pi, torch.rand(n, 1) < 0.5
    x = torch.cat([angle.cos(), angle.sin()], dim=1)
    return torch.where(upper, x, torch.tensor([1.0, 0.5]) - x) - torch.tensor([0.5, 0.25])


class Denoiser(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.time, self.point = nn.Embedding(LEVELS, d), nn.Linear(2, d)
        self.body = nn.Sequential(nn.SiLU(), nn.Linear(d, d), nn.SiLU(), nn.Linear(d, d), nn.SiLU(), nn.Linear(d, 2))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.body(self.point(x) + self.time(t))


torch.manual_seed(0)
model = Denoiser(128)
plan = sf.Plan.of(model, head="body.5")  # the layer before the loss
plan.initialise_(model, seed=0)
optimizer = sf.SteepestDescent(model, plan, lr=2**-4)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.02, total_iters=1000)
losses = []
for _ in range(1000):
    x, t, noise = moons(256), torch.randint(LEVELS, (256,)), torch.randn(256, 2)
    loss = (model(kept[t, None].sqrt() * x + (1 - kept[t, None]).sqrt() * noise, t) - noise).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
print(f"error of the predicted noise {sum(losses[:10]) / 10:.2f} -> {sum(losses[-100:]) / 100:.2f}")
start = x = torch.randn(500, 2)
with torch.no_grad():
    for t in reversed(range(LEVELS)):  # back to less noise step by step (DDIM)
        noise = model(x, torch.full((500,), t))
        less = kept[t - 1] if t else torch.tensor(1.0)
        x = (less / kept[t]).sqrt() * (x - (1 - kept[t]).sqrt() * noise) + (1 - less).sqrt() * noise
points = {"noise": start, "samples": x}
for name, x in points.items():
    print(f"{name}: {(torch.cdist(x, moons(2000)).amin(1) < 0.1).float().mean():.0%} within 0.1 of a moon")
picture.draw("x", "y", {name: [*x.T] for name, x in points.items()}, ".", xlim=(-2, 2), ylim=(-1.5, 1.5))
