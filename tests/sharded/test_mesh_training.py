"""Training on a mesh, of a user's models too: what one process has, checkpoints that go on on any."""

import functools
import shutil
import signal
from pathlib import Path
from unittest import mock

import mesh_runs
import pytest
import torch
from mesh_runs import FIRST, close, text, trained
from test_processes import spawn

from surefoot.experiment.distributed import mesh
from surefoot.experiment.distributed.mesh import Mesh, MeshShape, parse
from surefoot.experiment.distributed.processes import ALONE, Layout, Processes, blocks_of
from surefoot.experiment.training.checkpoint import Checkpoints
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train
from surefoot.experiment.training.run import Run
from surefoot.linalg import onednn_ops


def test_two_processes_train_as_one_and_save_what_one_can_read(tmp_path):
    """The quick one of these tests; the others are slow."""
    settings = {"steps": 4}
    want, folder = trained(0, None, settings), str(tmp_path / "two")
    found = spawn(2, trained, (1, 2, 1), settings, None, folder)
    for got in found:
        close(got, want, 1e-11)
    resumed = trained(0, None, settings, None, folder)
    close(resumed, want, 1e-11)
    assert torch.equal(resumed["weights"]["head.weight"], found[0]["weights"]["head.weight"])


@pytest.fixture(autouse=True)
def own_dtype():
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


SAME = [
    (2, (1, 2, 1), {}, {}),
    (4, (1, 4, 1), {}, {"accumulate": 2, "recompute": True}),
    (4, (2, 2, 1), {"model": "tied"}, {}),
    (4, (1, 2, 2), {}, {}),
    (2, (1, 1, 2), {"model": "qwen"}, {}),
    (4, (1, 2, 2), {"model": "moe"}, {}),
    (4, (1, 2, 2), {"method": "adamw", "lr": 2.0**-8}, {}),
    (2, (2, 1, 1), {"model": "llama", "stabiliser": "post_clip:2"}, {"recompute": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "sizes", "settings", "layout"), SAME, ids=str)
def test_twenty_steps_are_those_of_one_process(ranks, sizes, settings, layout):
    settings = {"steps": 20, **settings}
    want = trained(0, None, settings)["losses"]
    for got in spawn(ranks, trained, sizes, settings, layout):
        torch.testing.assert_close(got["losses"], want, rtol=0, atol=tolerance(settings))


def block_by_block(model):
    """Compile as the command line does, by a backend that needs no compiler."""
    for block in model.blocks:
        block.compile(backend="eager")


@pytest.mark.slow
def test_compiled_blocks_and_bfloat16_on_a_mesh():
    """`MixedPrecisionPolicy` rounds at other places than autocast does: the losses agree to bfloat16's digits."""
    settings = {"steps": 8, "autocast": "bfloat16", "model": "llama"}
    want = trained(0, None, settings)["losses"]
    exact = trained(0, None, {**settings, "autocast": "none"})["losses"]
    found = spawn(2, trained, (1, 2, 1), settings, {"prepare": block_by_block})
    assert torch.equal(found[0]["losses"], found[1]["losses"])
    assert not torch.equal(found[0]["losses"], exact)
    torch.testing.assert_close(found[0]["losses"], want, rtol=0, atol=0.05)


def tolerance(settings, own=1e-10):
    """AdamW divides the rounding of gradients that are nearly 0 by itself."""
    return 1e-6 if settings.get("method") == "adamw" else own


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"stabiliser": "post_clip:2"}, {"method": "adamw", "lr": 2.0**-8}], ids=str)
def test_a_run_goes_on_on_every_mesh(tmp_path, settings):
    settings = {"steps": 8, **settings}
    want = trained(0, None, settings)
    folder = tmp_path / "four"
    whole = spawn(4, functools.partial(trained, every=4), (1, 2, 2), settings, None, str(folder))
    for got in whole:
        close(got, want, tolerance(settings, 1e-12))
    shutil.rmtree(folder / "step-00000008")
    for ranks, sizes in ((4, (1, 2, 2)), (2, (1, 2, 1)), (2, (1, 1, 2)), (1, None)):
        copy = str(tmp_path / str(sizes))
        shutil.copytree(folder, copy)
        for got, same in zip(
            spawn(ranks, functools.partial(trained, every=100), sizes, settings, None, copy), whole, strict=False
        ):
            close(got, want, tolerance(settings, 1e-12))
            if ranks == 4:
                close(got, same, 0)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["steady", "adamw"])
def test_a_mesh_goes_on_from_one_process(tmp_path, method):
    settings = {"steps": 8, "method": method, "lr": 2.0**-6}
    want = trained(0, None, settings, None, str(tmp_path), every=4)
    for path in tmp_path.glob("step-00000008*"):
        path.unlink()
    for got in spawn(2, functools.partial(trained, every=100), (1, 2, 1), settings, None, str(tmp_path)):
        close(got, want, tolerance(settings, 1e-12))


def test_rows_make_up_the_batch():
    class Share(Processes):
        def __init__(self, share):
            self.share, self.shares = share, 2

    rows = [list(range(12))[Share(share).rows(12, part, 3)] for part in range(3) for share in range(2)]
    assert [row for own in rows for row in own] == list(range(12))
    with pytest.raises(ValueError, match="8 sequences cannot be split into 6 equal parts"):
        Share(0).rows(8, 0, 3)


@pytest.mark.parametrize("text", ["fsdp", "fsdp=0", "fsdp=2,fsdp=2", "cp=2", "fsdp=-1", ""])
def test_a_mesh_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="must name replicate, fsdp, tp"):
        parse(text, 2)


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(ValueError, match="needs 8 processes, but 4 were started: torchrun --nproc-per-node 8"):
        parse("fsdp=4,tp=2", 4)
    assert parse(None, 4) == MeshShape(fsdp=4)


def test_accumulated_passes_take_the_step_of_the_whole_batch():
    torch.set_default_dtype(torch.float64)
    config = TrainConfig(**FIRST, steps=3)
    runs = [Run(config, text(), layout=layout) for layout in (Layout(), Layout(accumulate=4, recompute=True))]
    for run in runs:
        for _ in range(3):
            run.advance()
    torch.testing.assert_close(runs[1].losses, runs[0].losses, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="8 sequences cannot be split into 3 equal parts"):
        Run(config, text(), layout=Layout(accumulate=3))


def test_blocks_are_what_a_forward_pass_calls_each_once():
    model = mesh_runs.nested(4)
    assert blocks_of(model) == [*(model.layers[i][0] for i in range(3)), model.heads[0]]
    model = mesh_runs.repeated(4)
    assert blocks_of(model) == [model.layers[0][0], model.heads[0]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nested", "repeated", "tied"])
def test_models_of_a_users_own_train_as_in_one_process(tmp_path, name):
    settings, folder = {"steps": 4, "model": f"mesh_runs:{name}"}, str(tmp_path)
    want = trained(0, None, settings)
    for got in spawn(2, trained, (1, 2, 1), settings, {"recompute": True}, folder):
        close(got, want, 1e-11)
    close(trained(0, None, settings, None, folder), want, 1e-11)


def test_processes_multiply_by_what_is_fast_for_all(monkeypatch):
    """The clocks of two say something else."""
    monkeypatch.setenv(onednn_ops.VARIABLE, "torch,onednn,bfloat16")
    monkeypatch.setattr(mesh.dist, "all_gather_object", lambda all_, own: all_.__setitem__(slice(2), [own, {"onednn"}]))
    mesh._agree_on_products(2)
    assert onednn_ops.is_fast("onednn")
    assert not onednn_ops.is_fast("bfloat16")


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
