"""Sweeps of a fake run whose optima are known: what is planned, recorded, resumed and summarised."""

import json
import math
import os

import pytest

from inline_executor import Inline
from surefoot.experiment.configs import kind_of
from surefoot.experiment.files import dumps
from surefoot.experiment.sweep.config import SweepConfig, TrialResult
from surefoot.experiment.sweep.progress import on_stderr
from surefoot.experiment.sweep.search import Bracket, Grid
from surefoot.experiment.sweep.sweep import load, run

WIDTHS = (32, 64, 128)
CENTRES = {"steady": -4.0, "falling": -6.0}


def known_optimum(recipe, width):
    return -4.3 if recipe == "steady" else -5.7 - math.log2(width / 32)


def silent(progress):
    pass


def fake(trial):
    """A parabola whose level falls with width; three octaves above its optimum it diverges."""
    d = trial.log2_lr - known_optimum(trial.recipe, trial.width)
    if d > 3:
        return TrialResult(None, math.nan, 0.01)
    loss = 2 - 0.1 * math.log2(trial.width) + 0.1 * d**2 + 0.001 * trial.seed
    return TrialResult(loss, loss, 0.01 * trial.width)


def thread_count(trial):
    import torch

    return TrialResult(float(torch.get_num_threads()), float(os.environ["OMP_NUM_THREADS"]), 0.0)


def config(**changes):
    values = {"recipes": ("steady", "falling"), "widths": WIDTHS, "seeds": (0, 1, 2), "steps": 10}
    return SweepConfig(**{**values, "search": Bracket(CENTRES), "settings": {"depth": 2}, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sweep") / "new" / "run"
    shown = []
    facts = {"corpus_sha256": "abc"}
    summary = run(config(), directory, fake, workers=2, progress=shown.append, environment=facts)
    return directory, summary, shown


def records(directory):
    return [json.loads(line) for line in (directory / "results.jsonl").read_text().splitlines()]


def test_each_width_has_its_own_optimum(finished):
    for entry in finished[1]["recipes"]:
        truth = [known_optimum(entry["recipe"], width) for width in entry["widths"]]
        assert entry["widths"] == list(WIDTHS)
        assert entry["best_log2_lr"] == pytest.approx(truth, abs=1e-6)
        assert all(
            low <= best <= high
            for best, (low, high) in zip(entry["best_log2_lr"], entry["best_log2_lr_ci"], strict=True)
        )
        assert entry["interior"] == [True] * 3
        assert entry["seeds"] == 3
        assert entry["best_loss"] == sorted(entry["best_loss"], reverse=True)


def test_drift_and_regret_are_those_of_the_curves(finished):
    steady, falling = finished[1]["recipes"]
    assert steady["drift_octaves"] == pytest.approx(0, abs=1e-6)
    assert falling["drift_octaves"] == pytest.approx(-2, abs=1e-6)
    assert falling["drift_octaves_ci"] == pytest.approx([-2, -2], abs=1e-6)
    assert steady["regret_nats"] == pytest.approx(0, abs=0.007)
    # The narrow optimum was really run at the widest model, two octaves too high.
    assert falling["regret_nats"] == pytest.approx(0.4, abs=0.03)
    ran = {(r["recipe"], r["width"], r["log2_lr"]) for r in records(finished[0])}
    assert ("falling", 128, falling["regret_log2_lr"]) in ran
    assert falling["regret_log2_lr"] == pytest.approx(known_optimum("falling", 32), abs=1 / 128)
    assert ("falling", 64, falling["regret_log2_lr"]) not in ran


def test_results_are_strict_json_with_the_promised_keys(finished):
    directory, summary, _ = finished
    keys = ["recipe", "width", "log2_lr", "seed", "steps", "train_loss", "val_loss", "diverged", "seconds"]
    for record in records(directory):
        assert list(record) == keys
    trials = [(r["recipe"], r["width"], r["log2_lr"], r["seed"]) for r in records(directory)]
    assert len(trials) == len(set(trials))
    assert json.loads((directory / "summary.json").read_text()) == json.loads(dumps(summary))
    assert load(directory)[0] == json.loads(dumps(summary))
    environment = summary["environment"]
    assert {"python", "torch", "platform", "cpu", "cores", "date", "surefoot"} <= environment.keys()
    assert environment["corpus_sha256"] == "abc"
    assert summary["config"]["settings"] == {"depth": 2}


def test_the_configuration_names_the_kind_of_run_and_goes_on_without_the_name(finished, tmp_path):
    """As directories of earlier versions have none."""
    directory, summary, _ = finished
    stored = json.loads((directory / "config.json").read_text())
    assert stored == {"kind": "transfer", **summary["config"]}
    assert kind_of(directory) == ("transfer", summary["config"])
    del stored["kind"]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    (tmp_path / "results.jsonl").write_bytes((directory / "results.jsonl").read_bytes())
    assert kind_of(tmp_path) == ("transfer", summary["config"])
    assert load(tmp_path)[0]["recipes"] == run(config(), tmp_path, None, progress=silent)["recipes"]
    for kind in ("compare", "elephant"):
        (tmp_path / "config.json").write_text(json.dumps({"kind": kind, **stored}))
        with pytest.raises(ValueError, match=f'it differs in kind: there "{kind}", now "transfer"'):
            run(config(), tmp_path, None, progress=silent)
    with pytest.raises(ValueError, match="is not from transfer"):
        kind_of(tmp_path)


def test_seeds_of_a_curve_share_their_rates_within_the_budget(finished):
    for recipe in CENTRES:
        rates = [
            {r["log2_lr"] for r in records(finished[0]) if (r["recipe"], r["width"], r["seed"]) == (recipe, 64, seed)}
            for seed in (0, 1, 2)
        ]
        assert rates[0] == rates[1] == rates[2]
        assert 5 <= len(rates[0]) <= 7


def test_the_narrowest_width_starts_since_the_widest_waits_for_its_rate(finished):
    widths = [r["width"] for r in records(finished[0])]
    assert set(widths[:6]) == {min(widths)}
    assert [*dict.fromkeys(widths)][1] == max(widths)


def test_progress_counts_up_and_time_left_ends_at_zero(finished):
    shown = finished[2]
    assert [p.finished for p in shown] == list(range(1, len(shown) + 1))
    assert (shown[-1].expected, shown[-1].seconds_left) == (len(shown), 0)
    assert 0.4 < shown[0].expected / len(shown) < 1.6


def test_a_rerun_runs_nothing_and_says_the_same(finished):
    directory, summary, _ = finished
    before = (directory / "results.jsonl").read_bytes()
    again = run(config(), directory, None, progress=silent)  # None cannot be run
    assert (directory / "results.jsonl").read_bytes() == before
    assert again["recipes"] == summary["recipes"]


def test_a_rerun_fills_in_exactly_what_is_missing(finished, tmp_path):
    directory, summary, _ = finished
    lines = (directory / "results.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    (tmp_path / "results.jsonl").write_text("".join(lines[::3]) + lines[1][:40])  # and a torn line
    shown = []
    again = run(config(), tmp_path, fake, executor=Inline(), progress=shown.append)
    assert len(shown) == len(lines) - len(lines[::3])
    assert sorted(map(str, records(tmp_path))) == sorted(map(str, records(directory)))
    assert again["recipes"] == summary["recipes"]


def test_a_grid_with_one_seed_has_no_intervals_and_flags_its_edge(tmp_path):
    grid = config(search=Grid((-3.0, -5.0, -4.0)), seeds=(0,), widths=(128, 32))
    steady, falling = run(grid, tmp_path, fake, executor=Inline(), progress=silent)["recipes"]
    assert steady["widths"] == [32, 128]
    assert steady["best_log2_lr_ci"] == [None, None]
    assert steady["drift_octaves_ci"] is None
    assert steady["runs"] == [3, 4]
    assert falling["status"] == ["low edge", "low edge"]
    assert falling["best_log2_lr"] == [None, None]
    assert falling["drift_octaves"] is falling["regret_nats"] is None
    assert falling["diverged"] == [0, 2]  # the fake diverges three octaves above -7.7
    assert {r["val_loss"] for r in records(tmp_path) if r["diverged"]} == {None}


def test_a_single_width_has_no_drift_and_no_transferred_run(tmp_path):
    one = config(recipes=("steady",), widths=(32,), seeds=(0,))
    (entry,) = run(one, tmp_path, fake, executor=Inline(), progress=silent)["recipes"]
    assert entry["drift_octaves"] is entry["regret_nats"] is entry["regret_log2_lr"] is None
    assert all(rate * 2 == round(rate * 2) for rate in {r["log2_lr"] for r in records(tmp_path)})


def test_workers_run_one_thread_each(tmp_path):
    one = config(recipes=("steady",), widths=(32,), seeds=(0,), search=Grid((-4.0,)))
    run(one, tmp_path, thread_count, workers=1, progress=silent)
    assert (records(tmp_path)[0]["train_loss"], records(tmp_path)[0]["val_loss"]) == (1.0, 1.0)


def test_without_a_terminal_progress_is_one_line_per_run(finished, capsys):
    with on_stderr() as show:
        show(finished[2][0])
    assert capsys.readouterr().err.startswith("[1/")


@pytest.mark.parametrize(("changes", "message"), [({"widths": ()}, "widths is empty"), ({"seeds": (1, 1)}, "twice")])
def test_wrong_configurations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_wrong_searches_are_refused():
    with pytest.raises(ValueError, match="empty"):
        Grid(())
    with pytest.raises(ValueError, match="at least 3"):
        Bracket({}, budget=2)


def hopeless(trial):
    return TrialResult(None, None, 0.0) if trial.recipe == "falling" else fake(trial)


def test_report_draws_and_prints_what_was_found(finished):
    from surefoot.experiment.reports import report
    from surefoot.experiment.reports import transfer as transfer_report

    assert report.draw(finished[0]).read_bytes().startswith(b"\x89PNG")
    text = str(transfer_report.table(finished[1]))
    assert "2^-4.30" in text
    assert "-2.00" in text
    assert len({len(line) for line in text.splitlines()[:4]}) == 1  # aligned


def test_a_run_that_is_taken_out_takes_the_summary_with_it(tmp_path):
    def interrupted(trial):
        raise KeyboardInterrupt

    grid = config(search=Grid((-5.0, -4.0, -3.0)), seeds=(0,))
    run(grid, tmp_path, fake, executor=Inline(), progress=silent)
    lines = (tmp_path / "results.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "results.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(KeyboardInterrupt):
        run(grid, tmp_path, interrupted, executor=Inline(), progress=silent)
    assert not (tmp_path / "summary.json").exists()
    assert len(load(tmp_path)[1]) == len(lines) - 1


def test_the_summary_that_is_read_is_of_the_results_as_they_are(tmp_path):
    run(config(search=Grid((-5.0, -4.0, -3.0)), seeds=(0,)), tmp_path, fake, executor=Inline(), progress=silent)
    before, found = load(tmp_path)
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(r | {"val_loss": 9.0}) + "\n" for r in found))
    after, _ = load(tmp_path)
    assert {loss for entry in after["recipes"] for loss in entry["best_loss"]} == {9.0}
    assert after["environment"] == before["environment"]


def test_report_of_a_recipe_that_only_diverges(tmp_path):
    from surefoot.experiment.reports import report
    from surefoot.experiment.reports import transfer as transfer_report

    grid = config(search=Grid((-5.0, -4.0, -3.0)), seeds=(0,))
    summary = run(grid, tmp_path, hopeless, executor=Inline(), progress=silent)
    assert "no result" in str(transfer_report.table(summary))
    assert report.draw(tmp_path).exists()
    (tmp_path / "summary.json").unlink()  # as an interrupted sweep leaves it
    assert report.draw(tmp_path).exists()


def test_no_more_runs_are_finished_than_expected_where_some_of_an_earlier_search_are_missing(tmp_path):
    run(config(), tmp_path, fake, executor=Inline(), progress=silent)
    path, shown = tmp_path / "results.jsonl", []
    path.write_text("".join(path.read_text().splitlines(keepends=True)[10:]))
    run(config(), tmp_path, fake, executor=Inline(), progress=shown.append)
    assert shown
    assert all(each.finished <= each.expected for each in shown)
