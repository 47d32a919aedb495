"""The pages: what they say first, what they hold, that nothing comes from elsewhere, and how large they are."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import altair as alt
import pytest

import run_directories as made
from combinations import combinations
from surefoot.experiment.reports import loss_curves
from surefoot.experiment.reports.page import body, html, order
from surefoot.experiment.reports.report import page, write
from surefoot.experiment.sweep.summary import points
from surefoot.experiment.sweep.sweep import load

MISSED = "Missing it by a factor of two costs"


def facts(directory):
    return {fact.label: f"{fact.value} | {fact.note}" for fact in page(directory).facts}


def chart(directory, title):
    return next(chart for chart in page(directory).charts if chart.title == title)


def test_the_rate_its_interval_and_what_missing_it_costs_are_read_first(tmp_path):
    found = facts(made.sweep(tmp_path / "run"))
    assert [*found] == [
        "Rate to use", "Its 95 % interval", MISSED, "The best rate of falling moves by"
    ]  # fmt: skip
    assert found["Rate to use"] == (
        "0.0335 | 2^-4.90, for falling at width 128, which has the lowest loss of 2 recipes; longer runs than these of "
        "100 steps want less"
    )
    assert found["Its 95 % interval"] == "0.0335 to 0.0335 | over 3 seeds"
    assert found[MISSED].startswith("+0.100 ± 0.000 at half\n+0.100 ± 0.000 at twice | nats")
    assert found["The best rate of falling moves by"].startswith("-2.00 ± 0.00 (x 0.25) | from width 32 to 128")


def test_one_seed_has_no_interval_and_the_page_says_how_to_get_one(tmp_path):
    found = facts(made.sweep(tmp_path / "run", seeds=1))["Its 95 % interval"]
    assert found.startswith("not measured")
    assert "this sweep has 1: --seeds 3" in found


def test_the_cost_at_a_rate_that_diverged_or_was_not_measured(tmp_path):
    directory = made.sweep(tmp_path / "run", recipes=("level",), widths=(64,), seeds=1)
    kept = [json.loads(line) for line in (directory / "results.jsonl").read_text().splitlines()]
    kept = [record for record in kept if -4.0 <= record["log2_lr"] <= -1.8 or record["diverged"]]
    made.lines(directory / "results.jsonl", kept)
    (directory / "summary.json").unlink()
    assert facts(directory)[MISSED].startswith("+0.100 at half\n+0.100 at twice")
    few = [made.sweep_run("level", 64, rate, 0, -2.9) for rate in (-3.9, -2.9, -2.4, 0.2)]
    made.lines(directory / "results.jsonl", few)
    assert facts(directory)[MISSED].startswith("+0.100 at half\ndivergence at twice")
    made.lines(directory / "results.jsonl", few[:-1])
    assert facts(directory)[MISSED].endswith(
        "+0.025 at 1.4 times | nats of validation loss; 1.4 times was the highest rate tried"
    )
    made.lines(directory / "results.jsonl", [
        {**record, **({"diverged": True, "val_loss": None} if record["log2_lr"] == -1.9 else {})} for record in kept
    ])  # fmt: skip
    assert facts(directory) == {
        "Rate to use": "none yet | no recipe's best rate lies inside the rates that were measured"
    }


def test_a_curve_has_every_mean_seed_optimum_and_divergence_once(tmp_path):
    curves = chart(made.sweep(tmp_path / "run", recipes=("level",)), "Loss against learning rate")
    kinds = curves.columns["kind"]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"mean": 15, "seed": 45, "optimum": 3, "diverged": 3}
    rows = [dict(zip(curves.columns, row, strict=True)) for row in zip(*curves.columns.values(), strict=True)]
    best = next(row for row in rows if row["kind"] == "mean" and (row["width"], row["log2_lr"]) == ("64", -2.9))
    assert (best["lr"], best["loss"], best["steps"], best["seed"]) == (0.13397, 2.126, 100, "mean of 3")


def test_a_sweep_under_way(tmp_path):
    directory = made.sweep(tmp_path / "run", finished=False)
    assert page(directory).state == "under way: 108 runs"
    assert page(directory).kind == "learning-rate transfer over width: gpt, 100 steps of 16 x 64 tokens"
    made.lines(directory / "results.jsonl", [])
    assert page(directory).charts == []
    assert facts(directory)["Rate to use"].startswith("none yet")


STUDIES = Path(__file__).parents[3] / "studies"
COMMITTED = sorted(f"{x.parent.relative_to(STUDIES)}" for x in STUDIES.rglob("results.jsonl"))
COMMITTED = [name for name in COMMITTED if (STUDIES / name / "config.json").exists()]
FIRST = {name.split("/")[0]: name for name in reversed(COMMITTED)}.values()


@combinations(lambda name: name in FIRST, name=COMMITTED)
def test_every_committed_sweep_has_a_page(name):
    assert len(FIRST) > 10
    assert page(STUDIES / name).facts


@pytest.mark.parametrize("finished", [True, False])
def test_a_training_run(tmp_path, finished):
    directory = made.training(tmp_path / "run", finished=finished)
    found = facts(directory)
    assert found["Validation loss"] == ("4.5000 | nats, at the end" if finished else "4.7500 | nats, at step 20")
    assert found["Norms"] == "1 alarm | 2 of 2 kinds of layer have a bound"
    assert found["Throughput"].startswith("1,234 tokens/s")
    assert found["Optimizer's share of a step"].startswith("25.0%")
    norms = chart(directory, "Norms")
    assert [choice.label for choice in norms.choices[:2]] == ["every linear layer (3)", "every embedding layer (1)"]
    assert {choice.label for choice in norms.choices[2:]} == {*(f"blocks.{i}.weight" for i in range(3)), "table.weight"}
    assert [alarm for alarm in norms.columns["alarm"] if alarm] == ["limit"]
    assert norms.columns["norm"][:2] == [1.0, 1.0]
    assert set(norms.columns["band"]) == {2.0}
    bounds = chart(directory, "What the next step can change")
    assert [choice.label for choice in bounds.choices][:2] == ["every linear layer (3)", "blocks.0.weight"]


def test_a_training_run_that_has_only_begun(tmp_path):
    made.write(tmp_path / "config.json", {"model": "gpt", "width": 64, "steps": 60, "seed": 0})
    assert page(tmp_path).state == "step 0 of 60"
    assert facts(tmp_path)["Training loss"].startswith("none yet")


@pytest.mark.parametrize("finished", [True, False])
def test_a_coordinate_check(tmp_path, finished):
    directory = made.check(tmp_path / "run", finished)
    found = facts(directory)["Coordinate check"]
    assert found == (
        "FAILS | 1 of 4 slopes leave ±0.1" if finished else "under way | slopes are fitted when all runs have finished"
    )
    if finished:
        slopes = chart(directory, "Slopes")
        assert slopes.columns["slope"] == [0.01, 0.01, 1.0, 0.01]
        assert chart(directory, "Sizes against width").columns["rms"][4:6] == [0.125, 0.25]
        assert [choice.label for choice in slopes.choices] == ["activations at the start", "their change"]


def test_a_comparison(tmp_path):
    directory = made.comparison(tmp_path / "run")
    found = facts(directory)
    assert found["Lowest loss"].startswith("steady | 2.3000 ± 0.0248 nats at lr 0.0625, tuned, n = 3 fresh seeds")
    assert found["Minus adamw"].startswith("-0.2000 ± 0.0000 nats | p = ")
    assert found["Steps that adamw takes"].startswith("0.67 of them | to loss 2.5000")
    charts = {chart.title: chart.columns for chart in page(directory).charts}
    assert [*charts] == ["Loss over steps", "Final loss by seed", "Tuning"]
    assert charts["Loss over steps"]["loss"] == [5.0, 2.8, 2.5, 5.0, 2.6, 2.3]
    assert charts["Tuning"]["lr"] == [0.03125, 0.0625, 0.125] * 2


class Links(HTMLParser):
    """What a document would load."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.policy = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if dict(attrs).get("http-equiv") == "Content-Security-Policy":
            self.policy = str(dict(attrs)["content"])
        self.loads += [str(value) for name, value in attrs if name in ("src", "href", "action") and value != "data:,"]


def test_nothing_comes_from_elsewhere_and_names_are_not_markup(tmp_path):
    directory = made.sweep(tmp_path / "<img src=x>", recipes=("</script><script>alert(1)</script>",))
    text = html([page(directory), page(made.training(tmp_path / "train"))])
    links = Links()
    links.feed(text)
    assert links.loads == []
    assert "default-src 'none'" in links.policy
    assert "connect-src 'none'" in links.policy
    assert "<img src=x" not in text
    assert "alert(1)</script>" not in text
    assert text.count("<script") == 3  # the data, Vega, the page's own
    assert "test &lt;b&gt;machine" in text


@pytest.mark.parametrize("make", [made.sweep, made.training, made.check, made.comparison, made.horizons])
def test_every_chart_is_as_the_schema_of_vega_lite_says(tmp_path, make):
    """Which Altair, where the charts are written, is told not to compare."""
    charts = page(make(tmp_path / "run")).charts
    assert charts
    for chart in charts:
        alt.LayerSpec.from_dict(dict(chart.spec))


def test_500_runs_take_at_most_3_megabytes(tmp_path):
    recipes = tuple(f"level {i}" for i in range(10))
    directory = made.sweep(tmp_path / "run", recipes=recipes, seeds=3)
    assert len(page(directory).tables[1].rows) == 540
    assert write([directory], tmp_path / "report.html").stat().st_size < 1.5e6


def test_a_long_run_of_a_deep_model_is_thinned_out_but_keeps_its_end_and_alarms(tmp_path):
    directory = made.training(tmp_path / "run", layers=150, steps=300)
    lines = [json.loads(line) for line in (directory / "norms.jsonl").read_text().splitlines()]
    lines[1]["alarms"] = [{**lines[-1]["alarms"][0], "reason": "early"}]
    made.lines(directory / "norms.jsonl", lines)
    norms = chart(directory, "Norms")
    assert len(norms.columns["norm"]) < 16_000
    assert max(norms.columns["step"]) == 3000
    assert {"limit", "early"} <= {*norms.columns["alarm"]}
    assert write([directory], tmp_path / "report.html").stat().st_size < 3e6


def test_the_body_alone_is_what_the_document_holds(tmp_path):
    pages = [page(made.sweep(tmp_path / "run"))]
    assert body(pages) in html(pages, live=True)
    assert re.search(r'data-live="2.0" data-version="[0-9a-f]{16}"', html(pages, live=True))


def test_a_sweep_is_not_taken_for_what_else_is_there(tmp_path):
    with pytest.raises(ValueError, match="not a sweep"):
        load(made.training(tmp_path))


def test_what_is_no_run_directory_or_is_damaged_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="is no run directory"):
        page(tmp_path)
    (tmp_path / "config.json").write_text('{"recipes": ')
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        page(tmp_path)


@pytest.mark.parametrize(
    ("cell", "number"),
    [("2^-7.30 ± 0.12", -7.3), ("-0.16 (x 0.9)", -0.16), ("12,345", 12345.0), ("1e-05", 1e-5), ("baseline", None)],
)
def test_cells_are_sorted_by_their_first_number(cell, number):
    assert order(cell) == number


def test_missing_a_rate_is_read_off_the_line_between_two(tmp_path):
    _, records = load(made.sweep(tmp_path / "run", recipes=("level",), seeds=1))
    curve = points(records, "level", 64)
    assert loss_curves.missed(curve, -2.4).value == pytest.approx(0.05)
    assert loss_curves.missed(curve, -0.4).value == float("inf")
    assert loss_curves.missed(curve, 0.5).value is None


def test_the_cost_is_paired_over_seeds(tmp_path):
    _, records = load(made.sweep(tmp_path / "run", recipes=("level",)))
    cost = loss_curves.missed(points(records, "level", 64), -2.4)
    assert cost.interval == pytest.approx((0.05, 0.05))  # the seeds differ by the same everywhere
