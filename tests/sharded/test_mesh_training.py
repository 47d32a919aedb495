"""Training on a mesh: the losses and weights of one process, and checkpoints that go on on any mesh."""

import functools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_processes import spawn

from surefoot.experiment.data.corpus import load
from surefoot.experiment.distributed.mesh import Mesh, MeshShape, parse
from surefoot.experiment.distributed.processes import ALONE, Layout, Processes
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
    with pytest.raises(ValueError, match="8 sequences cannot be cut into 6 equal parts"):
        Share(0).rows(8, 0, 3)


@pytest.mark.parametrize("text", ["fsdp", "fsdp=0", "fsdp=2,fsdp=2", "cp=2", "fsdp=-1", ""])
def test_a_mesh_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="is not one axis of replicate, fsdp, tp"):
        parse(text, 2)


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(ValueError, match="has 8 processes, and 4 were started: torchrun --nproc-per-node 8"):
        parse("fsdp=4,tp=2", 4)
    assert parse(None, 4) == MeshShape(fsdp=4)


def test_accumulated_passes_take_the_step_of_the_whole_batch():
    torch.set_default_dtype(torch.float64)
    config = TrainConfig.of(**FIRST, steps=3)
    runs = [Run(config, text(), layout=layout) for layout in (Layout(), Layout(accumulate=4, recompute=True))]
    for run in runs:
        for _ in range(3):
            run.advance()
    torch.testing.assert_close(runs[1].losses, runs[0].losses, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="8 sequences cannot be cut into 3 equal parts"):
        Run(config, text(), layout=Layout(accumulate=3))


class Tripwire:
    """A pickle of it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def flipped(folder, _):
    file = folder / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def truncated(folder, _):
    file = folder / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:100])


def headless(folder, _):
    (folder / ".metadata").unlink()


def half(folder, _):
    (folder / "__1_0.distcp").unlink()
    (folder / "manifest.json").unlink()


def forge(folder, name, data):
    from surefoot.experiment.distributed.folders import digest

    (folder / name).write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"][name] = digest(folder / name)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def pickled(folder, mark):
    forge(folder, ".metadata", pickle.dumps(Tripwire(mark)))


def pickled_entry(folder, mark):
    """A number of the optimizer replaced by a pickle, with a manifest and a description that fit."""
    import io

    metadata = pickle.loads((folder / ".metadata").read_bytes())
    index, place = next(
        (i, x) for i, x in metadata.storage_data.items() if i.fqn.startswith("optimizer.param_groups") and "lr" in i.fqn
    )
    buffer = io.BytesIO()
    torch.save(Tripwire(mark), buffer)
    data = (folder / place.relative_path).read_bytes()
    place.offset, place.length = len(data), buffer.tell()
    metadata.storage_data[index] = place
    forge(folder, place.relative_path, data + buffer.getvalue())
    forge(folder, ".metadata", pickle.dumps(metadata))


def elsewhere(folder, _):
    """A description that names a file outside the folder."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = f"../step-00000002/{place.relative_path}"
    forge(folder, ".metadata", pickle.dumps(metadata))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of steps 2 and 4, by two processes."""
    folder = tmp_path_factory.mktemp("saved")
    spawn(2, functools.partial(trained, every=2), (1, 2, 1), {"steps": 4}, None, str(folder))
    torch.set_default_dtype(torch.float32)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("harm", [flipped, truncated, headless, half, pickled, pickled_entry, elsewhere])
def test_a_damaged_folder_is_passed_over_and_runs_nothing(tmp_path, saved, harm):
    folder, mark = tmp_path / "checkpoints", tmp_path / "executed"
    shutil.copytree(saved, folder)
    harm(folder / "step-00000004", mark)
    torch.set_default_dtype(torch.float64)
    run = Run(TrainConfig.of(**FIRST, steps=4), text())
    with pytest.warns(UserWarning, match=r"(?s)step-00000004.*passed over"):
        Checkpoints(folder).resume(run)
    assert run.step == 2
    assert not mark.exists()
    harm(folder / "step-00000002", mark)
    if harm is not elsewhere:
        with (
            pytest.warns(UserWarning, match="passed over"),
            pytest.raises(ValueError, match="delete it to resume from an older one"),
        ):
            Checkpoints(folder).resume(Run(TrainConfig.of(**FIRST, steps=4), text()))
    assert not mark.exists()


def resumes(rank, folder):
    """The step that a mesh resumes at where a file is damaged, and what it is told."""
    import warnings

    torch.set_default_dtype(torch.float64)
    processes = Mesh(MeshShape(1, 2, 1), torch.device("cpu"))
    run = Run(TrainConfig.of(**FIRST, steps=4), text(), layout=Layout(processes))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        Checkpoints(Path(folder)).resume(run)
    return {"step": run.step, "told": sum("passed over" in str(warning.message) for warning in told)}


@pytest.mark.slow
@pytest.mark.parametrize("harm", [flipped, pickled, pickled_entry])
def test_all_processes_pass_over_a_damaged_folder_together(tmp_path, saved, harm):
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    harm(folder / "step-00000004", tmp_path / "executed")
    assert spawn(2, resumes, str(folder)) == [{"step": 2, "told": 1}, {"step": 2, "told": 0}]
    assert not (tmp_path / "executed").exists()


@pytest.mark.slow
def test_the_best_and_the_newest_are_kept(tmp_path):
    spawn(2, keeping, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000006"]


def keeping(rank, folder):
    processes = Mesh(MeshShape(1, 2, 1), torch.device("cpu"))
    run = Run(TrainConfig.of(**FIRST, steps=9), text(), layout=Layout(processes))
    checkpoints = Checkpoints(Path(folder), every=1, keep=1, best=True, background=True)
    for step, loss in ((2, 1.0), (4, 3.0), (6, 2.0)):
        run.step = step
        checkpoints.write(run, loss)
    checkpoints.close()


ENVIRONMENT = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}


def launch(out, *more, restarts=0, ranks=2, **options):
    """`torchrun -m surefoot train`, in a group of processes of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", str(restarts), "--master-port", "0", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", "-m", "surefoot", "train", "--width", "32", "--batch-size", "8"]
    command += ["--out", str(out), *more]
    return subprocess.Popen(
        command, env=ENVIRONMENT, start_new_session=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        **options,
    )  # fmt: skip


def workers(launcher):
    """Process numbers of the workers of a launcher, by rank."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return [int(child) for child in children if b"surefoot" in Path(f"/proc/{child}/cmdline").read_bytes()]


def final(out):
    """The tensors of the last checkpoint, whole."""
    steps = json.loads((out / "config.json").read_text())
    known = TrainConfig().to_json()
    run = Run(TrainConfig.of(**{name: value for name, value in steps.items() if name in known}), text())
    checkpoints = Checkpoints(out / "checkpoints")
    checkpoints.resume(run)
    return run


@pytest.mark.slow
def test_a_killed_worker_is_started_again_and_ends_at_the_same_weights(tmp_path):
    settings = ("--steps", "60", "--checkpoint-every", "5", "--log-every", "1", "--mesh", "fsdp=2")
    undisturbed = launch(tmp_path / "calm", *settings)
    _, told = undisturbed.communicate(timeout=200)
    assert undisturbed.returncode == 0, told
    launcher = launch(tmp_path / "killed", *settings, restarts=1)
    for line in launcher.stderr:
        if line.startswith("step 13/"):
            os.kill(workers(launcher)[1], signal.SIGKILL)
            break
    rest = launcher.communicate(timeout=200)[1]
    assert launcher.returncode == 0, rest
    assert "step 11/60" in rest  # from the checkpoint of step 10, again
    runs = [final(tmp_path / name) for name in ("calm", "killed")]
    assert runs[0].step == runs[1].step == 60
    for (name, one), other in zip(runs[0].model.named_parameters(), runs[1].model.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.slow
def test_killed_at_any_moment_a_run_goes_on(tmp_path):
    """Ten times, mostly in the middle of a save; each start goes on from the last, in turns by both ways of saving."""
    generator = torch.Generator().manual_seed(0)
    settings = ("--steps", "4000", "--checkpoint-every", "1", "--log-every", "1", "--eval-every", "0")
    reached = 0
    for attempt in range(10):
        more = ("--async-checkpoints",) if attempt % 2 else ()
        launcher = launch(tmp_path, *settings, *more)
        first = None
        for line in launcher.stderr:
            if line.startswith("step "):
                first = first or int(line.split()[1].split("/")[0])
                if int(line.split()[1].split("/")[0]) >= first + 3:
                    break
        time.sleep(0.2 * float(torch.rand((), generator=generator)))
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
        for child in ("stdout", "stderr"):
            getattr(launcher, child).close()
        assert first is not None, "it did not start"
        assert first > reached, (attempt, first, reached)
        reached = first
    run = final(tmp_path)
    assert run.step >= reached


@pytest.mark.slow
def test_where_one_process_raises_the_others_end(tmp_path):
    (tmp_path / "config.json").write_text("{")  # read by the first process alone
    launcher = launch(tmp_path, "--steps", "20")
    stderr = launcher.communicate(timeout=100)[1]
    assert launcher.returncode != 0
    assert "config.json is not valid JSON" in stderr


@pytest.mark.slow
def test_a_mesh_that_does_not_fit_is_a_usage_error(tmp_path):
    launcher = launch(tmp_path, "--steps", "20", "--mesh", "fsdp=3")
    stderr = launcher.communicate(timeout=100)[1]
    assert "the mesh fsdp=3 has 3 processes, and 2 were started" in stderr
    assert not any(tmp_path.iterdir())
