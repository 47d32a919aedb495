"""Comparisons of fake runs whose optima are known: equal tuning, fresh seeds, resuming, the table."""

import json
import math

import pytest

from inline_executor import Inline
from surefoot.experiment.reports import compare as compare_report
from surefoot.experiment.sweep.compare import load, run
from surefoot.experiment.sweep.config import Comparison, Question, TrialResult
from surefoot.experiment.sweep.executors import Killed, Pool

BEST = {"steady": -4.25, "adamw": -6.0, "muon": -3.0, "lion": math.nan}
LEVEL = {"steady": 2.0, "adamw": 2.2, "muon": 2.1, "lion": 0.0}
STEPS = 100


def fake(trial):
    """A parabola around a known optimum, to which the loss falls linearly from 4.

    Lion diverges always, a rate above 1 with all seeds but one.
    """
    if trial.recipe == "lion" or (trial.log2_lr > 0 and trial.seed != 3):
        return TrialResult(None, None, 1.0, diverged=True, facts={"curve": {"step": [0]}})
    noise = 0.01 * math.sin(7 * trial.seed + len(trial.recipe))
    loss = LEVEL[trial.recipe] + 0.1 * (trial.log2_lr - BEST[trial.recipe]) ** 2 + 0.1 * trial.seed + noise
    if not (parts := trial.settings.get("evaluations", 0)):
        return TrialResult(loss - 0.25, loss, 1.0)
    steps = [trial.steps * i // parts for i in range(parts + 1)]
    values = [4 + (loss - 4) * step / trial.steps for step in steps[:-1]] + [loss]
    seconds = [step * (2 if trial.recipe == "steady" else 1) / 100 for step in steps]
    return TrialResult(loss - 0.25, loss, 1.0, facts={"curve": {"step": steps, "val_loss": values, "seconds": seconds}})


def comparison(**changes):
    sizes = {"width": 32, "steps": STEPS, "rates_per_recipe": 6, "tuning_seeds": 2, "seeds": 3, "evaluations": 4}
    settings = {"batch_size": 2, "context": 8}
    names = {"recipes": ("steady", "adamw", "lion"), "published": ("muon@0.125", "adamw@8")}
    return Comparison(**{**names, **sizes, "settings": settings, **changes})


def silent(progress):
    pass


def records(directory):
    return [json.loads(line) for line in (directory / "results.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("compare") / "new" / "run"
    return directory, run(comparison(), Question("adamw"), directory, fake, executor=Inline(), progress=silent)


def test_everyone_is_tuned_with_as_many_runs(finished):
    directory, summary = finished
    tuned = [record["recipe"] for record in records(directory / "tuning")]
    assert {name: tuned.count(name) for name in tuned} == {"steady": 12, "adamw": 12, "lion": 12}
    runs = [(entry["name"], entry["settings"], entry["tuning_runs"]) for entry in summary["recipes"]]
    tuned, published = [(name, "tuned", 12) for name in ("steady", "adamw", "lion")], ("muon@0.125", "adamw@8")
    assert runs == [*tuned, *((name, "published", 0) for name in published)]
    assert summary["finished"]


def test_final_runs_are_paired_over_seeds_that_tuning_has_not_seen(finished):
    directory, _ = finished
    assert {record["seed"] for record in records(directory / "tuning")} == {0, 1}
    final = [(record["recipe"], record["log2_lr"], record["seed"]) for record in records(directory / "final")]
    rates = [("steady", -4.25), ("adamw", -6.0), ("adamw", 3.0), ("muon", -3.0)]
    assert sorted(final) == sorted((*rate, seed) for rate in rates for seed in (2, 3, 4))


def test_losses_differences_and_ratios(finished):
    _, summary = finished
    steady, adamw, lion, muon, wild = summary["recipes"]
    losses = [[e["val_loss_by_seed"][f"{seed}"] for seed in (2, 3, 4)] for e in (steady, adamw)]
    assert adamw["val_loss"] == pytest.approx(sum(losses[1]) / 3) == summary["target"]
    assert steady["difference"] == pytest.approx((sum(losses[0]) - sum(losses[1])) / 3)
    assert steady["difference_ci"][0] < steady["difference"] < steady["difference_ci"][1]
    assert 0 < steady["p"] < 0.05
    assert steady["val_loss_ci"][1] - steady["val_loss_ci"][0] > 5 * (
        steady["difference_ci"][1] - steady["difference_ci"][0]
    )  # paired: what the seeds share is taken out
    expected = STEPS * (4 - adamw["val_loss"]) / (4 - steady["val_loss"])
    assert steady["steps_to_target"] == pytest.approx(expected)
    assert (steady["steps_ratio"], steady["seconds_ratio"]) == pytest.approx((expected / STEPS, 2 * expected / STEPS))
    assert (adamw["steps_ratio"], adamw["difference"], adamw["p"]) == (1.0, None, None)
    assert (muon["rate_from"], muon["lr"], steady["rate_from"]) == ("published", 0.125, "fitted")
    assert (lion["lr"], lion["tuning_diverged"], lion["final_runs"], lion["val_loss"]) == (None, 12, 0, None)
    assert (wild["diverged"], wild["val_loss"], wild["difference"], wild["curve"]) == (2, None, None, None)
    assert list(wild["val_loss_by_seed"]) == ["3"]  # alone it would flatter
    assert adamw["train_loss"] == pytest.approx(adamw["val_loss"] - 0.25)
    assert (lion["train_loss"], wild["train_loss"]) == (None, None)


def test_the_table_says_who_diverged(finished):
    rows = {name: cells for name, *cells in compare_report.table(finished[1]).rows}
    unknown = ["not known", "not known", "", "not known", "not known"]
    assert rows["lion"] == ["tuned, 12 runs", "none: diverged at every rate", "none", *unknown, "12 of 12, 0 of 0"]
    wild = ["diverged", "not known", "not known", "", "diverged", "diverged", "0 of 0, 2 of 3"]
    assert rows["adamw@8"] == ["published, 0 runs", "2^3.00 (8), published", *wild]
    assert rows["muon@0.125"][:2] == ["published, 0 runs", "2^-3.00 (0.125), published"]
    assert rows["steady"][:2] == ["tuned, 12 runs", "2^-4.25 (0.0526), fitted"]
    assert rows["adamw"][3].endswith(" (+0.250)")
    assert rows["adamw"][4:8] == ["baseline", "", "1.00", "1.00"]


class Fatal(Inline):
    """As `Inline`, but lion's runs are killed, and half of adamw's at the rate of 8."""

    def wait(self, handles):
        return [(h, Killed("it died") if self._dies(h) else end) for h, end in super().wait(handles)]

    def _dies(self, trial):
        return trial.recipe == "lion" or (trial.log2_lr > 0 and trial.seed != 3)


def test_the_table_says_who_was_killed(tmp_path):
    summary = run(comparison(), Question("adamw"), tmp_path, fake, executor=Fatal(), progress=silent)
    *_, lion, _, wild = summary["recipes"]
    assert (lion["tuning_failed"], lion["tuning_diverged"], wild["failed"], wild["diverged"]) == (12, 0, 2, 0)
    table = compare_report.table(summary)
    cells = {row[0]: row[2:4] for row in table.rows}
    assert cells[lion["name"]] == ["none: failed at every rate", "none"]
    assert cells[wild["name"]] == ["2^3.00 (8), published", "failed"]
    assert not any("diverged" in cell for row in table.rows for cell in row)
    assert "to run one again, delete its line" in " ".join(table.notes)


def test_another_question_needs_no_other_runs(finished):
    directory, summary = finished
    before = [(directory / stage / "results.jsonl").read_bytes() for stage in ("tuning", "final")]
    other = run(comparison(), Question("steady", 3.0), directory, fake, executor=Pool(1), progress=silent)
    assert [(directory / stage / "results.jsonl").read_bytes() for stage in ("tuning", "final")] == before
    assert (other["baseline"], other["target"], other["recipes"][0]["steps_ratio"]) == ("steady", 3.0, 1.0)
    assert load(directory) == other
    unreached = run(comparison(), Question("adamw", 2.3), directory, fake, executor=Pool(1), progress=silent)
    assert [entry["steps_ratio"] for entry in unreached["recipes"]] == [None] * 5
    assert "no ratios, for adamw does not reach loss 2.3000" in str(compare_report.table(unreached))
    assert (
        run(comparison(), Question("adamw"), directory, fake, executor=Pool(1), progress=silent)["recipes"]
        == (summary["recipes"])
    )


def test_a_baseline_without_a_loss(tmp_path):
    summary = run(comparison(), Question("lion"), tmp_path, fake, executor=Inline(), progress=silent)
    assert [(e["difference"], e["steps_ratio"]) for e in summary["recipes"]] == [(None, None)] * 5
    assert summary["recipes"][0]["val_loss"] is not None
    assert "not known, for lion has no final loss" in str(compare_report.table(summary))


@pytest.mark.parametrize("stage_and_runs", [("tuning", 5), ("final", 4)])
def test_an_interrupted_comparison_goes_on_to_the_same_end(finished, tmp_path, stage_and_runs):
    stage, runs = stage_and_runs

    def stop(progress):
        path = tmp_path / stage / "results.jsonl"
        if path.exists() and path.read_bytes().count(b"\n") == runs:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(comparison(), Question("adamw"), tmp_path, fake, executor=Inline(), progress=stop)
    there = load(tmp_path)
    assert not there["finished"]
    assert "UNFINISHED" in str(compare_report.table(there))
    assert ("tuning is unfinished" in str(compare_report.table(there))) == (stage == "tuning")
    kept = (tmp_path / stage / "results.jsonl").read_bytes()
    assert kept.count(b"\n") == runs
    summary = run(comparison(), Question("adamw"), tmp_path, fake, executor=Inline(), progress=silent)
    assert (tmp_path / stage / "results.jsonl").read_bytes().startswith(kept)
    assert summary["recipes"] == finished[1]["recipes"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipes": ("steady", "steady")}, "recipes and published settings names a value twice"),
        ({"published": ("muon@0.1", "muon@0.1")}, "names a value twice"),
        ({"published": ("muon",)}, r"'muon' lacks a learning rate above 0, at most 2\*\*120; write it like muon@0.02"),
        ({"published": ("muon@-1",)}, "lacks a learning rate"),
        ({"published": ("muon@nan",)}, "lacks a learning rate"),
        ({"published": ("sgd@0.1",)}, "unknown method 'sgd'"),
        ({"rates_per_recipe": 2}, "a search needs at least 3"),
        ({"tuning_seeds": 0}, "seeds is empty"),
    ],
)
def test_wrong_comparisons_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        comparison(**changes)


def test_a_baseline_that_takes_no_part_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"muon is not compared: add it to --recipes, or choose one of steady, adamw"):
        run(comparison(), Question("muon"), tmp_path / "run", fake)
    assert not (tmp_path / "run").exists()
