"""Training runs on meshes, for tests; and models of a user's own, built in ways that reference models are not."""

import functools
from pathlib import Path

import torch
from torch import nn

from surefoot.experiment.data.sources import load
from surefoot.experiment.distributed.mesh import Mesh, MeshShape
from surefoot.experiment.distributed.processes import ALONE, Layout
from surefoot.experiment.training.checkpoint import Checkpoints
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train
from surefoot.experiment.training.run import Run

FIRST = {"width": 32, "depth": 2, "batch_size": 8, "context": 16, "lr": 2.0**-4}


@functools.cache
def text():
    return load(None)


def trained(rank, sizes, settings, layout=None, folder=None, **options):
    """Losses and weights of a run in float64, on a mesh or, without sizes, alone."""
    torch.set_default_dtype(torch.float64)
    processes = Mesh(MeshShape(*sizes), torch.device("cpu")) if sizes else ALONE
    config, layout, runs = TrainConfig(**FIRST | settings), Layout(processes, **(layout or {})), []
    checkpoints = Checkpoints(Path(folder), **options) if folder else None
    train(config, text(), layout=layout, checkpoints=checkpoints, observe=runs.append, log_every=1000)
    if not runs:  # it was at its end already
        runs.append(Run(config, text(), layout=layout))
        checkpoints.resume(runs[0])
    run = runs[-1]
    weights = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in run.model.named_parameters()}
    return {"losses": run.losses, "weights": {n: w.detach() for n, w in weights.items()}}


def close(got, want, tolerance):
    torch.testing.assert_close(got["losses"], want["losses"], rtol=0, atol=tolerance)
    for name, w in want["weights"].items():
        torch.testing.assert_close(got["weights"][name], w, rtol=0, atol=tolerance, msg=name)


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
