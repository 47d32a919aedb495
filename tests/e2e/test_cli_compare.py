"""`surefoot compare` and the report of its directory, interrupted too."""

import io
import json
import os
import signal
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from surefoot.cli import main
from surefoot.experiment.files import locked

from .commands import CORPUS, SMALL, lines, refused, undeep

WHO = ("--recipes", "steady", "adamw", "--published", "adamw@0.02", "adamw@1e30", "--baseline", "adamw")


def compare(out: Path, text: Path, *more: str) -> list[str]:
    size = ["--width", "16", "--steps", "12", *SMALL, "--rates-per-recipe", "4", "--evaluations", "5"]
    return ["compare", "--out", f"{out}", "--data", f"{text}", *size, "--workers", "1", *more]


def without_seconds(summary: dict[str, object]) -> dict[str, object]:
    def bare(value: object) -> object:
        if isinstance(value, dict):
            return {key: bare(inner) for key, inner in value.items() if not key.startswith("seconds")}
        return [bare(inner) for inner in value] if isinstance(value, list) else value

    return {key: bare(value) for key, value in summary.items() if key != "environment"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, inline: None) -> tuple[Path, Path, str, str]:
    folder = tmp_path_factory.mktemp("finished")
    text = folder / "text.txt"
    text.write_bytes(CORPUS)
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main(compare(folder / "run", text, *WHO))
    assert code == 0, err.getvalue()
    return folder / "run", text, out.getvalue(), err.getvalue()


def test_the_table_names_everyone_and_the_same_number_of_runs(finished):
    run, text, out, err = finished
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in out.splitlines() if line.startswith("| ")]
    tuned, published = [[name, "tuned, 4 runs"] for name in ("steady", "adamw")], ("adamw@0.02", "adamw@1e30")
    assert rows[1:] == [*tuned, *([name, "published, 0 runs"] for name in published)]
    assert "0 of 0, 3 of 3" in out
    assert out.endswith(f"picture: {run}/compare.png\n")
    assert (run / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert "Lowest loss" in (run / "report.html").read_text()
    assert err.startswith(f"surefoot: writing to {run}/, data: {text}")
    summary = json.loads((run / "summary.json").read_text())
    assert [entry["curve"] and entry["curve"]["step"] for entry in summary["recipes"]] == [[0, 3, 6, 9, 12]] * 3 + [
        None
    ]
    final = {(record["seed"], record["val_loss"] is None) for record in lines(run / "final" / "results.jsonl")}
    assert final == {(seed, diverged) for seed in (1, 2, 3) for diverged in (True, False)}
    for record in lines(run / "final" / "results.jsonl"):
        if record["val_loss"] is not None:
            assert record["facts"]["curve"]["val_loss"][-1] == record["val_loss"]


def test_a_rerun_runs_nothing_and_speaks_json(finished, capsys):
    run, text, _, _ = finished
    before = [(run / stage / "results.jsonl").read_bytes() for stage in ("tuning", "final")]
    assert main([*compare(run, text, *WHO), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((run / "summary.json").read_text())
    assert [(run / stage / "results.jsonl").read_bytes() for stage in ("tuning", "final")] == before


def test_report_remakes_table_and_picture(finished, capsys):
    run, _, out, _ = finished
    (run / "compare.png").unlink()
    assert main(["report", f"{run}"]) == 0
    assert capsys.readouterr().out == out
    assert (run / "compare.png").exists()
    assert main(["report", f"{run}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((run / "summary.json").read_text())


@pytest.mark.slow  # tests/unit/experiment/comparison stops fake runs in both stages
def test_an_interrupted_comparison_goes_on_to_the_same_summary(finished, tmp_path, capsys, signal_at):
    run, text, _, _ = finished
    out = tmp_path / "run"
    signal_at(signal.SIGINT, "results.jsonl", 5)
    assert main(compare(out, text, *WHO)) == 130
    assert "surefoot: interrupted; what was finished is kept: the same command goes on" in capsys.readouterr().err
    assert main(["report", f"{out}"]) == 0
    unfinished = capsys.readouterr().out
    assert "tuning is unfinished" in unfinished
    assert "picture" not in unfinished
    assert main([*compare(out, text, *WHO), "--json"]) == 0
    again, first = json.loads(capsys.readouterr().out), json.loads((run / "summary.json").read_text())
    assert without_seconds(again) == without_seconds(first)


def test_a_second_writer_and_another_configuration_are_refused(finished, capsys):
    run, text, _, _ = finished
    with locked(run):
        message = refused(compare(run, text, *WHO), capsys, code=6)
    assert f"{run} is in use by another run (process {os.getpid()})" in message
    other = refused(compare(run, text, *WHO, "--seeds", "4"), capsys)
    assert "belongs to another configuration; it differs in seeds: there 3, now 4" in other


def test_a_model_that_diverges_under_everything_ends_well(inline, tmp_path, text, monkeypatch, capsys):
    (tmp_path / "broken_models.py").write_text(
        "from torch import nn\n"
        "class Broken(nn.Module):\n"
        "    def __init__(self, width):\n"
        "        super().__init__()\n"
        "        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256, bias=False)\n"
        "    def forward(self, tokens):\n"
        "        return self.head(self.embed(tokens)) * float('nan')\n"
        "    def get_input_embeddings(self): return self.embed\n"
        "    def get_output_embeddings(self): return self.head\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = ("--model", "broken_models:Broken", "--recipes", "adamw")
    assert main(undeep(compare(tmp_path / "run", text, *own))) == 0
    out = capsys.readouterr().out
    assert "| adamw  | tuned, 4 runs | none: diverged at every rate | none |" in out
    assert "picture" not in out
    assert not (tmp_path / "run" / "final").exists()


def test_wrong_usage(tmp_path, text, capsys):
    out = tmp_path / "run"
    assert "muon is not compared: add it to --recipes" in refused(compare(out, text, "--baseline", "muon"), capsys)
    assert (
        "argument --published: 'muon' lacks a learning rate above 0, at most 2**120; write it like muon@0.02"
        in refused(compare(out, text, "--published", "muon"), capsys)
    )
    assert "width 24 is not a multiple" in refused([*compare(out, text), "--width", "24"], capsys)
    assert "adamw is torch's own optimizer, without stabilisers" in refused(
        compare(out, text, "--published", "adamw@0.1", "--recipes", "steady", "--stabiliser", "post_clip:2"), capsys
    )
    assert not out.exists()
