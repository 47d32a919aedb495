"""Models of a user's own, built in ways that reference models are not."""

import torch
from torch import nn


class Inner(nn.Module):
    """A normalised branch with one hidden layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Pairs of branches in lists of lists, scaled by gains of a list of parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(256, width)
        self.layers = nn.ModuleList(
            nn.ModuleList([Inner(width), nn.ParameterList([torch.ones(width)])]) for _ in range(3)
        )
        self.heads = nn.ModuleList([nn.Linear(width, 256, bias=False)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for inner, gains in self.layers:
            x = x + inner(x) * gains[0]
        return self.heads[0](x)


def nested(width: int) -> nn.Module:
    return Model(width)


def repeated(width: int) -> nn.Module:
    """The same layer three times."""
    model = Model(width)
    model.layers = nn.ModuleList([model.layers[0]] * 3)
    return model


def tied(width: int) -> nn.Module:
    """A layer, a weight and a head that blocks share with another block, or with what is in none."""
    model = Model(width)
    model.layers[1][0].up = model.layers[0][0].up
    model.layers[2][0].down.weight = model.layers[1][0].down.weight
    model.heads[0].weight = model.table.weight
    return model
