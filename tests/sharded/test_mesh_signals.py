"""A signal to one process of a mesh: all end at the same step."""

import signal
from pathlib import Path
from unittest import mock

import pytest
import torch
from mesh_runs import FIRST, text
from test_processes import spawn

from surefoot.experiment.distributed.mesh import Mesh, MeshShape
from surefoot.experiment.distributed.processes import Layout
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
        train(TrainConfig.of(**FIRST, steps=9), text(), layout=layout, checkpoints=checkpoints)
    return [path.name for path in checkpoints.paths()]


@pytest.mark.slow
def test_processes_agree_on_the_step_of_a_signal_and_save_it(tmp_path):
    assert spawn(2, stopped, str(tmp_path)) == [["step-00000003"]] * 2
