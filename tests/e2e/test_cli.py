"""The command line as a user meets it: exit codes, messages, and what is left behind when things go wrong."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from surefoot.cli import main
from surefoot.experiment.files import locked

# Spawned workers import torch anew, so sweeps take seconds: few of them, tiny.
CORPUS = b"the quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 400
SMALL = ["--depth", "1", "--batch-size", "4", "--context", "16"]
COMMANDS = ("transfer", "train", "audit", "coordcheck", "report")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(CORPUS)
    return path


def sweep(out: Path, text: Path, *more: str, steps: int = 3) -> list[str]:
    size = ["--widths", "16", "--steps", f"{steps}", *SMALL]
    return ["transfer", "--out", f"{out}", "--data", f"{text}", *size, "--rates", "-7", "-6", *more]


def training(out: Path, text: Path, *more: str) -> list[str]:
    common = ["--data", f"{text}", "--width", "16", "--steps", "6", "--threads", "1", *SMALL]
    return ["train", "--out", f"{out}", *common, *more]


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def command(arguments: list[str]) -> list[str]:
    return [sys.executable, "-c", "import sys; from surefoot.cli import main; sys.exit(main())", *arguments]


def start(arguments: list[str], **options: object) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command(arguments), env=environment, **{**pipes, **options})


def finish(arguments: list[str], **options: object) -> tuple[int, str, str]:
    with start(arguments, **options) as process:
        out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """Run in this process; the message of a run that ends with this code, one line and no traceback."""
    try:
        ended = main(arguments)
    except SystemExit as leaving:
        ended = leaving.code
    out, err = capsys.readouterr()
    assert ended == code, err
    assert out == ""
    assert "Traceback" not in err
    return err.splitlines()[-1]


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Help and usage


def test_help_imports_nothing_heavy():
    script = """
import sys
from surefoot.cli import main
for name in ("", "transfer", "train", "audit", "coordcheck", "report"):
    try:
        main([*name.split(), "--help"])
    except SystemExit as leaving:
        assert leaving.code == 0
heavy = {"torch", "numpy", "scipy", "matplotlib", "tqdm"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("examples:") == 5
    for name in COMMANDS:
        assert f"surefoot {name} " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["transfer", "--widths", "0"], "argument --widths: must be at least 1, got 0"),
        (["transfer", "--widths", "wide"], "argument --widths: invalid count value: 'wide'"),
        (["transfer", "--recipes", "sgd"], "argument --recipes: invalid choice: 'sgd'"),
        (["transfer", "--rates", "nan"], "between -60 and 60, got nan"),
        (["train", "--lr", "-1"], "argument --lr: must be a finite number above 0, got -1"),
        (["train", "--seed", "-1"], "argument --seed: must not be negative"),
        (["report"], "the following arguments are required: directory"),
        (["coordcheck", "--band", "0"], "argument --band: must be a finite number above 0, got 0"),
        (["check"], "invalid choice: 'check'"),
        ([], "the following arguments are required: command"),
    ],
)
def test_wrong_usage(arguments, message, capsys):
    assert message in refused(arguments, capsys)


@pytest.mark.parametrize("name", ["transfer", "train", "coordcheck"])
def test_data_that_cannot_be_used(name, tmp_path, capsys):
    out, short = tmp_path / "out", tmp_path / "short.txt"
    short.write_bytes(b"abc")
    missing = refused([name, "--out", f"{out}", "--data", f"{tmp_path}/none"], capsys)
    assert f"{tmp_path}/none does not exist" in missing
    assert f"{short}: 3 bytes are too few" in refused([name, "--out", f"{out}", "--data", f"{short}"], capsys)
    assert not out.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_data_without_permission(tmp_path, text, capsys):
    text.chmod(0)
    assert f"cannot read {text}: Permission denied" in refused(sweep(tmp_path / "out", text), capsys)


def test_a_width_that_does_not_fit_is_refused_before_anything_runs(tmp_path, text, capsys):
    assert "width 24 is not a multiple of the head dimension 16" in refused(
        [*sweep(tmp_path / "out", text), "--widths", "16", "24"], capsys
    )
    assert not (tmp_path / "out").exists()


def test_rates_given_twice(tmp_path, text, capsys):
    assert "rates names a value twice" in refused([*sweep(tmp_path / "out", text), "--rates", "-6", "-6"], capsys)


# Transfer


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str, str]:
    folder = tmp_path_factory.mktemp("finished")
    text = folder / "text.txt"
    text.write_bytes(CORPUS)
    code, out, err = finish(sweep(folder / "run", text, "--recipes", "adamw", "beyond_mup", "--widths", "16", "32"))
    assert code == 0, err
    return folder / "run", text, out, err


def test_transfer_writes_results_summary_table_and_picture(finished):
    run, text, out, err = finished
    assert {path.name for path in run.iterdir()} >= {"config.json", "results.jsonl", "summary.json", "transfer.png"}
    cells = [(r["recipe"], r["width"], r["log2_lr"]) for r in lines(run / "results.jsonl")]
    assert {cell[:2] for cell in cells} == {(r, w) for r in ("adamw", "beyond_mup") for w in (16, 32)}
    assert len(set(cells)) == len(cells) == 8
    fields = {"recipe", "width", "log2_lr", "seed", "steps", "train_loss", "val_loss", "diverged", "seconds"}
    assert all(fields <= record.keys() for record in lines(run / "results.jsonl"))
    config = json.loads((run / "summary.json").read_text())["config"]
    assert config["settings"]["depth"] == 1
    assert len(config["settings"]["corpus"]) == 64
    assert err.startswith(f"surefoot: writing to {run}/, data: {text}")
    assert "| beyond_mup |" in out
    assert out.endswith(f"picture: {run}/transfer.png\n")
    assert (run / "transfer.png").read_bytes().startswith(b"\x89PNG")


def test_a_rerun_skips_what_is_finished_and_speaks_json(finished, capsys):
    run, text, _, _ = finished
    before = (run / "results.jsonl").read_bytes()
    assert main([*sweep(run, text, "--recipes", "adamw", "beyond_mup", "--widths", "16", "32"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((run / "summary.json").read_text())
    assert (run / "results.jsonl").read_bytes() == before


def test_report_remakes_table_and_picture(finished, capsys):
    run, _, out, _ = finished
    (run / "transfer.png").unlink()
    assert main(["report", f"{run}"]) == 0
    assert capsys.readouterr().out == out
    assert (run / "transfer.png").exists()
    assert main(["report", f"{run}", "--json"]) == 0
    assert {entry["recipe"] for entry in json.loads(capsys.readouterr().out)["recipes"]} == {"adamw", "beyond_mup"}


def test_a_directory_of_another_configuration(finished, capsys):
    run, text, _, _ = finished
    before = (run / "results.jsonl").read_bytes()
    other = sweep(run, text, "--recipes", "adamw", "beyond_mup", "--widths", "16", "32", steps=4)
    assert "belongs to another configuration; it differs in steps: there 3, now 4" in refused(other, capsys)
    assert (run / "results.jsonl").read_bytes() == before


def test_report_on_a_folder_that_is_no_run(tmp_path, capsys):
    assert f"{tmp_path} is no run directory" in refused(["report", f"{tmp_path}"], capsys, code=1)


def test_two_sweeps_in_one_directory(finished, capsys):
    run, text, _, _ = finished
    with locked(run):
        message = refused(sweep(run, text, "--recipes", "adamw", "beyond_mup", "--widths", "16", "32"), capsys, code=1)
    assert f"{run} is in use by another run (process {os.getpid()})" in message


# Interrupted sweeps


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("stop", "workers", "code"), [(signal.SIGINT, "2", 130), (signal.SIGKILL, "1", -signal.SIGKILL)]
)
def test_a_sweep_stopped_in_the_middle_loses_nothing(tmp_path, text, stop, workers, code):
    out = tmp_path / "run"
    arguments = sweep(out, text, "--recipes", "adamw", "--seeds", "6", "--workers", workers, steps=40)
    with start(arguments, start_new_session=True) as process:
        wait_for_lines(out / "results.jsonl", 3, process)
        if stop == signal.SIGINT:
            os.killpg(process.pid, stop)  # as a terminal does: the workers get it too
        else:
            process.send_signal(stop)
        _, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert "Traceback" not in err
    if stop != signal.SIGKILL:
        assert "surefoot: interrupted; what was finished is kept: the same command goes on" in err
    kept = (out / "results.jsonl").read_bytes()
    assert 3 <= kept.count(b"\n") < 12
    if stop != signal.SIGKILL:
        assert len(lines(out / "results.jsonl")) == kept.count(b"\n")  # no line is torn
        return
    kept = kept[: kept.rindex(b"\n") + 1]
    code, _, err = finish(arguments)
    assert code == 0, err
    assert (out / "results.jsonl").read_bytes().startswith(kept)
    cells = [(r["log2_lr"], r["seed"]) for r in lines(out / "results.jsonl")]
    assert sorted(cells) == [(rate, seed) for rate in (-7.0, -6.0) for seed in range(6)]


# Full disks


def limit_files(size: int = 1500) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_sweep_on_a_full_disk_says_so_and_can_go_on(tmp_path, text):
    out = tmp_path / "run"
    arguments = sweep(out, text, "--recipes", "adamw", "--seeds", "8", "--workers", "1")
    code, _, err = finish(arguments, preexec_fn=limit_files)
    assert code == 1
    assert f"cannot append to {out}/results.jsonl: File too large; its earlier lines are intact" in err
    assert "Traceback" not in err
    kept = (out / "results.jsonl").read_bytes()
    assert len(lines(out / "results.jsonl")) >= 3
    code, _, err = finish(arguments)
    assert code == 0, err
    assert (out / "results.jsonl").read_bytes().startswith(kept)
    assert len(lines(out / "results.jsonl")) == 16


def test_training_on_a_full_disk_keeps_the_checkpoint(tmp_path, text):
    code, _, err = finish(training(tmp_path / "run", text), preexec_fn=lambda: limit_files(20_000))  # room for logs
    assert code == 1
    assert "checkpoints/step-00000006.pt: File too large; what was saved earlier is intact" in err
    assert "Traceback" not in err


def test_output_to_a_full_disk():
    with open("/dev/full", "w") as full:
        code, _, err = finish(["audit", "--json"], stdout=full)
    assert code == 1
    assert err == "surefoot audit: error: No space left on device\n"


def test_a_reader_that_leaves_early_is_no_error():
    shell = " ".join(f"'{part}'" for part in command(["audit", "--depth", "400"]))
    done = subprocess.run(["sh", "-c", f"{shell} | head -n 1"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("name ")
    assert done.stderr == ""


# Train


def test_train_writes_log_result_and_checkpoints(tmp_path, text, capsys):
    out = tmp_path / "run"
    assert main(training(out, text, "--log-every", "2", "--eval-every", "3", "--checkpoint-every", "4")) == 0
    said, _ = capsys.readouterr()
    assert "nats a byte after 6 steps" in said
    assert [record["step"] for record in lines(out / "log.jsonl")] == [2, 3, 4, 6]
    assert ["val_loss" in record for record in lines(out / "log.jsonl")] == [False, True, False, True]
    assert [record["step"] for record in lines(out / "norms.jsonl")] == [0, 2, 3, 4, 6]
    assert (out / "norms.png").read_bytes().startswith(b"\x89PNG")
    assert not (out / "tensorboard").exists()
    assert sorted(path.name for path in (out / "checkpoints").glob("*.pt")) == ["step-00000004.pt", "step-00000006.pt"]
    result = json.loads((out / "result.json").read_text())
    assert main([*training(out, text), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {**result, "seconds": pytest.approx(result["seconds"], abs=0.01)}
    assert "it differs in lr: there 0.0625, now 0.5" in refused([*training(out, text), "--lr", "0.5"], capsys)


def test_training_stopped_and_resumed_logs_each_step_once(tmp_path, text):
    long = ["--steps", "200", "--log-every", "1", "--checkpoint-every", "7"]
    part, whole = tmp_path / "part", tmp_path / "whole"
    arguments = [*training(part, text), *long]
    with start(arguments) as process:
        wait_for_lines(part / "log.jsonl", 10, process)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 143, err
    assert f"surefoot: interrupted; the same command goes on from the newest checkpoint in {part}/checkpoints" in err
    assert "Traceback" not in err
    for run in (arguments, [*training(whole, text), *long]):
        assert main(run) == 0
    assert f"norms: {part}/norms.png" in err
    assert [r["step"] for r in lines(part / "norms.jsonl")] == list(range(201))
    ours, theirs = lines(part / "log.jsonl"), lines(whole / "log.jsonl")
    assert [(r["step"], r["loss"], r["lr"]) for r in ours] == [(r["step"], r["loss"], r["lr"]) for r in theirs]
    ours, theirs = (json.loads((run / "result.json").read_text()) for run in (part, whole))
    assert {**ours, "seconds": 0} == {**theirs, "seconds": 0}


@pytest.mark.filterwarnings("default")
def test_training_passes_over_a_damaged_checkpoint_and_says_so(tmp_path, text, capsys):
    out = tmp_path / "run"
    assert main([*training(out, text), "--checkpoint-every", "3"]) == 0
    newest = out / "checkpoints" / "step-00000006.pt"
    newest.write_bytes(newest.read_bytes()[:-1])
    first = json.loads((out / "result.json").read_text())
    capsys.readouterr()
    assert main([*training(out, text), "--checkpoint-every", "3"]) == 0
    assert f"surefoot: warning: {newest} is damaged" in capsys.readouterr().err
    assert json.loads((out / "result.json").read_text())["val_loss"] == first["val_loss"]


def test_a_training_that_diverges_says_so(tmp_path, text, capsys):
    assert main([*training(tmp_path / "run", text), "--method", "scion", "--lr", "10", "--steps", "30"]) == 0
    assert "diverged after 10 steps; try a smaller --lr" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "result.json").read_text())["val_loss"] is None


def test_training_warns_of_a_layer_that_leaves_its_band_and_report_says_it_again(tmp_path, text, capsys):
    out = tmp_path / "run"
    assert main([*training(out, text, "--log-every", "2"), "--norm-limit", "0.5"]) == 0
    err = capsys.readouterr().err
    assert "surefoot train: warning: step 0: blocks.0.mlp.up.weight: its norm, " in err
    (out / "norms.png").unlink()
    assert main(["report", f"{out}"]) == 0
    said = capsys.readouterr().out
    assert "| linear    | 6      | " in said
    assert "alarm at step 0: blocks.0.mlp.up.weight, norm " in said
    assert said.endswith(f"picture: {out}/norms.png\n")
    assert (out / "norms.png").exists()
    assert main(["report", f"{out}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kinds"][0]["role"] == "embedding"


def test_training_without_matplotlib_leaves_the_picture_out_and_says_so(tmp_path, text, capsys, monkeypatch):
    monkeypatch.setattr("surefoot.cli.train.find_spec", lambda name: None)
    assert main(training(tmp_path / "run", text)) == 0
    assert "no picture of the norms: that needs pip install 'surefoot[plots]'" in capsys.readouterr().err
    assert (tmp_path / "run" / "norms.jsonl").exists()
    assert not (tmp_path / "run" / "norms.png").exists()


def test_training_writes_to_tensorboard(tmp_path, text, capsys):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = tmp_path / "run"
    assert main([*training(out, text, "--log-every", "2"), "--tensorboard"]) == 0
    found = events.EventAccumulator(f"{out / 'tensorboard'}")
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("loss")] == [
        (record["step"], pytest.approx(record["loss"])) for record in lines(out / "log.jsonl")
    ]
    norms = [(e.step, e.value) for e in found.Scalars("norm/head.weight")]
    assert norms == [(r["step"], pytest.approx(r["norms"]["head.weight"][0])) for r in lines(out / "norms.jsonl")]
    assert "update/head.weight" in found.Tags()["scalars"]


def test_tensorboard_that_is_missing_is_named_before_anything_runs(tmp_path, text, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    said = refused([*training(tmp_path / "run", text), "--tensorboard"], capsys, code=1)
    assert said.endswith("pip install 'surefoot[tensorboard]'")
    assert not (tmp_path / "run").exists()


# Audit


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
    assert "it returned a int, not an nn.Module" in refused(["audit", "--model", "my_models:number"], capsys)
    assert "has no function 'absent'" in refused(["audit", "--model", "my_models:absent"], capsys)
    assert "No module named 'absent'" in refused(["audit", "--model", "absent:build"], capsys)
    assert "unknown reference model 'bert'; choose from gpt, llama, qwen, moe, tied" in refused(
        ["audit", "--model", "bert"], capsys
    )


def test_report_of_a_run_that_has_nothing_yet_says_so(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"method": "adamw"}')
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no sweep, no norms.jsonl and no coordcheck.json" in capsys.readouterr().err


# Coordcheck


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
    assert "it differs in lr: there 0.0625, now 0.5" in other


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
    assert main(check(tmp_path / "ours", text, *own)) == 0
    assert main(check(tmp_path / "adamw", text, *own, "--method", "adamw")) == 1
    assert "FAILS: " in capsys.readouterr().out


def test_coordcheck_refuses_before_anything_runs(tmp_path, text, capsys):
    out = tmp_path / "run"
    assert "a slope needs two widths, got 16 alone" in refused(check(out, text, "--widths", "16"), capsys)
    assert "widths names a value twice" in refused(check(out, text, "--widths", "16", "16"), capsys)
    assert "width 24 is not a multiple" in refused(check(out, text, "--widths", "16", "24"), capsys)
    assert not out.exists()


def test_coordcheck_of_runs_that_diverge(tmp_path, text, capsys):
    assert main(check(tmp_path / "run", text, "--method", "lion", "--lr", "1e30")) == 1
    assert "| not finite          | change" in capsys.readouterr().out


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
