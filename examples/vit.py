"""A vision transformer on scikit-learn's digits, with every weight inside a ball at every step.

You should see: the roles of a ViT's own parameters (patches, class token, positions, fused q, k, v) with their reasons.
9 of 10 held-out digits are read correctly, with the bound or without. With it no norm is above 2, and the head's is not
above 2 log 10 = 4.61; without it the largest are more than twice as large.
"""

import torch
from picture import Picture
from sklearn.datasets import load_digits
from torch import Tensor, nn

import surefoot as sf

picture = Picture(__doc__)
digits = load_digits()  # 1,797 pictures of 8 x 8 pixels; the last 397 are held back
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
labels = torch.tensor(digits.target)


class ViT(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, d, 2, stride=2)
        self.class_token, self.positions = (nn.Parameter(torch.randn(1, n, d)) for n in (1, 17))
        block = nn.TransformerEncoderLayer(d, 4, 2 * d, dropout=0, activation="gelu", batch_first=True, norm_first=True)
        self.body = nn.Sequential(block, nn.LayerNorm(d))
        self.head = nn.Linear(d, 10)

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.patches(pictures).flatten(2).mT
        x = torch.cat([self.class_token.expand(len(x), 1, -1), x], dim=1) + self.positions
        return self.head(self.body(x)[:, 0])


curves = {}
for name, stabiliser in {"free": sf.Free(), "bounded": sf.PostClip(2.0)}.items():
    torch.manual_seed(0)
    model, losses = ViT(32), []
    plan = sf.Plan.of(model, head="head", stabiliser=stabiliser)
    plan.initialise_(model, seed=0)
    optimizer = sf.SteepestDescent(model, plan, lr=2**-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.02, total_iters=150)
    for _ in range(150):
        batch = torch.randint(1400, (64,))
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    curves[name] = [losses]
    right = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean()
    norms = {key: numbers["forward_lower"] for key, numbers in optimizer.stability().items()}
    head = norms.pop("head.weight")
    print(f"{name}: {right:.0%} read correctly; head's norm {head:.2f}, next {max(norms.values()):.2f}")
for name in list(plan)[:5]:
    print(f"{name}: {plan[name].role.name}; {plan[name].promise}; {plan[name].why}")
picture.draw("step", "loss", curves)
