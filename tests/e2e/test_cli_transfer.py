"""`surefoot transfer` and the report of its directory, interrupted and on a full disk too."""

import io
import json
import os
import resource
import signal
import subprocess
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from surefoot.cli import main
from surefoot.experiment.files import locked

from .commands import CORPUS, finish, lines, refused, start, sweep

BOTH = ("--recipes", "adamw", "beyond_mup", "--widths", "16", "32")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str, str]:
    folder = tmp_path_factory.mktemp("finished")
    text = folder / "text.txt"
    text.write_bytes(CORPUS)
    arguments = [*sweep(folder / "run", text, *BOTH), "--workers", "1"]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main(arguments)
    assert code == 0, err.getvalue()
    return folder / "run", text, out.getvalue(), err.getvalue()


def test_transfer_writes_results_summary_table_and_picture(finished):
    run, text, out, err = finished
    assert {path.name for path in run.iterdir()} >= {
        "config.json", "results.jsonl", "summary.json", "transfer.png", "report.html"
    }  # fmt: skip
    trials = [(r["recipe"], r["width"], r["log2_lr"]) for r in lines(run / "results.jsonl")]
    assert {trial[:2] for trial in trials} == {(r, w) for r in ("adamw", "beyond_mup") for w in (16, 32)}
    assert len(set(trials)) == len(trials) == 8
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
    assert main([*sweep(run, text, *BOTH), "--json"]) == 0
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
    other = sweep(run, text, *BOTH, steps=4)
    assert "belongs to another configuration; it differs in steps: there 3, now 4" in refused(other, capsys)
    assert (run / "results.jsonl").read_bytes() == before


def test_two_sweeps_in_one_directory(finished, capsys):
    run, text, _, _ = finished
    with locked(run):
        message = refused(sweep(run, text, *BOTH), capsys, code=6)
    assert f"{run} is in use by another run (process {os.getpid()})" in message


def test_an_interrupted_sweep_says_that_it_goes_on(inline, tmp_path, text, capsys, signal_at):
    out = tmp_path / "run"
    arguments = sweep(out, text, "--recipes", "adamw", "--seeds", "3")
    signal_at(signal.SIGINT, "results.jsonl", 2)
    assert main(arguments) == 130
    assert "surefoot: interrupted; what was finished is kept: the same command goes on" in capsys.readouterr().err
    assert len(lines(out / "results.jsonl")) == 2


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.005)


@pytest.mark.slow  # tests/faults stops sweeps of a faster run
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
    before = (out / "results.jsonl").read_bytes()
    assert 3 <= before.count(b"\n") < 12
    if stop != signal.SIGKILL:
        assert len(lines(out / "results.jsonl")) == before.count(b"\n")  # no line is torn
        return
    before = before[: before.rindex(b"\n") + 1]
    code, _, err = finish(arguments)
    assert code == 0, err
    assert (out / "results.jsonl").read_bytes().startswith(before)
    trials = [(r["log2_lr"], r["seed"]) for r in lines(out / "results.jsonl")]
    assert sorted(trials) == [(rate, seed) for rate in (-7.0, -6.0) for seed in range(6)]


def limit_files(size: int = 1500) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.slow  # likewise
def test_a_sweep_on_a_full_disk_says_so_and_can_go_on(tmp_path, text):
    out = tmp_path / "run"
    arguments = sweep(out, text, "--recipes", "adamw", "--seeds", "8", "--workers", "1")
    code, _, err = finish(arguments, preexec_fn=limit_files)
    assert code == 1
    assert f"cannot append to {out}/results.jsonl: File too large; its earlier lines are intact" in err
    assert "Traceback" not in err
    before = (out / "results.jsonl").read_bytes()
    assert len(lines(out / "results.jsonl")) >= 3
    code, _, err = finish(arguments)
    assert code == 0, err
    assert (out / "results.jsonl").read_bytes().startswith(before)
    assert len(lines(out / "results.jsonl")) == 16


def bare(**environment: str) -> dict[str, str]:
    """This process's environment without a home and a terminal."""
    kept = {k: v for k, v in os.environ.items() if k not in ("HOME", "TERM", "XDG_CACHE_HOME", "MPLCONFIGDIR")}
    return {**kept, "OMP_NUM_THREADS": "1", **environment}


def test_data_that_a_run_cannot_use_are_an_error_of_data(inline, tmp_path, capsys):
    (tmp_path / "tokens.bin").write_bytes(np.tile(np.arange(40, dtype="<u2"), 400).tobytes())
    assert main(sweep(tmp_path / "run", f"bin:{tmp_path / 'tokens.bin'}", "--vocab", "30")) == 4
    assert "outside the vocabulary of 30" in capsys.readouterr().err


@pytest.mark.slow  # a process that imports torch, which starts another; as the two below
def test_a_sweep_without_a_home(tmp_path, text):
    arguments = sweep(tmp_path / "run", text, "--recipes", "adamw", "--workers", "1")
    code, out, err = finish(arguments, env=bare())
    assert code == 0, err
    assert "Traceback" not in err
    assert out.endswith(f"picture: {tmp_path}/run/transfer.png\n")
    assert len(lines(tmp_path / "run" / "results.jsonl")) == 2


@pytest.mark.slow
def test_a_sweep_without_a_terminal(tmp_path, text):
    arguments = sweep(tmp_path / "run", text, "--recipes", "adamw", "--workers", "1")
    code, _, err = finish(arguments, env=bare(), stdin=subprocess.DEVNULL, start_new_session=True)
    assert code == 0, err
    assert [line.partition("]")[0] for line in err.splitlines()[1:-1]] == ["[1/2", "[2/2"]
    assert err.endswith(f"surefoot: page: {tmp_path}/run/report.html\n")
    assert "\r" not in err


@pytest.mark.slow
def test_a_sweep_in_paths_of_any_letters(tmp_path, text):
    folder = tmp_path / "Läufe 実験 🦶"
    folder.mkdir()
    data = text.rename(folder / "текст.txt")
    arguments = sweep(folder / "run", data, "--recipes", "adamw", "--workers", "1")
    for locale in ("C.UTF-8", "C"):
        code, out, err = finish(arguments, env=bare(LC_ALL=locale), encoding="utf-8")
        assert code == 0, err
        assert out.endswith(f"picture: {folder}/run/transfer.png\n")
    assert len(lines(folder / "run" / "results.jsonl")) == 2
    assert json.loads((folder / "run" / "config.json").read_text())["settings"]["data"] == f"{data}"
