"""TensorBoard's files, read back by TensorBoard."""

import sys

import pytest

from surefoot.experiment.training.boards import tensorboard

EVENTS = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def scalars(folder):
    events = EVENTS.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def write(folder, steps, shift=0.0):
    with tensorboard(folder) as board:
        for step in steps:
            board.losses({"step": step, "loss": step / 4 + shift, "lr": 0.5, "tokens": 7})
            board.norms({"step": step, "lr": 0.5, "norms": {"up": [1.5, None], "odd": [None, None]}})


def test_scalars_come_back(tmp_path):
    with tensorboard(tmp_path) as board:
        board.losses({"step": 3, "loss": None, "val_loss": 1.5, "lr": 0.25})
        board.norms({"step": 3, "norms": {"up": [1.5, 2.0]}, "updates": {"up": 0.125}})
    written = scalars(tmp_path)
    assert written == {"val_loss": [(3, 1.5)], "lr": [(3, 0.25)], "norm/up": [(3, 1.5)], "update/up": [(3, 0.125)]}


def test_a_resumed_run_replaces_the_steps_it_repeats(tmp_path):
    write(tmp_path, [1, 2, 3])
    write(tmp_path, [3, 4], shift=0.5)
    assert scalars(tmp_path)["loss"] == [(1, 0.25), (2, 0.5), (3, 1.25), (4, 1.5)]
    assert "norm/odd" not in scalars(tmp_path)


def test_nothing_is_written_before_there_is_a_record(tmp_path):
    with tensorboard(tmp_path / "board"):
        pass
    assert not (tmp_path / "board").exists()


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(RuntimeError, match=r"pip install 'surefoot\[tensorboard\]'"):
        tensorboard(tmp_path)
