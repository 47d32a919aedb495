"""`surefoot transfer` over horizons, batches and depths, and the report of its directory; tiny runs in this process."""

import io
import json
import os
import signal
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from e2e.commands import CORPUS, lines, refused, sweep
from surefoot.cli import _parser, main
from surefoot.cli.transfer import configure
from surefoot.experiment.files import locked

SMALL = ("--widths", "16", "--context", "16", "--recipes", "adamw", "--rates", "-6", "-4", "-2")
HORIZONS = ("--horizons", "4", "8", "--batch-size", "4", "--depth", "1", "--data-order", "random")


pytestmark = pytest.mark.usefixtures("inline")


def transfer(out: Path, text: Path, *more: str) -> list[str]:
    return ["transfer", "--out", f"{out}", "--data", f"{text}", *SMALL, *more]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str, str]:
    folder = tmp_path_factory.mktemp("finished")
    text = folder / "text.txt"
    text.write_bytes(CORPUS)
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main(transfer(folder / "run", text, *HORIZONS, "--to-steps", "32"))
    assert code == 0, err.getvalue()
    return folder / "run", text, out.getvalue(), err.getvalue()


def results(run: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in run.glob("*/results.jsonl")}


def test_it_writes_a_sweep_for_each_value_and_says_the_rate_and_the_width(finished):
    run, text, out, err = finished
    assert {path.name for path in run.iterdir()} >= {
        "config.json", "summary.json", "transfer.png", "report.html", "horizon_4", "horizon_8"
    }  # fmt: skip
    for steps in (4, 8):
        records = lines(run / f"horizon_{steps}" / "results.jsonl")
        assert [(r["steps"], r["width"]) for r in records] == [(steps, 16)] * 3
    assert err.startswith(f"surefoot: writing to {run}/, data: {text}")
    assert [line for line in err.splitlines() if " of 2)" in line] == [
        "surefoot: 4 steps, width 16 (1 of 2)", "surefoot: 8 steps, width 16 (2 of 2)"
    ]  # fmt: skip
    assert out.startswith("gpt, width 16, batch size 4:\n\n| recipe | best lr at 4 steps | best lr at 8 steps | power")
    (entry,) = json.loads((run / "summary.json").read_text())["recipes"]
    rate = 2 ** (entry["best_log2_lr"][1] + 2 * entry["power"])
    use = f"adamw: lr = {rate:.3g} at 32 steps, width 16; extrapolated 4x beyond the longest measured horizon"
    assert out.endswith(f"\n{use}\n\npicture: {run}/transfer.png\n")
    assert f">{rate:.3g}<" in (run / "report.html").read_text()


def test_without_an_optimum_it_says_why_there_is_no_rate(tmp_path, text, capsys):
    arguments = [*transfer(tmp_path / "run", text, *HORIZONS, "--to-steps", "32"), "--rates", "-9", "-8", "-7"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert out.endswith("\nadamw: no rate at 32 steps, width 16; no law (4 steps: high edge; 8 steps: high edge)\n")
    assert "no law: it needs a best rate inside those measured at every value" in out


def test_a_rerun_runs_nothing_speaks_json_and_answers_another_target(finished, capsys):
    run, text, _, _ = finished
    before = results(run)
    assert main([*transfer(run, text, *HORIZONS, "--to-steps", "64"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target"] == 64
    assert main([*transfer(run, text, *HORIZONS, "--to-steps", "32"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((run / "summary.json").read_text())
    assert results(run) == before


def test_report_remakes_what_it_printed(finished, capsys):
    run, _, out, _ = finished
    assert main(["report", f"{run}"]) == 0
    assert capsys.readouterr().out == out
    assert main(["report", f"{run}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((run / "summary.json").read_text())
    assert main(["report", f"{run / 'horizon_4'}"]) == 0
    assert "best lr at 16" in capsys.readouterr().out


def test_a_second_writer_and_another_configuration_are_refused(finished, capsys):
    run, text, _, _ = finished
    with locked(run):
        message = refused(transfer(run, text, *HORIZONS), capsys, code=6)
    assert f"{run} is in use by another run (process {os.getpid()})" in message
    other = refused(transfer(run, text, *HORIZONS, "--seeds", "2"), capsys)
    assert "belongs to another configuration; it differs in seeds: there [0], now [0, 1]" in other


def test_it_goes_on_after_an_interruption(finished, tmp_path, capsys, signal_at):
    run, text, _, _ = finished
    out = tmp_path / "run"
    signal_at(signal.SIGINT, "results.jsonl", 2)
    assert main(transfer(out, text, *HORIZONS)) == 130
    assert "surefoot: interrupted; what was finished is kept: the same command goes on" in capsys.readouterr().err
    assert main(["report", f"{out}"]) == 0
    assert "UNFINISHED" in capsys.readouterr().out
    assert main(transfer(out, text, *HORIZONS)) == 0

    def losses(directory: Path, steps: int) -> list[object]:
        return [(r["log2_lr"], r["val_loss"]) for r in lines(directory / f"horizon_{steps}" / "results.jsonl")]

    assert all(losses(out, steps) == losses(run, steps) for steps in (4, 8))


@pytest.mark.parametrize(
    ("options", "setting", "target"),
    [
        (("--batches", "4", "2", "--depth", "1"), "batch_size", ("--to-batch", "8")),
        (("--depths", "1", "2", "--batch-size", "4"), "depth", ("--to-depth", "4")),
    ],
)
def test_batches_and_depths(tmp_path, text, capsys, options, setting, target):
    out = tmp_path / "run"
    assert main([*transfer(out, text, *options, *target, "--steps", "2"), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["width"], summary["target"], summary["finished"]) == (16, int(target[1]), True)
    assert setting not in summary["config"]["settings"]
    for value in summary["values"]:
        config = json.loads((out / f"{summary['axis']}_{value}" / "config.json").read_text())
        assert (config["settings"][setting], config["steps"], config["widths"]) == (value, 2, [16])
    assert len({*results(out).values()}) == 2  # another batch or depth is another loss


def test_a_directory_of_widths_is_refused_and_left_as_it_is(tmp_path, text, capsys):
    out = tmp_path / "run"
    assert main(sweep(out, text, "--recipes", "adamw")) == 0
    capsys.readouterr()
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    assert "it differs in axis: there missing, now" in refused(transfer(out, text, *HORIZONS), capsys)
    after = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    assert after == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--horizons", "3", "6", "--batches", "2", "4"], "argument --batches: not allowed with argument --horizons"),
        (["--horizons", "3", "0"], "argument --horizons: must be at least 1 and below 2**40, got 0"),
        (["--horizons", "3"], "--horizons needs 2 values, got [3]"),
        (["--horizons", "3", "3"], "horizons names a value twice"),
        (["--to-steps", "24"], "--to-steps needs --horizons, the values to fit its law to"),
        (["--horizons", "3", "6", "--to-batch", "64"], "--to-batch needs --batches"),
        (["--horizons", "3", "6", "--widths", "16", "32"], "--horizons is for one width: give one of --widths 16 32"),
        (["--horizons", "3", "6", "--steps", "9"], "--steps conflicts with --horizons, which sets it: leave one out"),
        (["--horizons", "3", "6", "--steps", "120"], "--steps conflicts with --horizons"),  # its default
        (["--batches", "2", "4", "--batch-size", "16"], "--batch-size conflicts with --batches"),  # its default
        (["--depths", "1", "2", "--depth", "1"], "--depth conflicts with --depths"),
        (["--depths", "1", "2", "--model", "my:build"], "--depths needs a reference model (gpt, llama, qwen, moe,"),
        (["--depths", "1", "2", "--model", "gpt2_small"], "gpt2-small has its own depth: give each depth a sweep"),
        (["--horizons", "3", "6", "--widths", "24"], "width 24 is not a multiple"),
    ],
)  # fmt: skip
def test_wrong_usage(tmp_path, text, capsys, options, message):
    out = tmp_path / "run"
    assert message in refused(["transfer", "--out", f"{out}", "--data", f"{text}", *options], capsys)
    assert not out.exists()


@pytest.mark.parametrize(("model", "width"), [("gpt", 64), ("gpt2-small", 768)])
def test_without_widths_the_width_is_the_models_own(text, model, width):
    options = ["--horizons", "6", "3", "--model", model, "--data", f"{text}", "--seeds", "3"]
    arguments = _parser().parse_args(["transfer", *options])
    config = configure(arguments)
    assert (config.width, config.values, config.seeds, config.axis) == (width, (3, 6), (0, 1, 2), "horizon")
    assert config.sweep(3).search == config.sweep(6).search == config.search
    assert "steps" not in config.settings
