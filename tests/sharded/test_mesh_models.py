"""Models of a user's own on a mesh, with recomputation: the losses and weights of one process, and its checkpoints."""

import mesh_runs
import pytest
import torch
from mesh_runs import close, trained
from test_processes import spawn

from surefoot.experiment.distributed.processes import blocks_of


@pytest.fixture(autouse=True)
def own_dtype():
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def test_blocks_are_what_a_forward_pass_calls_each_once():
    model = mesh_runs.nested(4)
    assert blocks_of(model) == [*(model.layers[i][0] for i in range(3)), model.heads[0]]
    model = mesh_runs.repeated(4)
    assert blocks_of(model) == [model.layers[0][0], model.heads[0]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nested", "repeated", "tied"])
def test_training_is_that_of_one_process(tmp_path, name):
    settings, folder = {"steps": 4, "model": f"mesh_runs:{name}"}, str(tmp_path)
    want = trained(0, None, settings)
    for got in spawn(2, trained, (1, 2, 1), settings, {"recompute": True}, folder):
        close(got, want, 1e-11)
    close(trained(0, None, settings, None, folder), want, 1e-11)
