"""What is sent to Weights & Biases, by a module in its place; and by the package, where it is installed."""

import sys
import types

import pytest

from surefoot.experiment.training.boards import wandb

LINE = {"step": 3, "norms": {"up": [1.5, 2.0], "odd": [None, None]}, "updates": {"up": 0.125}}


@pytest.fixture
def sent(monkeypatch):
    """Calls of the functions that a run of wandb's has, in order."""
    calls = []
    run = types.SimpleNamespace(
        log=lambda scalars, step: calls.append((step, scalars)), finish=lambda: calls.append("finish")
    )
    module = types.SimpleNamespace(init=lambda **options: calls.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return calls


def test_records_and_norms_are_sent_offline(sent, tmp_path):
    with wandb(tmp_path / "one", {"width": 16}) as board:
        assert sent == []
        board.losses({"step": 3, "loss": None, "val_loss": 1.5, "lr": 0.25, "tokens": 7, "tokens_per_second": 9.0})
        board.norms(LINE)
    begun, losses, norms, end = sent
    assert begun == {"dir": f"{tmp_path / 'one'}", "name": "one", "config": {"width": 16}, "mode": "offline"}
    assert losses == (3, {"val_loss": 1.5, "lr": 0.25, "tokens_per_second": 9.0})
    assert norms == (3, {"norm/up": 1.5, "update/up": 0.125})
    assert end == "finish"


def test_the_environment_says_otherwise(sent, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with wandb(tmp_path, {}) as board:
        board.norms(LINE)
    assert sent[0]["mode"] == "disabled"


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RuntimeError, match=r"--wandb: .*pip install 'surefoot\[wandb\]'"):
        wandb(tmp_path, {})


@pytest.mark.integration
@pytest.mark.filterwarnings("default")
def test_the_package_writes_to_the_disk(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with wandb(tmp_path, {"width": 16}) as board:
        board.losses({"step": 3, "loss": 1.5, "lr": 0.25})
        board.norms(LINE)
    assert [*tmp_path.glob("wandb/offline-run-*/*.wandb")]
