"""A mixture of experts: the plan finds router and experts, and each expert's matrices have their own norms.

You should see: the reason for every role. The function to learn is another map in each quarter of the plane. Eight
experts end with a quarter of one expert's loss.
"""

import torch
from picture import Picture
from torch import Tensor, nn

import surefoot as sf

picture, D = Picture(__doc__), 32


class Experts(nn.Module):
    """Stacks of matrices (E, out, in); three attributes tell the layout, as those of transformers' experts do."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.has_gate, self.is_transposed, self.is_concatenated = False, False, False
        self.up_proj, self.down_proj = (nn.Parameter(torch.empty(count, D, D)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        inner = nn.functional.gelu(torch.einsum("nd,eid->nei", x, self.up_proj))
        return torch.einsum("nei,edi->ned", inner, self.down_proj)  # all of them: simple, and fast enough for a few


class Mixture(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(D, count, bias=False), Experts(count)

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = self.router(x).softmax(-1).max(-1)
        return self.experts(x)[torch.arange(len(x)), chosen] * best[:, None]


torch.manual_seed(0)
maps = torch.randn(4, D, D) / D**0.5  # one for each pair of signs of the first two inputs
curves = {}
for count in (1, 8):
    model = Mixture(count)
    plan = sf.Plan.of(model)
    plan.initialise_(model, seed=0)
    optimizer = sf.SteepestDescent(model, plan, lr=2**-5)
    losses = curves[f"experts: {count}"] = []
    for _ in range(250):
        x = torch.randn(512, D)
        goal = torch.einsum("nd,nod->no", x, maps[2 * (x[:, 0] > 0) + (x[:, 1] > 0)])
        loss = (model(x) - goal).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"experts: {count}, loss {losses[0]:.2f} -> {sum(losses[-10:]) / 10:.2f}")
for name in plan:
    print(f"{name}: {plan[name].role.name}, {plan[name].blocks}, {plan[name].why}")
picture.draw("step", "squared error", {name: [losses] for name, losses in curves.items()})
