"""Checkpoints under crashes, full disks and flipped bytes."""

import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from surefoot.experiment.distributed.processes import Layout
from surefoot.experiment.errors import CheckpointError
from surefoot.experiment.training.checkpoint import Checkpoints, load, save

PAYLOAD = {"step": 3, "weights": {"w": torch.arange(1000.0)}, "rates": [0.1, 0.2], "name": "run"}


class Loaded:
    """What a run keeps of the state that it is given."""

    layout, loaded = Layout(), None

    def state(self):
        return {}

    def load_state(self, state):
        self.loaded = state


def newest(folder):
    """The checkpoint that a run resumes from."""
    run = Loaded()
    folder.resume(run)
    return run.loaded


def test_round_trip(tmp_path):
    save(tmp_path / "a.pt", PAYLOAD)
    loaded = load(tmp_path / "a.pt")
    assert torch.equal(loaded["weights"]["w"], PAYLOAD["weights"]["w"])
    assert {**loaded, "weights": 0} == {**PAYLOAD, "weights": 0}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "a.pt.sha256.json"]


def test_every_flipped_byte_is_noticed(tmp_path):
    path = tmp_path / "a.pt"
    save(path, PAYLOAD)
    data = path.read_bytes()
    for place in range(0, len(data), 97):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(ValueError, match=r"a\.pt is damaged: its SHA-256"):
            load(path)
    path.write_bytes(data[:-10])
    with pytest.raises(ValueError, match="is damaged"):
        load(path)


def test_a_manifest_that_is_missing_or_damaged_is_named(tmp_path):
    path, manifest = tmp_path / "a.pt", tmp_path / "a.pt.sha256.json"
    save(path, PAYLOAD)
    for content in (b"", b"[]", b"{}", b"\xff", b'{"sha256": 1}'):
        manifest.write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.pt"):
            load(path)
    manifest.unlink()
    with pytest.raises(ValueError, match=r"a\.pt cannot be verified: a\.pt\.sha256\.json is missing"):
        load(path)


class Harm:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_what_is_no_checkpoint_is_refused_and_not_run(tmp_path):
    path = tmp_path / "a.pt"
    save(path, {"path": Harm(tmp_path / "harm")})
    with pytest.raises(CheckpointError, match=r"a\.pt is not a checkpoint: it holds other things") as refused:
        load(path)
    assert "weights_only" not in str(refused.value)
    for data in (b"", b"junk", pickle.dumps(3), pickle.dumps(Harm(tmp_path / "harm"))):
        path.write_bytes(data)
        (tmp_path / "a.pt.sha256.json").write_text(json.dumps({"sha256": [hashlib.sha256(data).hexdigest()]}))
        with pytest.raises(CheckpointError, match=r"a\.pt is not a checkpoint"):
            load(path)
    assert not (tmp_path / "harm").exists()


def crash_after(monkeypatch, survives):
    """The machine goes down after so many files were replaced."""
    moves = []

    def crash(source, target):
        if len(moves) == survives:
            raise OSError(5, "Input/output error")
        moves.append(target)
        os.rename(source, target)

    monkeypatch.setattr(os, "replace", crash)


@pytest.mark.parametrize("survives", [0, 1])
def test_a_crash_between_the_two_moves_leaves_a_checkpoint_that_loads(tmp_path, monkeypatch, survives):
    path = tmp_path / "a.pt"
    save(path, {"step": 1})
    crash_after(monkeypatch, survives)
    with pytest.raises(OSError, match=r"cannot write .*a\.pt"):
        save(path, {"step": 2})
    assert load(path) == {"step": 1}


@pytest.mark.parametrize("listed", [True, False], ids=["damaged", "no manifest"])
def test_a_crash_between_the_two_moves_makes_no_damaged_checkpoint_sound(tmp_path, monkeypatch, listed):
    path = tmp_path / "a.pt"
    save(path, {"step": 1})
    path.write_bytes(path.read_bytes().replace(b"step", b"stop"))
    if not listed:
        path.with_name(f"{path.name}.sha256.json").unlink()
    crash_after(monkeypatch, 1)
    with pytest.raises(OSError, match="cannot write"):
        save(path, {"step": 2})
    with pytest.raises(CheckpointError, match="is damaged: its SHA-256"):
        load(path)


def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path, file_size_limit):
    """A limit on the size of files: writing fails in the middle, as on a full disk."""
    folder = Checkpoints(tmp_path)
    folder.save(1, {"step": 1, "w": torch.zeros(100)})
    file_size_limit(20_000)
    for _ in range(2):
        with pytest.raises(OSError, match=r"step-00000002\.pt: File too large; what was saved earlier is intact"):
            folder.save(2, {"step": 2, "w": torch.zeros(100_000)})
    assert newest(folder)["step"] == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_dev_full(tmp_path):
    (tmp_path / f".a.pt.{os.getpid()}.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device; what was saved earlier is intact"):
        save(tmp_path / "a.pt", PAYLOAD)
    assert not (tmp_path / "a.pt").exists()


def test_kill_while_saving_loses_nothing(tmp_path):
    script = """
import sys, torch
from pathlib import Path
from surefoot.experiment.training.checkpoint import Checkpoints, save
path = Path(sys.argv[1]) / "one.pt"
step = 0
while True:
    step += 1
    save(path, {"step": step, "w": torch.full((200_000,), float(step))})
    print(step, flush=True)
"""
    done = 0
    with subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            done = int(line)
            if done == 20:
                time.sleep(0.003)
                process.send_signal(signal.SIGKILL)
    loaded = load(tmp_path / "one.pt")
    assert loaded["step"] in (done, done + 1)
    assert torch.equal(loaded["w"], torch.full((200_000,), float(loaded["step"])))


def test_the_newest_whole_checkpoint_is_taken(tmp_path):
    folder = Checkpoints(tmp_path)
    assert newest(folder) is None
    for step in (8, 9, 10):
        folder.save(step, {"step": step})
    (tmp_path / "step-00000010.pt").write_bytes(b"torn")
    with pytest.warns(UserWarning, match=r"step-00000010\.pt is damaged"):
        assert newest(folder) == {"step": 9}
    (tmp_path / "step-00000009.pt.sha256.json").unlink()
    with (
        pytest.warns(UserWarning, match="damaged|verified"),
        pytest.raises(ValueError, match=r"step-00000009\.pt cannot be verified"),
    ):
        newest(folder)


def test_old_checkpoints_go(tmp_path):
    folder = Checkpoints(tmp_path)
    for step in (1, 2, 99_999_999, 100_000_000):
        folder.save(step, {"step": step})
    names = sorted(path.name for path in tmp_path.glob("*.pt"))
    assert names == ["step-100000000.pt", "step-99999999.pt"]
    assert newest(folder) == {"step": 100_000_000}


def test_steps_between_checkpoints_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="got 0"):
        Checkpoints(tmp_path, every=0)


def test_a_checkpoint_that_was_passed_over_displaces_no_sound_one(tmp_path):
    """Not as the newest, and not as the best, whose loss its manifest still tells."""
    folder = Checkpoints(tmp_path, keep=1, best=True)
    folder.save(10, {"step": 10}, 2.0)
    folder.save(20, {"step": 20}, 1.0)
    (tmp_path / "step-00000020.pt").write_bytes(b"torn")
    folder.save(30, {"step": 30}, 3.0)
    (tmp_path / "step-00000030.pt").write_bytes(b"torn")
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(ValueError, match="no other can be read"):
        newest(folder)
    folder.save(15, {"step": 15}, 4.0)
    folder.save(25, {"step": 25}, 5.0)
    folder.save(35, {"step": 35}, 6.0)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["step-00000015.pt", "step-00000035.pt"]
    assert newest(folder) == {"step": 35}


def test_a_folder_that_cannot_be_listed_is_an_error_and_no_new_start(tmp_path):
    """A link to a disk that is not mounted: a run that began anew would cut its log."""
    (tmp_path / "checkpoints").symlink_to(tmp_path / "not mounted")
    with pytest.raises(FileNotFoundError, match="checkpoints"):
        newest(Checkpoints(tmp_path / "checkpoints"))


def test_what_a_killed_process_left_is_deleted_when_the_run_is_resumed(tmp_path):
    folder = Checkpoints(tmp_path)
    folder.save(5, PAYLOAD)
    sound = sorted(tmp_path.iterdir())
    for name in (".step-00000006.pt.77.tmp", ".step-00000006.pt.sha256.json.77.tmp", "step-00000004.pt.sha256.json"):
        (tmp_path / name).write_bytes(b"half")
    assert newest(folder)["step"] == 3
    assert sorted(tmp_path.iterdir()) == sound
