"""LoRA: a pretrained network stays as it is, while low-rank adapters beside its layers learn another task.

You should see: only A and B are trained, as linear layers. B starts at zero, so training starts from the pretrained
network, at the same loss for both ranks. They share one learning rate. No bit of the pretrained weights changes.
"""

import copy

import torch
from picture import Picture
from torch import Tensor, nn

import surefoot as sf

picture = Picture(__doc__)


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = copy.deepcopy(base).requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def train(model: nn.Module, plan: sf.Plan, lr: float, phase: float) -> list[float]:
    """Learn waves of 16 inputs; the phase is the task."""
    torch.manual_seed(0)
    optimizer, losses = sf.SteepestDescent(model, plan, lr=lr), []
    for _ in range(120):
        x = torch.randn(128, 16)
        loss = (model(x) - torch.sin(x + x.roll(1, 1) + phase)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


pretrained = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16))
plan = sf.Plan.of(pretrained)
plan.initialise_(pretrained, seed=0)
curves = {"pretraining": train(pretrained, plan, lr=2**-5, phase=0.0)}
for rank in (2, 8):
    model = nn.Sequential(*(Adapted(x, rank) if isinstance(x, nn.Linear) else x for x in pretrained))
    plan = sf.Plan.of(model)
    plan.initialise_(model, seed=0)
    for adapted in model[::2]:
        nn.init.zeros_(adapted.b.weight)
    curves[f"rank {rank}"] = train(model, plan, lr=2**-6, phase=1.0)
for name, losses in curves.items():
    print(f"{name}: loss {losses[0]:.2f} -> {sum(losses[-10:]) / 10:.2f}")
print("trained:", ", ".join(f"{n} ({plan[n].role.name})" for n, p in model.named_parameters() if p.requires_grad))
same = all(torch.equal(x.base.weight, y.weight) for x, y in zip(model[::2], pretrained[::2], strict=True))
print(f"pretrained weights unchanged: {same}")
picture.draw("step", "squared error", {name: [losses] for name, losses in curves.items()})
