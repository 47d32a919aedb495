"""The command line: help, wrong usage, data that cannot be used, output that cannot be written."""

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.cli import _parser, _run, chosen
from surefoot.cli.chosen import config
from surefoot.experiment.training.config import TrainConfig

from .commands import command, finish, refused, sweep

COMMANDS = ("transfer", "ladder", "compare", "train", "audit", "convert", "coordcheck", "report")
CONVERT = ["convert", "--lr", "3e-4", "--d-in", "64", "--d-out", "64"]  # imports no torch


def test_help_imports_nothing_heavy():
    script = """
import sys
from surefoot.cli import main
for name in ("", "transfer", "ladder", "compare", "train", "audit", "convert", "coordcheck", "report"):
    try:
        main([*name.split(), "--help"])
    except SystemExit as leaving:
        assert leaving.code == 0
heavy = {"torch", "numpy", "scipy", "altair", "vl_convert", "tqdm", "filelock"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("examples:") == 8
    for name in COMMANDS:
        assert f"surefoot {name} " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["transfer", "--widths", "0"], "argument --widths: must be at least 1 and below 2**40, got 0"),
        (["transfer", "--widths", "wide"], "argument --widths: invalid count value: 'wide'"),
        (["transfer", "--recipes", "sgd"], "argument --recipes: unknown method 'sgd'; choose one of steady,"),
        (["train", "--recipe", "lion:2"], "'lion:2': lion takes no value; moga_row, moga_column, wion do"),
        (["audit", "--recipe", "moga_row:wide"], "'moga_row:wide': 'wide' is not a number"),
        (["audit", "--recipe", "adamw"], "unknown method 'adamw'; choose one of steady,"),
        (["transfer", "--rates", "nan"], "between -60 and 60, got nan"),
        (["train", "--lr", "1e37"], "lr must lie between 0 and 2**120"),
        (["train", "--steps", "1" + 400 * "0"], "argument --steps: must be at least 1 and below 2**40, got 10"),
        (["compare", "--published", "muon@1e300"], "'muon@1e300' lacks a learning rate above 0, at most 2**120"),
        (["train", "--lr", "-1"], "argument --lr: must be a finite number above 0, got -1"),
        (
            ["train", "--keep-best"],
            "--keep-best keeps the best of those saved at an evaluation: give --eval-every, too",
        ),
        (["train", "--seed", "-1"], "argument --seed: must lie between 0 and 2**64 - 1"),
        (["report"], "the following arguments are required: RUN"),
        (["transfer", "--executor", "dask"], "argument --executor: invalid choice: 'dask'"),
        (["transfer", "--slurm", "time=1:00"], "argument --slurm: give KEY=VALUE, time in minutes, got time=1:00"),
        (["transfer", "--gpus-per-run", "1"], "--gpus-per-run needs --executor ray or slurm"),
        (["transfer", "--ray-address", "auto"], "--ray-address needs --executor ray"),
        (["transfer", "--executor", "ray", "--slurm", "qos=low"], "--slurm needs --executor slurm"),
        (["transfer", "--executor", "slurm", "--gpus-per-run", "0.5"], "slurm gives whole GPUs"),
        (["coordcheck", "--workers", "2"], "--workers needs --executor pool or ray or slurm"),
        (["coordcheck", "--band", "0"], "argument --band: must be a finite number above 0, got 0"),
        (["train", "--method", "sgd"], "argument --recipe/--method: unknown method 'sgd'; choose one"),
        (["train", "--cooldown", "2"], "argument --cooldown: must lie between 0 and 1, got 2"),
        (["train", "--decay", "0.5"], "unrecognized arguments: --decay 0.5"),
        (["train", "--warm", "0.5"], "unrecognized arguments: --warm 0.5"),
        (["--vers"], "unrecognized arguments: --vers"),
        (["check"], "invalid choice: 'check'"),
    ],
)
def test_wrong_usage(arguments, message, capsys):
    assert message in refused(arguments, capsys)


def test_a_command_without_memory_ends_in_a_line(capsys):
    def run(arguments):
        raise MemoryError

    assert _run(["convert"], argparse.Namespace(run=run, command="convert")) == 1
    assert "convert: error: out of memory" in capsys.readouterr().err


@pytest.mark.parametrize(("executor", "package"), [("ray", "ray"), ("slurm", "submitit")])
@pytest.mark.parametrize("name", ["transfer", "coordcheck"])
def test_an_executor_that_is_not_installed_says_what_to_install(name, executor, package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not there
    message = refused([name, "--executor", executor], capsys)
    assert f"pip install 'surefoot[{executor}]'" in message


@pytest.mark.parametrize(
    ("options", "device"),
    [([], "cpu"), (["--device", "auto"], "cpu"), (["--device", "auto", "--gpus-per-run", "1"], "cuda")],
)
def test_runs_elsewhere_are_on_the_gpu_that_they_are_given(options, device):
    arguments = _parser().parse_args(["coordcheck", "--executor", "ray", *options])
    assert config(arguments).device == device


@pytest.mark.parametrize("options", [["--device", "cuda"], ["--device", "cpu", "--gpus-per-run", "1"]])
def test_a_device_that_runs_elsewhere_are_not_given_is_refused(options):
    with pytest.raises(ValueError, match=f"--device {options[1]} with --executor slurm: give "):
        config(_parser().parse_args(["transfer", "--executor", "slurm", *options]))


def test_without_the_flag_no_executor_needs_ray_or_submitit(monkeypatch):
    for package in ("ray", "submitit"):
        monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    for name in ("transfer", "coordcheck"):
        chosen.executor(_parser().parse_args([name]))


@pytest.mark.slow
def test_without_the_flag_nothing_of_ray_or_submitit_is_imported():
    script = """
import sys
from surefoot.cli import _parser, chosen
import surefoot.experiment.coordcheck, surefoot.experiment.sweep.clusters
for name in ("transfer", "coordcheck"):
    chosen.executor(_parser().parse_args([name]))
assert not {"ray", "submitit"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.parametrize(("name", "field"), [("transfer", "recipes"), ("train", "method"), ("audit", "method")])
@pytest.mark.parametrize("flag", ["--recipes", "--recipe", "--method"])
def test_recipes_have_two_other_names(name, field, flag):
    chosen = getattr(_parser().parse_args([name, flag, "muon"]), field)
    assert chosen == (["muon"] if name == "transfer" else "muon")


def test_every_setting_of_a_run_is_an_option_of_train():
    arguments = vars(_parser().parse_args(["train"]))
    settings = TrainConfig().to_json()
    resolved = {**dict.fromkeys(("width", "depth", "head_dim")), "lr": "auto"}  # by the model, and by the run
    assert {name: arguments[name] for name in settings} == {**settings, **resolved}


@pytest.mark.parametrize("name", ["transfer", "compare", "train", "coordcheck"])
def test_data_that_cannot_be_used(name, tmp_path, capsys):
    out, short = tmp_path / "out", tmp_path / "short.txt"
    short.write_bytes(b"abc")
    missing = refused([name, "--out", f"{out}", "--data", f"{tmp_path}/none"], capsys, code=4)
    assert f"{tmp_path}/none does not exist" in missing
    assert f"{short}: 3 bytes are too few" in refused([name, "--out", f"{out}", "--data", f"{short}"], capsys, code=4)
    assert not out.exists()


@pytest.mark.parametrize(
    "name", ["transfer", "compare", "train --data markov:64 --eval-data .", "ladder --to-width 512"]
)
@pytest.mark.parametrize("kind", ["", "text:", "bpe:300:"])
def test_a_run_that_would_read_its_own_files_is_refused(name, kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_bytes(b"some text, " * 4000)
    said = refused([*name.split(), "--out", "runs/one", *(() if "." in name else ("--data", f"{kind}."))], capsys)
    assert f"runs/one lies in {tmp_path}, whose files are read: give a folder outside it" in said
    assert [*tmp_path.iterdir()] == [tmp_path / "a.txt"]
    hidden = chosen.data(_parser().parse_args(["train", "--out", "runs/.one", "--data", f"{kind}."]))
    assert hidden == f"{kind}.", "what is hidden is not read"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_data_without_permission(tmp_path, text, capsys):
    text.chmod(0)
    assert f"cannot read {text}: Permission denied" in refused(sweep(tmp_path / "out", text), capsys, code=4)


@pytest.mark.parametrize("words", ["train --out", "transfer --out", "report", "tokens --vocab 300 in.txt"])
def test_an_empty_path_of_a_directory_is_refused(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "the path is empty" in refused([*words.split(), ""], capsys)
    assert not any(tmp_path.iterdir())


def test_a_width_that_does_not_fit_is_refused_before_anything_runs(tmp_path, text, capsys):
    assert "width 24 is not a multiple of the head dimension 16" in refused(
        [*sweep(tmp_path / "out", text), "--widths", "16", "24"], capsys
    )
    assert not (tmp_path / "out").exists()


def test_a_budget_for_rates_that_are_given(tmp_path, text, capsys):
    given = [*sweep(tmp_path / "out", text), "--rates", "-6", "--budget", "4"]
    assert "--budget is for a search" in refused(given, capsys)


def test_rates_given_twice(tmp_path, text, capsys):
    assert "rates names a value twice" in refused([*sweep(tmp_path / "out", text), "--rates", "-6", "-6"], capsys)


@pytest.mark.parametrize("option", [["--mesh", "fsdp=2"], ["--async-checkpoints"]], ids=lambda words: words[0])
def test_what_takes_several_processes_is_refused_in_one(tmp_path, option, capsys):
    message = refused(["train", "--data", "markov:16", "--out", f"{tmp_path / 'out'}", *option], capsys)
    assert f"{' '.join(option)} needs several processes: torchrun -m surefoot train" in message


def test_output_to_a_full_disk():
    with open("/dev/full", "w") as full:
        code, _, err = finish(CONVERT, stdout=full)
    assert code == 1
    assert err == "surefoot convert: error: No space left on device\n"


def test_a_reader_that_has_gone_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    code, _, err = finish(CONVERT, stdout=writer)
    os.close(writer)
    assert (code, err) == (1, "")


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error():
    shell = " ".join(f"'{part}'" for part in command(["audit", "--depth", "400"]))
    done = subprocess.run(["sh", "-c", f"{shell} | head -n 1"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("name ")
    assert done.stderr == ""


@pytest.mark.parametrize(("closing", "stdout"), [("2>&-", "{"), (">&-", "")])
def test_a_closed_stream_is_a_stream_that_nobody_reads(closing, stdout):
    """Python has no stderr then, and print would write what is for it to stdout."""

    def run(*arguments):
        line = f"{shlex.join([sys.executable, '-m', 'surefoot', *CONVERT, *arguments])} {closing}"
        done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout[:1]

    assert run("--json") == (0, stdout)
    assert run("--source", "none") == (2, "")
