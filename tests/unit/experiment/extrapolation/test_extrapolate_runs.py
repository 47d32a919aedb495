"""Sweeps over an axis of a fake run whose law is known: what is run, fitted, resumed and refused."""

import json
import math
import os

import pytest

from inline_executor import Inline
from surefoot.experiment.errors import DirectoryInUse, SweepError
from surefoot.experiment.files import locked, read_lines
from surefoot.experiment.reports import extrapolate as report
from surefoot.experiment.reports.report import draw
from surefoot.experiment.sweep.axis import AXES
from surefoot.experiment.sweep.config import Extrapolation, TrialResult
from surefoot.experiment.sweep.extrapolate import load, run
from surefoot.experiment.sweep.search import Bracket, Grid
from surefoot.experiment.sweep.summary import extrapolated
from surefoot.experiment.sweep.sweep import load as load_sweep
from surefoot.experiment.sweep.sweep import run as run_sweep

POWER = {"steady": -0.25, "adamw": -0.8}
VALUES = {"horizon": (100, 200, 400), "batch": (8, 16, 32), "depth": (2, 4, 8, 16)}


def size_of(trial):
    """What the axis varies; the settings of the others are those of `config`."""
    sizes = {"steps": trial.steps / 100, **{name: trial.settings.get(name, 8) / 8 for name in ("batch_size", "depth")}}
    return math.prod(sizes.values())


def fake(trial):
    """A parabola whose vertex is a power law of the size, with a shift of each seed's own; it diverges far above."""
    best = -3.3 + POWER[trial.recipe] * math.log2(size_of(trial)) + 0.05 * (trial.seed - 1)
    if trial.log2_lr > best + 3:
        return TrialResult(None, None, 0.1, diverged=True)
    loss = 2 + 0.1 * (trial.log2_lr - best) ** 2 + 0.01 * trial.seed
    return TrialResult(loss, loss, 0.1)


def config(axis="horizon", **changes):
    settings = {"model": "gpt", "steps": 100, "batch_size": 8, "depth": 8}
    del settings[AXES[axis].setting]
    search = Bracket({"steady": -3.25, "adamw": -6.0}, budget=8)
    values = {"recipes": ("steady", "adamw"), "axis": axis, "values": VALUES[axis], "width": 64, "seeds": (0, 1, 2)}
    return Extrapolation(**{**values, "search": search, "settings": settings, **changes})


def silent(progress):
    pass


def measure(directory, wanted=None, run_trial=fake, progress=silent, **more):
    return run(wanted or config(), directory, run_trial, executor=Inline(), progress=progress, **more)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sizes") / "new" / "run"
    return directory, measure(directory, target=1600)


@pytest.mark.parametrize(("axis", "target"), [("horizon", 1600), ("batch", 128), ("depth", 64)])
def test_the_rate_at_the_target_is_the_truth_and_each_value_is_an_ordinary_sweep(tmp_path, axis, target):
    summary = measure(tmp_path, config(axis), target=target)
    size = target / (100 if axis == "horizon" else 8)
    assert (summary["finished"], summary["width"], summary["target"]) == (True, 64, target)
    for entry in summary["recipes"]:
        truth = -3.3 + POWER[entry["recipe"]] * math.log2(size)
        assert entry["target_log2_lr"] == pytest.approx(truth, abs=1e-6)
        assert entry["target_log2_lr_ci"] == pytest.approx([truth - 0.1242, truth + 0.1242], abs=1e-4)
        assert entry["power"] == pytest.approx(POWER[entry["recipe"]], abs=1e-6)
        assert entry["power_ci"] == pytest.approx([entry["power"]] * 2, abs=1e-6)  # seeds differ by the same everywhere
        assert entry["rms_octaves"] == pytest.approx(0, abs=1e-6)
        octaves = math.log2(VALUES[axis][-1] / VALUES[axis][0])
        assert entry["drift_octaves"] == pytest.approx(POWER[entry["recipe"]] * octaves, abs=1e-6)
        assert entry["no_law"] is None
    for value in VALUES[axis]:
        directory = tmp_path / f"{axis}_{value}"
        there, records = load_sweep(directory)
        settings = {"model": "gpt", "steps": 100, "batch_size": 8, "depth": 8, AXES[axis].setting: value}
        assert {record["steps"] for record in records} == {settings.pop("steps")} == {there["config"]["steps"]}
        assert (there["config"]["widths"], there["config"]["settings"]) == ([64], settings)
        before = results(tmp_path)
        run_sweep(
            config(axis).sweep(value, there["config"]["search"]["centres"]),
            directory,
            None,
            executor=Inline(),
            progress=silent,
        )
        assert results(tmp_path) == before


def test_the_next_search_starts_at_the_optimum_before(finished):
    directory, _ = finished
    centres = [json.loads((directory / f"horizon_{n}" / "config.json").read_text())["search"] for n in (100, 200, 400)]
    assert [one["centres"] for one in centres] == [
        {"steady": -3.25, "adamw": -6.0}, {"steady": -3.25, "adamw": -3.25}, {"steady": -3.5, "adamw": -4.0}
    ]  # fmt: skip
    grid = Grid((-6.0, -5.0, -4.0, -3.0, -2.0))
    measure(directory.parent / "grid", config(search=grid))
    for value in VALUES["horizon"]:
        records = read_lines(directory.parent / "grid" / f"horizon_{value}" / "results.jsonl")
        assert {record["log2_lr"] for record in records} == set(grid.rates)


def test_summary_and_files_agree_and_are_strict_json(finished):
    directory, summary = finished
    stored = json.loads((directory / "summary.json").read_text(), parse_constant=pytest.fail)
    assert stored == summary == load(directory)[0]
    assert json.loads((directory / "config.json").read_text()) == {"kind": "extrapolate", **summary["config"]}
    assert {path.name for path in directory.iterdir()} == {
        ".lock", "config.json", "summary.json", *(f"horizon_{value}" for value in VALUES["horizon"])
    }  # fmt: skip
    entry = summary["recipes"][0]
    assert (entry["line"]["size"][0], entry["line"]["size"][-1]) == pytest.approx((100, 1600))
    assert entry["line"]["log2_lr"][-1] == pytest.approx(entry["target_log2_lr"])
    assert entry["line"]["log2_lr_ci"][-1] == pytest.approx(entry["target_log2_lr_ci"])
    assert sum(map(sum, (entry["runs"] for entry in summary["recipes"]))) == sum(
        len(read_lines(directory / f"horizon_{value}" / "results.jsonl")) for value in VALUES["horizon"]
    )


def results(directory):
    return {path.parent.name: path.read_bytes() for path in sorted(directory.glob("*/results.jsonl"))}


def test_another_target_needs_no_other_runs(finished):
    directory, summary = finished
    before = results(directory)
    other = measure(directory, target=3200, run_trial=None)
    assert results(directory) == before
    assert other["recipes"][0]["target_log2_lr"] == pytest.approx(-3.3 - 0.25 * 5, abs=1e-6)
    none = measure(directory, run_trial=None)
    assert (none["target"], none["recipes"][0]["target_log2_lr"]) == (None, None)
    assert measure(directory, target=1600, run_trial=None)["recipes"] == summary["recipes"]


@pytest.mark.parametrize("stop", [1, 40, 60])
def test_an_interrupted_run_goes_on_to_the_same_end(finished, tmp_path, stop):
    count = 0

    def interrupt(progress):
        nonlocal count
        count += 1
        if count == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, target=1600, progress=interrupt)
    kept = results(tmp_path)
    there, _ = load(tmp_path)
    assert not there["finished"]
    assert there["target"] == 1600
    assert all("400 steps: unfinished" in entry["no_law"] for entry in there["recipes"])
    assert "UNFINISHED" in report.statement(there)
    assert measure(tmp_path, target=1600)["recipes"] == finished[1]["recipes"]
    assert all(results(tmp_path)[name].startswith(content) for name, content in kept.items())


def test_a_run_that_is_made_again_leaves_later_searches_where_they_started(finished, tmp_path):
    """As after a run that was killed twice, whose line is deleted."""
    measure(tmp_path)
    path = tmp_path / "horizon_100" / "results.jsonl"
    records = read_lines(path)
    wrong = {**records[0], "log2_lr": -3.25, "val_loss": 9.0}  # moves the optimum
    changed = [wrong if (r["recipe"], r["log2_lr"], r["seed"]) == ("steady", -3.25, 0) else r for r in records]
    path.write_text("".join(json.dumps(record) + "\n" for record in changed))
    again = measure(tmp_path, target=1600)
    assert again["recipes"][0]["best_log2_lr"][0] != pytest.approx(-3.3, abs=0.01)
    assert again["recipes"][0]["best_log2_lr"][1:] == finished[1]["recipes"][0]["best_log2_lr"][1:]


def test_an_optimum_at_the_edge_gives_no_law_and_says_which(tmp_path):
    summary = measure(tmp_path, config(search=Grid((-4.5, -4.0, -3.5, -3.0))), target=1600)
    steady, adamw = summary["recipes"]
    assert steady["no_law"] is None
    assert adamw["status"] == ["interior", "interior", "low edge"]
    assert adamw["no_law"] == "400 steps: low edge"
    assert [adamw[key] for key in ("power", "rms_octaves", "target_log2_lr", "drift_octaves", "line")] == [None] * 5
    text = report.statement(summary)
    assert "| no law" in text
    assert "adamw: no rate at 1600 steps, width 64; no law (400 steps: low edge)" in text
    assert "steady: lr = 0.0508 at 1600 steps" in text


def everything_diverges(trial):
    return TrialResult(None, None, 0.1, diverged=True)


def test_when_everything_diverges(tmp_path):
    summary = measure(tmp_path, config(recipes=("steady",)), run_trial=everything_diverges, target=1600)
    assert summary["finished"]
    assert summary["recipes"][0]["no_law"] == "100 steps: no result; 200 steps: no result; 400 steps: no result"
    assert draw(tmp_path) is None


def test_the_table_and_the_rate_to_use(finished):
    directory, summary = finished
    lines = report.statement(summary).splitlines()
    assert lines[0] == "gpt, width 64, batch size 8:"
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    assert rows[0] == [
        "recipe", "best lr at 100 steps", "best lr at 200 steps", "best lr at 400 steps", "power", "off the line",
        "drift in octaves", "best loss at 400 steps", "training (gap)",
    ]  # fmt: skip
    assert rows[1][:7] == [
        "steady", "2^-3.30 ± 0.12", "2^-3.55 ± 0.12", "2^-3.80 ± 0.12", "-0.25 ± 0.00", "0.00", "-0.50 ± 0.00 (x 0.71)"
    ]  # fmt: skip
    entry = summary["recipes"][0]
    runs = map(json.loads, (directory / "horizon_400" / "results.jsonl").read_text().splitlines())
    best = entry["recipe"], entry["best_loss_log2_lr"][-1]
    trained = [run["train_loss"] for run in runs if (run["recipe"], run["log2_lr"]) == best]
    assert entry["train_loss"][-1] == pytest.approx(sum(trained) / len(trained))
    assert rows[1][8] == f"{entry['train_loss'][-1]:.3f} ({entry['best_loss'][-1] - entry['train_loss'][-1]:+.3f})"
    assert lines[-2] == (
        "steady: lr = 0.0508 at 1600 steps (0.0466 to 0.0553), width 64; "
        "extrapolated 4x beyond the longest measured horizon"
    )
    assert report.BENDS in "\n".join(lines)
    assert draw(directory).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (None, "lr = 0.0718 at 400 steps (0.0659 to 0.0782), width 64; measured; --to-steps N gives the rate at N"),
        (50, "at 50 steps (0.111 to 0.132), width 64; extrapolated 2x below the shortest measured horizon"),
        (200, "at 200 steps (0.0783 to 0.0931), width 64; by the law, inside what was measured"),
    ],
)
def test_other_targets(finished, target, said):
    directory, summary = finished
    again = extrapolated(summary["config"], load(directory)[1], target, {})
    assert said in report.recommendation(again).splitlines()[0]


def test_two_values_have_no_distance_from_the_line(tmp_path):
    summary = measure(tmp_path, config(values=(400, 100)), target=1600)
    assert summary["values"] == [100, 400]
    assert summary["recipes"][0]["rms_octaves"] is None
    assert report.table(summary).rows[0][4] == "not known"


def test_one_executor_serves_all_and_each_value_is_announced(tmp_path, capsys):
    executor = Inline()
    run(config(), tmp_path, fake, executor=executor, progress=silent)
    begun = [f"surefoot: {steps} steps, width 64 ({place} of 3)" for place, steps in enumerate((100, 200, 400), 1)]
    assert capsys.readouterr().err.splitlines() == begun
    assert executor.closed == 3


def raises(trial):
    if trial.steps == 200:
        raise KeyError("no such layer")
    return fake(trial)


def test_a_run_that_raises_ends_it_and_keeps_what_was_finished(tmp_path):
    with pytest.raises(SweepError, match="KeyError"):
        measure(tmp_path, run_trial=raises)
    assert load(tmp_path)[0]["recipes"][0]["status"] == ["interior", "unfinished", "unfinished"]


def test_a_second_writer_and_another_configuration_are_refused(finished):
    directory, _ = finished
    with locked(directory), pytest.raises(DirectoryInUse, match=f"in use by another run .process {os.getpid()}"):
        measure(directory)
    with pytest.raises(ValueError, match=r"differs in values: there \[100, 200, 400\], now \[100, 200\]"):
        measure(directory, config(values=(100, 200)))
    with pytest.raises(ValueError, match=r"differs in width: there 64, now 32"):
        measure(directory, config(width=32))


def test_directories_of_one_kind_are_refused_by_the_other(finished, tmp_path):
    directory, _ = finished
    widths = config().sweep(100)
    with pytest.raises(ValueError, match="belongs to another configuration"):
        run_sweep(widths, directory, fake, executor=Inline(), progress=silent)
    run_sweep(widths, tmp_path, fake, executor=Inline(), progress=silent)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.json*")}
    with pytest.raises(ValueError, match="it differs in axis: there missing"):
        measure(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.json*")} == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": (100,)}, r"--horizons needs 2 values, got \[100\]"),
        ({"values": ()}, "horizons is empty"),
        ({"values": (100, 100)}, "horizons names a value twice"),
        ({"seeds": ()}, "seeds is empty"),
    ],
)
def test_wrong_configurations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)
