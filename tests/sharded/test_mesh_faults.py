"""Damage, forgery, kills: what is lost of a run on a mesh, and what goes on."""

import functools
import io
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from mesh_runs import FIRST, text, trained
from test_processes import spawn

from surefoot.experiment.distributed.mesh import Mesh, MeshShape
from surefoot.experiment.distributed.processes import Layout
from surefoot.experiment.errors import CheckpointError
from surefoot.experiment.files import sha256_of as digest
from surefoot.experiment.training import checkpoint
from surefoot.experiment.training.checkpoint import Checkpoints
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.run import Run

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def own_dtype():
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


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
    (folder / name).write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"][name] = digest(folder / name)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def pickled(folder, mark):
    forge(folder, ".metadata", pickle.dumps(Tripwire(mark)))


def pickled_entry(folder, mark):
    """A number of the optimizer replaced by a pickle, with a manifest and a description that fit."""
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


def changed_class(folder, _):
    """A description that sets an attribute of a class of torch's, which is allowed, on its way."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    state = pickle.dumps(MetadataIndex, 2)[:-1]
    state += b"N}\x8c\x05fancy\x8c\x04evils\x86b0"
    forge(folder, ".metadata", state + pickle.dumps(pickle.loads((folder / ".metadata").read_bytes()), 2)[2:])


def elsewhere(folder, _):
    """A description that names a file outside the folder."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = f"../step-00000002/{place.relative_path}"
    forge(folder, ".metadata", pickle.dumps(metadata))


def factless(folder, _):
    """Facts without the step, and a manifest that fits them."""
    forge(folder, "facts.json", b'{"config": {}}')


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of steps 2 and 4, by two processes."""
    folder = tmp_path_factory.mktemp("saved")
    spawn(2, functools.partial(trained, every=2), (1, 2, 1), {"steps": 4}, None, str(folder))
    torch.set_default_dtype(torch.float32)
    return folder


@pytest.mark.parametrize(
    "harm", [flipped, truncated, headless, half, pickled, pickled_entry, changed_class, factless, elsewhere]
)
def test_a_damaged_folder_is_passed_over_and_runs_nothing(tmp_path, saved, harm):
    folder, mark = tmp_path / "checkpoints", tmp_path / "executed"
    shutil.copytree(saved, folder)
    harm(folder / "step-00000004", mark)
    torch.set_default_dtype(torch.float64)
    run = Run(TrainConfig(**FIRST, steps=4), text())
    with pytest.warns(UserWarning, match=r"(?s)step-00000004.*skipped"):
        Checkpoints(folder).resume(run)
    assert run.step == 2
    assert not mark.exists()
    harm(folder / "step-00000002", mark)
    if harm is not elsewhere:
        with pytest.warns(UserWarning, match="skipped"), pytest.raises(ValueError, match="no other can be read"):
            Checkpoints(folder).resume(Run(TrainConfig(**FIRST, steps=4), text()))
    assert not mark.exists()


def resumes(rank, folder, unreadable=None):
    """The step that a mesh resumes at where a file is damaged, and what it is told.

    The second process finds what it reads of one file other than it is.
    """
    read = checkpoint.load

    def load(path):
        if rank == 1 and path.name == unreadable:
            raise CheckpointError(f"{path} is damaged")
        return read(path)

    torch.set_default_dtype(torch.float64)
    processes = Mesh(MeshShape(1, 2, 1), torch.device("cpu"))
    run = Run(TrainConfig(**FIRST, steps=4), text(), layout=Layout(processes))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with mock.patch.object(checkpoint, "load", load):
            Checkpoints(Path(folder)).resume(run)
    return {"step": run.step, "told": sum("skipped" in str(warning.message) for warning in told)}


@pytest.mark.parametrize("harm", [flipped, pickled, pickled_entry])
def test_all_processes_pass_over_a_damaged_folder_together(tmp_path, saved, harm):
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    harm(folder / "step-00000004", tmp_path / "executed")
    assert spawn(2, resumes, str(folder)) == [{"step": 2, "told": 1}, {"step": 2, "told": 0}]
    assert not (tmp_path / "executed").exists()


def test_a_file_that_one_process_alone_cannot_read_is_passed_over_by_all(tmp_path):
    trained(0, None, {"steps": 4}, None, str(tmp_path), every=2)
    found = spawn(2, resumes, str(tmp_path), "step-00000004.pt")
    assert found == [{"step": 2, "told": 1}, {"step": 2, "told": 0}]


def test_the_best_and_the_newest_are_kept(tmp_path):
    (tmp_path / "step-00000008").mkdir()
    (tmp_path / "step-00000009.tmp").mkdir()
    assert spawn(2, keeping, str(tmp_path)) == [6, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-0000000{step}" for step in (2, 6, 8)]


def keeping(rank, folder):
    """Three checkpoints beside a later one that is damaged and one that nobody finished; the step of a resumed run."""
    processes = Mesh(MeshShape(1, 2, 1), torch.device("cpu"))
    config, layout = TrainConfig(**FIRST, steps=9), Layout(processes)
    run = Run(config, text(), layout=layout)
    checkpoints = Checkpoints(Path(folder), every=1, keep=1, best=True, background=True)
    for step, loss in ((2, 1.0), (4, 3.0), (6, 2.0)):
        run.step = step
        checkpoints.write(run, loss)
    checkpoints.close()
    again = Run(config, text(), layout=layout)
    checkpoints.resume(again)
    return again.step


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
    run = Run(TrainConfig(**{name: value for name, value in steps.items() if name in known}), text())
    checkpoints = Checkpoints(out / "checkpoints")
    checkpoints.resume(run)
    return run


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


def test_where_one_process_raises_the_others_end(tmp_path):
    (tmp_path / "config.json").write_text("{")  # read by the first process alone
    launcher = launch(tmp_path, "--steps", "20")
    stderr = launcher.communicate(timeout=100)[1]
    assert launcher.returncode != 0
    assert "config.json is not valid JSON" in stderr


def test_a_mesh_that_does_not_fit_is_a_usage_error(tmp_path):
    launcher = launch(tmp_path, "--steps", "20", "--mesh", "fsdp=3")
    stderr = launcher.communicate(timeout=100)[1]
    assert "the mesh fsdp=3 needs 3 processes, but 2 were started" in stderr
    assert not any(tmp_path.iterdir())
