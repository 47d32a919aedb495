"""The page of sweeps over an axis: the rate to use first, the law with its interval and target, a curve per value."""

import json

import pytest

import run_directories as made
from surefoot.experiment.configs import kind_of
from surefoot.experiment.reports.page import html
from surefoot.experiment.reports.report import page
from surefoot.experiment.reports.server import Server
from surefoot.experiment.sweep.sweep import load


def facts(directory):
    return {fact.label: f"{fact.value} | {fact.note}" for fact in page(directory).facts}


def rows(chart):
    return [dict(zip(chart.columns, row, strict=True)) for row in zip(*chart.columns.values(), strict=True)]


def test_the_rate_at_the_target_its_interval_and_what_it_rests_on_are_read_first(tmp_path):
    directory = made.horizons(tmp_path / "run")
    assert kind_of(directory)[0] == "extrapolate"
    assert page(directory).kind == "learning-rate transfer over steps: gpt, width 64, batch size 16"
    assert page(directory).state == "finished: 108 runs"
    found = facts(directory)
    assert [*found] == [
        "Rate to use", "Its 95 % interval", "Power", "The best rate of falling moves by",
        "Missing it by a factor of two costs",
    ]  # fmt: skip
    assert found["Rate to use"] == (
        "0.00837 | 2^-6.90, for falling at 1600 steps and width 64, which has the lowest loss of 2 recipes at 400 "
        "steps; extrapolated 4x beyond the longest measured horizon"
    )
    assert found["Its 95 % interval"] == (
        "0.00837 to 0.00837 | over 3 seeds; it does not contain that the law bends beyond what was measured"
    )
    assert found["Power"] == (
        "-1.00 ± 0.00 | the best rate goes as steps to this power; the best rates lie 0.00 octaves (rms) off the law"
    )
    assert (
        found["The best rate of falling moves by"] == "-2.00 ± 0.00 (x 0.25) | from 100 steps to 400 steps, in octaves"
    )
    assert found["Missing it by a factor of two costs"].endswith("at twice | nats of validation loss, at 400 steps")


def test_without_a_target_the_rate_is_the_measured_one(tmp_path):
    found = facts(made.horizons(tmp_path / "run", target=None))["Rate to use"]
    assert found.startswith("0.0335 | 2^-4.90, for falling at 400 steps and width 64")
    assert found.endswith("measured; --to-steps N gives the rate at N")


def test_one_seed_has_no_interval_and_the_page_says_how_to_get_one(tmp_path):
    found = facts(made.horizons(tmp_path / "run", seeds=1))["Its 95 % interval"]
    assert found == "not measured | it needs three seeds and these sweeps have 1: --seeds 3, in another directory"


def test_the_chart_has_measured_rates_the_law_and_the_target(tmp_path):
    law = page(made.horizons(tmp_path / "run")).charts[0]
    assert law.title == "Best learning rate against steps"
    falling = [row for row in rows(law) if row["recipe"] == "falling"]
    measured = [(row["size"], row["lr"]) for row in falling if row["kind"] == "measured"]
    assert measured == [(100, 0.13397), (200, 0.066986), (400, 0.033493)]
    line = [row for row in falling if row["kind"] == "law"]
    assert [(row["size"], row["lr"]) for row in (line[0], line[-1])] == [(100, 0.13397), (1600, 0.0083732)]
    (target,) = [row for row in falling if row["kind"] == "target"]
    assert (target["size"], target["lr"], target["low"], target["high"]) == (1600, 0.0083732, 0.0083732, 0.0083732)
    assert law.spec["encoding"]["x"]["axis"]["values"] == [100, 200, 400, 1600]
    assert law.spec["encoding"]["x"]["scale"]["type"] == next(iter(law.axes["y"].values()))["scale"]["type"] == "log"


def test_loss_curves_have_a_line_for_each_value_and_its_own_steps(tmp_path):
    law, curves = page(made.horizons(tmp_path / "run")).charts
    assert law.spec["layer"]
    assert curves.title == "Loss against learning rate"
    assert {(row["width"], row["steps"]) for row in rows(curves)} == {("100", 100), ("200", 200), ("400", 400)}
    kinds = curves.columns["kind"]
    assert {kind: kinds.count(kind) for kind in kinds} == {"mean": 30, "seed": 90, "optimum": 6, "diverged": 6}
    assert [choice.label for choice in curves.choices] == ["falling", "level"]


def test_under_way_there_is_no_law_and_the_page_says_what_is_missing(tmp_path):
    directory = made.horizons(tmp_path / "run", finished=False)
    assert page(directory).state == "under way: 90 runs"
    assert facts(directory) == {
        "Rate to use": "none yet | falling: no law (400 steps: unfinished); level: no law (400 steps: unfinished)"
    }
    table = page(directory).tables[0]
    assert table.rows[0][1:4] == ["0.134\n2^-2.90 ± 0.00", "0.067\n2^-3.90 ± 0.00", "unfinished"]
    assert any("UNFINISHED" in note for note in table.notes)
    law = page(directory).charts[0]
    assert set(law.columns["kind"]) == {"measured"}


def test_what_has_only_begun(tmp_path):
    directory = made.horizons(tmp_path / "run", finished=False)
    for path in directory.glob("horizon_*/*"):
        path.unlink()
    (directory / "summary.json").unlink()
    assert page(directory).charts == []
    assert facts(directory)["Rate to use"].startswith("none yet")


def test_a_run_that_failed_is_named_by_its_value(tmp_path):
    directory = made.horizons(tmp_path / "run")
    path = directory / "horizon_200" / "results.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[0] |= {"failed": "killed twice: out of memory", "val_loss": None}
    made.lines(path, records)
    assert any(note.startswith("failed: falling 1 at 200 steps") for note in page(directory).tables[0].notes)


def test_each_value_is_a_sweep_with_a_page_of_its_own(tmp_path):
    directory = made.horizons(tmp_path / "run") / "horizon_200"
    assert load(directory)[0]["config"]["steps"] == 200
    assert facts(directory)["Rate to use"].startswith("0.067 | 2^-3.90, for falling at width 64")


def test_a_run_of_a_value_is_noticed_by_the_live_page(tmp_path):
    directory = made.horizons(tmp_path / "run", finished=False)
    with Server([directory], port=0) as server:
        assert server.pages()[0].state == "under way: 90 runs"
        with (directory / "horizon_400" / "results.jsonl").open("a") as file:
            file.write(json.dumps({**made.sweep_run("level", 64, -2.5, 0, -2.9), "steps": 400}) + "\n")
        assert server.pages()[0].state == "under way: 91 runs"


def test_the_page_is_one_document(tmp_path):
    text = html([page(made.horizons(tmp_path / "run"))])
    assert text.index("Rate to use") < text.index("Best learning rate against steps") < text.index("Every run")


def test_a_damaged_file_is_named(tmp_path):
    directory = made.horizons(tmp_path / "run")
    (directory / "horizon_100" / "results.jsonl").write_text('{"a": \n{}\n')
    with pytest.raises(ValueError, match=r"horizon_100/results\.jsonl, line 1 is not a JSON object"):
        page(directory)
