"""Signals and averages on a mesh: all processes end at the same step; the average is that of one process."""

import shutil
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch
from mesh_runs import FIRST, text
from test_processes import spawn

from surefoot.experiment.distributed.mesh import Mesh, MeshShape
from surefoot.experiment.distributed.processes import ALONE, Layout
from surefoot.experiment.training.checkpoint import Checkpoints
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train
from surefoot.experiment.training.run import Run


def stopped(rank, folder):
    """The checkpoints of a mesh of which the second process alone gets a signal, in the third step."""
    take, checkpoints = Run.advance, Checkpoints(Path(folder), every=100)

    def advance(run, keep):
        if rank == 1 and run.step == 2:
            signal.raise_signal(signal.SIGINT)
        take(run, keep)

    layout = Layout(Mesh(MeshShape(1, 2, 1), torch.device("cpu")))
    with mock.patch.object(Run, "advance", advance), pytest.raises(KeyboardInterrupt):
        train(TrainConfig(**FIRST, steps=9), text(), layout=layout, checkpoints=checkpoints)
    return [path.name for path in checkpoints.paths()]


@pytest.mark.slow
def test_processes_agree_on_the_step_of_a_signal_and_save_it(tmp_path):
    assert spawn(2, stopped, str(tmp_path)) == [["step-00000003"]] * 2


@pytest.fixture
def own_dtype():
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def averaged(rank, sizes, folder, kind):
    """The average's loss and weights after four steps, whole, in float64."""
    torch.set_default_dtype(torch.float64)
    layout = Layout(Mesh(MeshShape(*sizes), torch.device("cpu")) if sizes else ALONE)
    config, checkpoints, runs = TrainConfig(**FIRST, steps=4, average=kind), Checkpoints(Path(folder), every=2), []
    result = train(config, text(), layout=layout, checkpoints=checkpoints, observe=runs.append)
    weights = runs[-1].average.weights
    whole = {name: w.full_tensor() if hasattr(w, "full_tensor") else w for name, w in weights.items()}
    return {"losses": [result.val_loss, result.val_loss_average], "weights": whole}


@pytest.mark.slow
@pytest.mark.usefixtures("own_dtype")
@pytest.mark.parametrize("kind", [0.8, "last:0.75"])
def test_an_average_on_a_mesh_is_that_of_one_process_and_moves_between_meshes(tmp_path, kind):
    want = averaged(0, None, tmp_path / "one", kind)
    found = [
        *spawn(2, averaged, (1, 2, 1), str(tmp_path / "two"), kind),
        *spawn(2, averaged, (1, 1, 2), str(tmp_path / "tp"), kind),
    ]
    for folder in ("one", "two"):
        for path in (tmp_path / folder).glob("step-00000004*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    found += [*spawn(2, averaged, (1, 2, 1), str(tmp_path / "one"), kind), averaged(0, None, tmp_path / "two", kind)]
    for got in found:
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    assert want["losses"][0] != want["losses"][1]
