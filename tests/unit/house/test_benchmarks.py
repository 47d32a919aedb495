"""The benchmarks run at toy size, and docs/performance.md agrees with the committed results."""

import importlib
import json
import math
import subprocess
import sys

import pytest
import torch
from scripts import ROOT, importable, run, run_in_shell

from combinations import combinations

OPTIONS = {
    "bounds": ["--rounds", "2"],
    "step": ["--rounds", "2", "--threads", "1", "1"],
    "msign": ["--rounds", "2"],
    "elementwise": ["--rounds", "2"],
    "share": ["--rounds", "2", "--tokens", "32", "--length", "16"],
    "layers": ["--rounds", "2"],
    "loop": ["--rounds", "2"],
    "memory": [],
    "process": ["--rounds", "1"],
}
PEERS = {"step": "torch Muon", "msign": "newton_schulz", "elementwise": "torch AdamW, fused"}
PEERS["layers"] = "nn.RMSNorm, nn.Linear"
PEERS["loop"] = "plain AdamW loop"
PEERS["share"] = PEERS["elementwise"]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """Output and JSON of a benchmark at toy size; every benchmark runs once."""
    results = {}

    def of(name):
        if name not in results:
            path = tmp_path_factory.mktemp(name) / "results.json"
            done = run(f"benchmarks/{name}.py", "--smoke", "--json", str(path), *OPTIONS[name])
            assert done.code == 0, done.err
            results[name] = done.out, json.loads(path.read_text())
        return results[name]

    return of


def label(row):
    return next(row[key] for key in ("optimizer", "scheme", "method", "loop", "what", "process") if key in row)


@combinations(lambda name: name != "process", name=[*OPTIONS])  # which starts eight processes
def test_a_benchmark_prints_every_row_as_markdown_and_the_machine(smoke, name):
    printed, results = smoke(name)
    assert {"date", "cpu", "torch"} <= results["environment"].keys()
    tables = [line for line in printed.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in tables}) == len(results) - 1  # one width per table
    for row in results["rows"]:
        assert any(f"| {label(row)} |" in line for line in tables)


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_is_once_its_own_time(smoke, name):
    rows = smoke(name)[1]["rows"]
    assert {row["ratio"] for row in rows if label(row) == PEERS[name]} == {1.0}
    assert all(0 < row["min_ms"] <= row["median_ms"] for row in rows)


def test_the_step_is_compared_with_the_best_float32_rival_and_absentees_are_named(smoke):
    printed, results = smoke("step")
    rows = {row["optimizer"]: row for row in results["rows"]}
    assert len(rows) == len(results["rows"])  # one number of threads, given twice
    rivals = [row["ratio_float32"] for name, row in rows.items() if "float32" in name]
    assert min(rivals) == 1
    ours, theirs = rows["surefoot, linear"], rows["torch Muon, float32"]
    assert ours["alignment"] > 0.95 > theirs["alignment"] > 0.5
    assert ours["largest_singular_value"] <= 1 + 1e-3 < theirs["largest_singular_value"] < 1.3
    assert rows["torch AdamW, fused"]["state_bytes_per_parameter"] == pytest.approx(8, abs=0.1)
    assert rows["torch AdamW, fused"]["alignment"] is None
    for name, reason in results["environment"]["absent"].items():
        assert f"absent: {name}: {reason}" in printed
        assert name not in rows
    assert {"heavyball Muon", "gram-newton-schulz Muon"} <= results["environment"]["absent"].keys() | rows.keys()


def test_an_optimizer_that_moves_nothing_is_not_timed():
    with importable(ROOT / "benchmarks"):
        contender = importlib.import_module("step").Contender("torch Muon", ((4, 4),), 1)
    contender.prepare()
    contender.optimizer.step()
    contender.prepare()
    with pytest.raises(RuntimeError, match="torch Muon: a step left the weights as they were"):
        contender.prepare()


def test_msign_is_compared_with_the_exact_sign(smoke):
    rows = smoke("msign")[1]["rows"]
    errors = {(row["spectrum"], row["method"]): row["largest_error"] for row in rows}
    for spectrum in ("Gaussian", "1/i"):
        assert errors[spectrum, "svd"] < 1e-5 < 0.1 < errors[spectrum, "newton_schulz"] < 0.5
    assert all(row["alignment"] > 0.9999 for row in rows if row["method"] == "svd")


def test_shares_are_shares(smoke):
    rows = smoke("elementwise")[1]["rows"]
    assert max(row["share"] for row in rows if row["least_bytes"] != 20 or "SGD" in row["what"]) == 1
    steps = [row for row in smoke("share")[1]["rows"] if row["share"] is not None]
    assert len(steps) == 4
    for row in steps:
        model_ms = row["median_ms"] * (1 / row["share"] - 1)
        large = row["median_ms"] / (row["median_ms"] + model_ms * 2**19 / row["tokens"])
        assert math.isclose(row["share_large"], large)


def test_the_peak_of_a_step_is_what_it_allocates(smoke):
    rows = {row["optimizer"]: row for row in smoke("memory")[1]["rows"]}
    fused, foreach = (rows[f"torch AdamW, {kind}"]["peak_bytes_per_parameter"] for kind in ("fused", "foreach"))
    assert fused < 0.1  # in place
    assert 4 <= foreach < 5  # one temporary of all parameters
    assert rows["surefoot, linear"]["peak_bytes_per_parameter"] > 4


def test_the_page_is_what_the_results_say(tmp_path):
    done = run("benchmarks/report.py", "--check")
    assert done.code == 0, done.out + done.err
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    edited = tmp_path / "performance.md"
    edited.write_text(text.replace("| torch Muon |", "| torch Muon! |"), encoding="utf-8")
    done = run("benchmarks/report.py", "--check", "--page", str(edited))
    assert done.code == 1
    assert "run benchmarks/report.py" in done.out


def test_the_gpu_benchmark_at_toy_size(tmp_path):
    done = run("benchmarks/gpu.py", "--smoke", "--out", str(tmp_path / "gpu.json"))
    assert done.code == 0, done.err
    results = json.loads((tmp_path / "gpu.json").read_text())
    timed = {row["optimizer"]: row["ratio"] for row in results["steps"] if "median_ms" in row}
    assert timed.keys() == {"torch Muon", "surefoot", "surefoot, Post Clip"}
    assert timed["torch Muon"] == 1
    assert {row["left_out"] for row in results["steps"] if "median_ms" not in row} == {"needs a GPU"}
    for row in results["signs"]:
        assert 0.7 < row["largest"] < 1.3, row
        assert 0.6 < row["alignment"] <= 1.001, row
    half = [row for row in results["signs"] if row["method"] == "polar_express_fp16"]
    assert all(row["largest"] <= 1 + 5e-4 for row in half)
    assert len(half) == 2
    assert done.out.splitlines()[-1].startswith("| 5 x 16 x 48")
    assert "| toy, 2 layers | torch Muon" in done.out


def test_the_gpu_benchmark_stops_when_its_time_is_over(tmp_path):
    done = run("benchmarks/gpu.py", "--smoke", "--minutes", "0", "--out", str(tmp_path / "gpu.json"))
    assert done.code == 0, done.err
    rows = json.loads((tmp_path / "gpu.json").read_text())
    assert {row["left_out"] for row in rows["signs"]} == {"no time left"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script", ["benchmarks/gpu.py", "studies/transfer/gpu.py"])
def test_a_missing_gpu_is_reported(script):
    done = run(script)
    assert done.code == 2
    assert "torch finds no GPU here; --smoke" in done.err


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OPTIONS, "gpu", "report"])
def test_a_benchmark_starts_from_a_shell(name):
    done = run_in_shell(f"benchmarks/{name}.py", "--help")
    assert done.code == 0, done.err
    assert "usage" in done.out


def test_a_first_step_does_not_import_torch_s_compiler():
    """It takes as long as all of torch; torch's optimizers import it when they are made."""
    with importable(ROOT / "benchmarks"):
        option, program = importlib.import_module("process").PROCESSES["surefoot, first step"]
    asked = f"{program}; import sys; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, option, asked], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
