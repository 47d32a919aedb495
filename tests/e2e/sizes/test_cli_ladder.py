"""`surefoot ladder` with real models, its report, and a rerun that trains the target alone."""

import json

from e2e.commands import SMALL, lines, refused
from inline_executor import Inline
from surefoot.cli import main
from surefoot.scaling import LAWS, Run


def test_a_ladder_is_trained_by_the_law_and_goes_on_with_its_target(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("surefoot.cli.chosen.executor", lambda _: Inline())
    command = ["ladder", "--widths", "16", "32", "48", "--to-width", "64", "--data", "markov:16", *SMALL]
    command += ["--tokens-per-parameter", "0.05", "--seeds", "2", "--out", f"{tmp_path / 'run'}"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "Predicted loss at width 64: " in out
    assert "Measured there: not yet; --train-target trains it" in out
    for width in (16, 32, 48):
        records = lines(tmp_path / "run" / f"width_{width}" / "results.jsonl")
        assert {record["seed"] for record in records} == {0, 1}
        assert {2 ** record["log2_lr"] for record in records} == {LAWS["steady"](Run(records[0]["steps"], 64))}
    assert main([*command, "--train-target", "--json"]) == 0
    told = capsys.readouterr()
    target = json.loads(told.out)["target"]
    (measured,) = lines(tmp_path / "run" / "width_64" / "results.jsonl")
    assert target["off"] == target["predicted"] - measured["val_loss"]
    assert told.err.count("] steady width") == 1
    assert main(["report", f"{tmp_path / 'run'}"]) == 0
    assert f"Measured there: {measured['val_loss']:.3f}; the prediction is {target['off']:+.3f} nats off" in (
        capsys.readouterr().out
    )
    assert {path.name for path in (tmp_path / "run").glob("*.*")} >= {"summary.json", "ladder.png", "report.html"}


def test_what_cannot_be_a_ladder(tmp_path, capsys):
    out = ["--data", "markov:16", "--out", f"{tmp_path / 'run'}"]
    assert "needs 3 values, got [16, 32]" in refused(
        ["ladder", "--widths", "16", "32", "--to-width", "64", *out], capsys
    )
    message = refused(["ladder", "--recipes", "muon", "--to-width", "64", *out], capsys)
    assert "unknown method 'muon'; choose one of steady, steady_bounded" in message
    assert not (tmp_path / "run").exists()
