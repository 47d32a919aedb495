"""`surefoot tokens`, and training from what it wrote: files of every kind of damage end with exit code 4."""

import json

import pytest

from surefoot.cli import main
from surefoot.experiment.models.decoder import reference

from .commands import SMALL, refused, training

pytest.importorskip("tokenizers")
pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture
def written(tmp_path, text, capsys):
    out = tmp_path / "tokens"
    assert main(["tokens", f"{text}", f"{out}", "--vocab", "270"]) == 0
    said = capsys.readouterr()
    assert "tokens of 270" in said.out
    assert "in 1 files; 1 documents" in said.out
    assert said.err.startswith("surefoot: no tokens for validation: one document in 100 is for validation; runs split")
    assert said.err.count("\n") == 1
    return out


def test_training_from_written_tokens_and_going_on(written, tmp_path, capsys):
    out = tmp_path / "run"
    train = training(out, f"bin:{written}")
    assert main([*train, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["parameters"] == sum(p.numel() for p in reference("gpt", 16, 1, 16, 270).parameters())
    assert main([*training(tmp_path / "second", f"bin:{written}"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["val_loss"] == result["val_loss"]
    assert main(["tokens", "--verify", f"{written}"]) == 0
    assert "all as they were written" in capsys.readouterr().out


def test_a_sweep_over_tokens(inline, written, tmp_path, capsys):
    sweep = ["transfer", "--out", f"{tmp_path / 'run'}", "--data", f"bin:{written}", "--widths", "16", *SMALL]
    assert main([*sweep, "--steps", "3", "--rates", "-7", "--recipes", "adamw", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["settings"]["data"] == f"bin:{written}"


def test_damage_is_a_data_error(written, tmp_path, capsys):
    def train(*more, data=f"bin:{written}"):
        return refused(training(tmp_path / "run", data, *more), capsys, code=4)

    shard = next(written.glob("*.bin"))
    whole = shard.read_bytes()
    assert "holds the token" in train("--vocab", "200")
    shard.write_bytes(whole[:-2])
    assert f"{shard} has" in train()
    shard.write_bytes(b"\0" + whole[1:])
    assert "was changed or copied" in train()
    assert "is damaged: its SHA-256" in refused(["tokens", "--verify", f"{written}"], capsys, code=4)
    shard.unlink()
    assert f"cannot read {shard}" in train()
    assert "does not exist" in train(data="bin:/none")
    (tmp_path / "odd.bin").write_bytes(b"abc")
    assert "odd number of bytes" in train(data=f"bin:{tmp_path / 'odd.bin'}")
    assert "does not exist" in refused(["tokens", "/none", f"{tmp_path / 'o'}", "--vocab", "300"], capsys, code=4)


def test_wrong_usage(written, tmp_path, text, capsys):
    assert "give IN and OUT" in refused(["tokens", f"{text}", f"{written}", "--verify"], capsys)
    assert "holds another conversion" in refused(["tokens", f"{text}", f"{written}", "--vocab", "280"], capsys)
    assert "give the size of a vocabulary" in refused(["tokens", f"{text}", f"{tmp_path / 'o'}"], capsys)
    assert "--vocab 9 is for --data bin:PATH" in refused(training(tmp_path / "r", text, "--vocab", "9"), capsys)


def test_evaluation_on_a_text_or_on_other_tokens(written, tmp_path, text, capsys):
    other = tmp_path / "other"
    assert main(["tokens", f"{text}", f"{other}", "--tokenizer", f"{written}", "--layout", "raw"]) == 0
    data, losses = f"bin:{written}", {}
    for name, source in (("plain", None), ("tokens", f"bin:{other}"), ("text", f"{text}")):
        more = ["--eval-data", source] if source else []
        assert main(training(tmp_path / name, data, *more)) == 0
        losses[name] = json.loads((tmp_path / name / "result.json").read_text())["val_loss"]
    assert losses["tokens"] == losses["plain"]
    assert abs(losses["text"] - losses["plain"]) < 0.2  # the text's own last tenth is cut by bytes
    backwards = tmp_path / "backwards.txt"
    backwards.write_text(text.read_text()[::-1])
    third = tmp_path / "third"  # as many tokens, others
    assert main(["tokens", f"{backwards}", f"{third}", "--vocab", "270", "--validation-one-in", "1"]) == 0
    capsys.readouterr()
    for source in (f"bin:{third}", f"bin:300:{other}", "markov:64"):
        assert "has another vocabulary" in refused(
            training(tmp_path / "x", data, "--eval-data", source), capsys, code=4
        )
