"""`surefoot audit`, `coordcheck` and `report`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import run_directories as made
from surefoot.cli import main

from .commands import SMALL, lines, refused, undeep


def test_audit_prints_the_plan(capsys):
    assert main(["audit", "--model", "llama", "--width", "32", "--depth", "1"]) == 0
    table = capsys.readouterr().out
    assert "LM head, by get_output_embeddings()" in table
    assert main(["audit", "--recipe", "muon", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {row["role"] for row in plan["parameters"]} == {"embedding", "gain", "linear", "head"}
    assert plan["hash"]


def test_audit_of_a_model_of_ones_own(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_models.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Odd(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.mystery = nn.Parameter(torch.zeros(2, 3))\n"
        "def good(): return nn.Linear(2, 3)\n"
        "def number(): return 5\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["audit", "my_models:good"]) == 0
    assert "bias of Linear(2, 3)" in capsys.readouterr().out
    assert main(["audit", "--model", "my_models:good"]) == 0
    assert "bias of Linear(2, 3)" in capsys.readouterr().out
    assert "cannot place mystery (2, 3)" in refused(["audit", "--model", "my_models:Odd"], capsys, code=1)
    assert "returned a int, not an nn.Module" in refused(["audit", "--model", "my_models:number"], capsys)
    assert "has no function 'absent'" in refused(["audit", "--model", "my_models:absent"], capsys)
    assert "No module named 'absent'" in refused(["audit", "--model", "absent:build"], capsys)
    assert "unknown reference model 'bert'; choose from gpt, llama, qwen, moe, tied" in refused(
        ["audit", "--model", "bert"], capsys
    )


def test_audit_warns_of_weights_far_from_norm_1(tmp_path, monkeypatch, capsys):
    body = ("layer = nn.Linear(16, 16)", "layer.weight.data *= 100", "return layer")
    source = "from torch import nn\n\ndef big():\n    " + "\n    ".join(body) + "\n"
    (tmp_path / "far_models.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["audit", "far_models:big"]) == 0
    out = capsys.readouterr().out
    assert "warning: weight has norm" in out
    assert "relative_to" in out
    assert main(["audit", "--width", "64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []


def test_report_on_a_folder_that_is_no_run(tmp_path, capsys):
    assert f"{tmp_path} is no run directory" in refused(["report", f"{tmp_path}"], capsys)


def test_report_of_a_run_that_has_nothing_yet_says_so(tmp_path, capsys):
    for config, said in (
        ('{"method": "adamw"}', "holds a check that has not finished"),
        ('{"method": "adamw", "width": 64}', "has no norms yet"),
    ):
        (tmp_path / "config.json").write_text(config)
        assert said in refused(["report", f"{tmp_path}"], capsys)


def test_report_of_a_run_that_may_only_be_read_has_no_picture_and_says_so(tmp_path, capsys, monkeypatch):
    directory = made.sweep(tmp_path / "run")
    monkeypatch.setattr("surefoot.cli.report.os.access", lambda path, mode: (path, mode) != (directory, os.W_OK))
    assert main(["report", f"{directory}"]) == 0
    said = capsys.readouterr()
    assert "| level " in said.out
    assert "picture" not in said.out
    assert said.err.startswith(f"surefoot: {directory}: no picture: it is read-only")
    assert not (directory / "transfer.png").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_report_of_a_run_and_data_whose_paths_are_not_utf_8(tmp_path, capsysbinary):
    directory = made.sweep(tmp_path / os.fsdecode(b"caf\xe9"))
    config = json.loads((directory / "config.json").read_text())
    made.write(directory / "config.json", {**config, "settings": {"text": os.fsdecode(b"corp\xff.txt")}})
    for more, said in (((), b"\npicture: %s/transfer.png\n"), (("--html",), b"%s/report.html\n")):
        assert main(["report", f"{directory}", *more]) == 0
        assert capsysbinary.readouterr().out.endswith(said % os.fsencode(directory))
    assert main(["report", f"{directory}", "--html", "--json"]) == 0
    assert json.loads(capsysbinary.readouterr().out) == f"{directory}/report.html"
    page = (directory / "report.html").read_text("utf-8")
    assert r"caf\udce9" in page
    assert r"corp\udcff.txt" in page


def test_an_output_that_has_few_letters_has_other_names_of_the_rest(tmp_path):
    command = [sys.executable, "-m", "surefoot", "report", f"{made.sweep(tmp_path / 'run', seeds=3)}"]
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert r" \xb1 0." in done.stdout


def check(out: Path, text: Path, *more: str) -> list[str]:
    return ["coordcheck", "--out", f"{out}", "--data", f"{text}", "--widths", "16", "32", "--steps", "3", *SMALL, *more]


def test_coordcheck_writes_results_summary_table_and_picture(tmp_path, text, capsys):
    out = tmp_path / "run"
    assert main(check(out, text, "--band", "5")) == 0
    said, progress = capsys.readouterr()
    assert "| blocks.0.mlp.up           | " in said
    assert "passes: all 22 slopes within ±5" in said
    assert said.endswith(f"picture: {out}/coordcheck.png\n")
    assert (out / "coordcheck.png").read_bytes().startswith(b"\x89PNG")
    assert "Slopes by layer" in (out / "report.html").read_text()
    assert progress.count("seed ") == 6
    assert [(r["width"], r["seed"]) for r in lines(out / "results.jsonl")] == [
        (w, s) for w in (16, 32) for s in range(3)
    ]
    assert main(check(out, text, "--band", "1e-6", "--json")) == 1
    said, progress = capsys.readouterr()
    assert json.loads(said) == json.loads((out / "coordcheck.json").read_text())
    assert "seed " not in progress
    (out / "coordcheck.png").unlink()
    assert main(["report", f"{out}"]) == 0
    assert "FAILS: " in capsys.readouterr().out
    assert (out / "coordcheck.png").exists()
    other = refused(check(out, text, "--lr", "0.5"), capsys)
    assert f"it differs in lr: there {json.loads((out / 'config.json').read_text())['lr']}, now 0.5" in other


def test_coordcheck_of_a_model_of_ones_own(tmp_path, text, monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr(sys, "path", list(sys.path))
    own = [
        "--model",
        "examples.own_width:build",
        "--seeds",
        "1",
        "--widths",
        "32",
        "128",
        "--steps",
        "8",
        "--band",
        "0.2",
    ]
    assert main(undeep(check(tmp_path / "ours", text, *own))) == 0
    assert main(undeep(check(tmp_path / "adamw", text, *own, "--method", "adamw"))) == 1
    assert "FAILS: " in capsys.readouterr().out


def test_coordcheck_refuses_before_anything_runs(tmp_path, text, capsys):
    out = tmp_path / "run"
    assert "widths needs 2 values, got [16]" in refused(check(out, text, "--widths", "16"), capsys)
    assert "widths names a value twice" in refused(check(out, text, "--widths", "16", "16"), capsys)
    assert "width 24 is not a multiple" in refused(check(out, text, "--widths", "16", "24"), capsys)
    assert not out.exists()


def test_coordcheck_of_runs_that_diverge(tmp_path, text, capsys):
    assert main(check(tmp_path / "run", text, "--method", "lion", "--lr", "1e30")) == 1
    assert "| not finite          | change" in capsys.readouterr().out
