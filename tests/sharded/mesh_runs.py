"""Training runs on meshes, for tests."""

import functools
from pathlib import Path

import torch

from surefoot.experiment.data.corpus import load
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
    config, layout, runs = TrainConfig.of(**FIRST | settings), Layout(processes, **(layout or {})), []
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
