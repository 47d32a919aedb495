"""A ladder of fake runs whose law is known: what is fitted, predicted, resumed, shown and refused."""

import json

import altair as alt
import numpy as np
import pytest

from inline_executor import Inline
from surefoot.cli import _parser
from surefoot.cli.ladder import configure
from surefoot.experiment.reports.report import draw, kind, page
from surefoot.experiment.sweep.config import TrialResult
from surefoot.experiment.sweep.ladder import Ladder, Rung, load, run
from surefoot.experiment.sweep.law import between
from surefoot.experiment.training.config import TrainConfig

SIZES = (1e4, 1e5, 1e6)
RUNGS = tuple(Rung(width, 10 * width**2, 10 * width, -3.0) for width in (32, 64, 128))
TARGET = Rung(256, 10 * 256**2, 2560, -4.0)


def law(size):
    return 1.2 + 30 * size**-0.3


def fake(trial):
    """The law at the trial's parameters, and each run's own shift; the highest rate diverges."""
    if trial.log2_lr > 0:
        return TrialResult(None, None, 0.1, diverged=True)
    loss = law(10 * trial.width**2) + 0.002 * (-1) ** trial.seed * (1 + trial.width / 64)
    return TrialResult(loss - 0.01, loss, 0.1)


def failing(trial):
    raise RuntimeError("no run is needed")


def ladder(rungs=RUNGS, seeds=3, **changes):
    values = {"recipe": "steady", "tokens_per_parameter": 20.0, "settings": {"model": "gpt", "text": "none"}}
    return Ladder(rungs=rungs, seeds=tuple(range(seeds)), **{**values, **changes})


def measure(directory, wanted=None, target=TARGET, run_trial=fake, **more):
    return run(wanted or ladder(), target, directory, run_trial, executor=Inline(), progress=lambda _: None, **more)


def test_the_fits_recover_laws_without_scatter():
    found = between([*SIZES, 1e7], [law(size) for size in (*SIZES, 1e7)]).floored
    assert (found.floor, found.power) == pytest.approx((1.2, 0.3), abs=1e-3)
    assert found.at(1e9)[0] == pytest.approx(law(1e9), abs=1e-3)
    free = between(SIZES, [3 * size**-0.2 for size in SIZES])
    assert free.free.power == pytest.approx(0.2, abs=1e-3)
    assert free.at(1e9).value == pytest.approx(3 * 1e9**-0.2, rel=0.01), "there is no floor, and both curves are one"


def test_the_order_in_which_runs_end_changes_no_number(tmp_path):
    def scattered(trial):
        loss = law(10 * trial.width**2) + 0.01 * np.sin(7.3 * trial.seed + trial.width)
        return TrialResult(loss, loss, 0.1)

    summary = measure(tmp_path, ladder(seeds=4), run_trial=scattered)
    for path in tmp_path.glob("width_*/results.jsonl"):
        path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    assert load(tmp_path) == json.loads(json.dumps(summary))


def test_the_prediction_is_the_middle_of_both_curves_and_its_interval_both_of_theirs():
    sizes = np.repeat(SIZES, 3)
    found = between(sizes, law(sizes) + np.random.default_rng(0).normal(0, 0.01, len(sizes)))
    (upper, above), (lower, below), middle = found.floored.at(1e7), found.free.at(1e7), found.at(1e7)
    assert found.free.floor == 0
    assert found.free.freedom == found.floored.freedom + 1
    assert lower < law(1e7) < upper + 0.02
    assert middle.value == (lower + upper) / 2
    assert middle.interval == (lower - below, max(upper + above, lower + below))


def test_its_interval_contains_another_run_as_often_as_it_says():
    generator, inside, widths = np.random.default_rng(0), 0, []
    for _ in range(200):
        sizes = np.repeat(SIZES, 3)
        found = between(sizes, law(sizes) + generator.normal(0, 0.01, len(sizes))).floored
        loss, half = found.at(1e7)
        inside += abs(law(1e7) + generator.normal(0, 0.01) - loss) <= half
        widths.append(2 * half)
    assert 182 <= inside <= 199, "95 % of 200"
    assert np.median(widths) < 0.4, "and is no wider than it needs to be"


def test_what_cannot_be_fitted():
    assert between(SIZES, [law(size) for size in SIZES]).at(1e7).interval is None, "it goes through three runs"
    assert between(SIZES, [1.0, 1.1, 1.2]) is None
    with pytest.raises(ValueError, match=r"--widths, for a curve of three numbers, needs 3 values, got \[32, 64\]"):
        ladder(RUNGS[:2])


def test_the_target_is_predicted_then_measured(tmp_path):
    summary = measure(tmp_path / "run")
    target = summary["target"]
    assert (summary["floor"], summary["power"]) == pytest.approx((1.2, 0.3), abs=0.05)
    assert 0 < summary["free_power"] < summary["power"]
    low, high = target["predicted_ci"]
    assert low < target["predicted"] < law(TARGET.parameters) < high
    assert (target["losses"], target["off"], summary["freedom"]) == ({}, None, 6)
    assert [rung["val_loss"] for rung in summary["rungs"]] == pytest.approx(
        [law(rung.parameters) + 0.002 * (1 + rung.width / 64) / 3 for rung in RUNGS]
    )
    begun = []
    measured = measure(tmp_path / "run", run_trial=lambda trial: begun.append(trial) or fake(trial), train_target=True)
    assert [(trial.width, trial.seed, trial.steps, trial.log2_lr) for trial in begun] == [(256, 0, 2560, -4.0)]
    assert measured["target"]["off"] == pytest.approx(target["predicted"] - law(TARGET.parameters) - 0.01)
    assert measured == load(tmp_path / "run") == json.loads((tmp_path / "run" / "summary.json").read_text())


def test_it_goes_on_and_another_target_needs_no_other_runs(tmp_path):
    def stops(trial):
        return failing(trial) if (trial.width, trial.seed) == (128, 1) else fake(trial)

    with pytest.raises(RuntimeError, match="no run is needed"):
        measure(tmp_path, run_trial=stops)
    assert load(tmp_path)["no_curve"] == "width 128 is unfinished"
    assert page(tmp_path).state == "under way: 7 runs"
    assert (
        kind(tmp_path).statement(load(tmp_path)).endswith("Predicted loss at width 256: none; width 128 is unfinished")
    )
    whole = measure(tmp_path)
    wider = Rung(512, 10 * 512**2, 5120, -4.5)
    again = measure(tmp_path, target=wider, run_trial=failing)
    assert again["rungs"] == whole["rungs"]
    assert again["target"]["predicted"] < whole["target"]["predicted"]
    with pytest.raises(ValueError, match=r"differs in tokens_per_parameter: there 20\.0, now 5\.0"):
        measure(tmp_path, ladder(tokens_per_parameter=5.0))
    with pytest.raises(ValueError, match="--to-width 128 is no wider than the ladder's widest model, 128"):
        measure(tmp_path, target=RUNGS[-1])


def test_a_rung_that_diverged_leaves_no_curve(tmp_path):
    summary = measure(tmp_path, ladder((*RUNGS[:2], Rung(128, 10 * 128**2, 1280, 1.0))))
    assert summary["no_curve"] == "a run of width 128 diverged or failed"
    assert (summary["target"]["predicted"], summary["line"], summary["rungs"][-1]["val_loss"]) == (None, None, None)
    assert "none" in kind(tmp_path).statement(summary)


def test_the_page_shows_the_line_its_interval_and_the_run(tmp_path):
    measure(tmp_path, train_target=True)
    shown = {fact.label: f"{fact.value}; {fact.note}" for fact in page(tmp_path).facts}
    assert [*shown] == ["Predicted loss at width 256", "Its 95 % interval", "Measured there", "Fitted floor"]
    assert shown["Predicted loss at width 256"].endswith("4 times the parameters of the largest of widths 32, 64, 128")
    assert "for one run, of either curve, 6 degrees of freedom" in shown["Its 95 % interval"]
    assert "nats off, inside the interval" in shown["Measured there"]
    (chart,) = page(tmp_path).charts
    alt.LayerSpec.from_dict(dict(chart.spec))  # Vega-Lite's schema
    kinds = chart.columns["kind"]
    assert {kind: kinds.count(kind) for kind in kinds} == {"run": 10, "curve": 17, "predicted": 1}
    drawn = zip(*(chart.columns[key][10:] for key in ("low", "loss", "high")), strict=True)
    assert all(low < loss < high for low, loss, high in drawn)
    assert draw(tmp_path) == tmp_path / "ladder.png"


def test_three_runs_have_a_prediction_and_no_interval(tmp_path):
    measure(tmp_path, ladder(seeds=1))
    assert page(tmp_path).facts[1].value == "not known"
    assert page(tmp_path).facts[1].note == "it needs a fourth run: --seeds 3, or more --widths, elsewhere"
    assert draw(tmp_path) == tmp_path / "ladder.png"


def test_steps_and_rate_follow_from_the_size(capsys):
    asked = ["ladder", "--widths", "16", "32", "48", "--to-width", "64", "--data", "markov:16", "--depth", "1"]
    asked += ["--tokens-per-parameter", "5", "--batch-size", "4", "--context", "16"]
    wanted, target = configure(_parser().parse_args(asked))
    assert [rung.width for rung in (*wanted.rungs, target)] == [16, 32, 48, 64]
    for rung in (*wanted.rungs, target):
        assert rung.steps == round(5 * rung.parameters / 64)
        assert 2**rung.log2_lr == pytest.approx(TrainConfig(steps=rung.steps, batch_size=4, context=16).lr)
    with pytest.raises(ValueError, match="--steps: a ladder's follow from --tokens-per-parameter, leave it out"):
        configure(_parser().parse_args([*asked, "--steps", "5"]))
    with pytest.raises(ValueError, match=r"--tokens-per-parameter: width 16 would take .*e\+28\d steps; give fewer"):
        configure(_parser().parse_args([*asked, "--tokens-per-parameter", "1e280"]))
