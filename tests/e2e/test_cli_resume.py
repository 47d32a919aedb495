"""`surefoot train --resume`: from the newest checkpoint, from none, from one by its path."""

import json
import re

import pytest

from surefoot.cli import main
from surefoot.experiment.training.checkpoint import save

from .commands import lines, refused, training

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture
def done(tmp_path, text, capsys):
    """A finished run with checkpoints of steps 3 and 6."""
    assert main(training(tmp_path / "done", text, "--checkpoint-every", "3")) == 0
    capsys.readouterr()
    return tmp_path / "done"


def outcome(run):
    result = json.loads((run / "result.json").read_text())
    return result["train_loss"], result["val_loss"], result["steps"]


def test_never_starts_afresh_and_refuses_a_directory_with_checkpoints(done, tmp_path, text, capsys):
    fresh = training(tmp_path / "fresh", text, "--resume", "never")
    assert main(fresh) == 0
    assert outcome(tmp_path / "fresh") == outcome(done)
    capsys.readouterr()
    said = refused(fresh, capsys)
    assert "fresh/checkpoints/step-00000006.pt exists: choose another directory, or continue" in said


def test_a_path_is_gone_on_from_in_another_directory_and_in_its_own(done, tmp_path, text, capsys):
    path = done / "checkpoints" / "step-00000003.pt"
    other = tmp_path / "other"
    for out in (other, done):
        assert main(training(out, text, "--log-every", "1", "--resume", f"{path}")) == 0
        assert f"surefoot: going on from {path}\n" in capsys.readouterr().err
        assert [record["step"] for record in lines(out / "log.jsonl")] == [4, 5, 6]
    assert outcome(other) == outcome(done)
    assert [path.name for path in (other / "checkpoints").glob("*.pt")] == ["step-00000006.pt"]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("payload", [{"config": print}, {"step": 6}], ids=["code", "other facts"])
def test_a_file_that_is_no_checkpoint_is_passed_over(done, tmp_path, text, capsys, payload):
    newest, before = done / "checkpoints" / "step-00000006.pt", outcome(done)
    save(newest, payload)
    said = refused(training(tmp_path / "other", text, "--resume", f"{newest}"), capsys, code=5)
    assert f"{newest} is not a checkpoint" in said
    (done / "result.json").unlink()
    assert main(training(done, text)) == 0
    assert re.search(r"step-00000006\.pt is not a checkpoint.*skipped", capsys.readouterr().err)
    assert outcome(done) == before


def test_a_path_that_is_damaged_missing_or_of_another_run_is_refused(done, tmp_path, text, capsys):
    path, out = done / "checkpoints" / "step-00000006.pt", tmp_path / "other"
    said = refused([*training(tmp_path / "wide", text, "--resume", f"{path}"), "--lr", "0.5"], capsys)
    assert "the checkpoint is of another run: it differs in lr" in said
    path.write_bytes(path.read_bytes()[:-1])
    arguments = training(out, text, "--resume", f"{path}")
    assert f"{path} is damaged" in refused(arguments, capsys, code=5)  # although step 3 is sound
    path.unlink()
    assert f"there is no checkpoint {path}" in refused(arguments, capsys, code=5)
    said = refused(training(out, text, "--resume", f"{done}"), capsys, code=5)
    assert f"{done} is a run directory: its checkpoints lie in {done / 'checkpoints'}" in said
    assert main(training(out, text, "--resume", "auto")) == 0  # how a run starts is no part of what it is
    assert outcome(out) == outcome(done)


def test_one_without_an_average_is_of_another_run(done, tmp_path, text, capsys):
    path = done / "checkpoints" / "step-00000006.pt"
    said = refused(training(tmp_path / "x", text, "--average", "0.9", "--resume", f"{path}"), capsys)
    assert "the checkpoint is of another run: it differs in average" in said
