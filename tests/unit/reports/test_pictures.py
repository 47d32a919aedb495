"""The picture beside a run: what the page's chart shows, panel by panel, on white."""

import json

import pytest

import run_directories as made
from surefoot.experiment.reports import report
from surefoot.experiment.reports.report import draw, page

KINDS = {
    "transfer": (made.sweep, "transfer.png"),
    "extrapolate": (made.horizons, "transfer.png"),
    "compare": (made.comparison, "compare.png"),
    "train": (made.training, "norms.png"),
    "coordcheck": (made.check, "coordcheck.png"),
}


@pytest.fixture
def drawn(monkeypatch):
    """What a picture is drawn from."""

    def of(directory):
        given = []
        monkeypatch.setattr(report.vl_convert, "vegalite_to_png", lambda text, **_: given.append(text) or b"")
        draw(directory)
        assert "var(" not in given[0]
        return json.loads(given[0])

    return of


def panels(picture):
    return picture["vconcat"][0]["concat"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_has_a_picture_of_its_page(tmp_path, kind):
    make, name = KINDS[kind]
    directory = make(tmp_path / "run")
    assert draw(directory) == directory / name
    assert (directory / name).read_bytes().startswith(b"\x89PNG")


def test_a_sweep_has_a_panel_for_each_recipe_with_its_drift_on_shared_axes(tmp_path, drawn):
    picture = drawn(made.sweep(tmp_path / "run"))
    assert picture["title"]["text"] == "learning-rate transfer over width: gpt, 100 steps of 16 x 64 tokens"
    assert picture["title"]["subtitle"][0].startswith("Rate to use: 0.0335; 2^-4.90, for falling at width 128")
    assert [panel["title"] for panel in panels(picture)] == [
        {"text": "falling", "subtitle": "drift \N{MINUS SIGN}2.00 ± 0.00 octaves over 4\N{MULTIPLICATION SIGN} width"},
        {"text": "level", "subtitle": "drift \N{MINUS SIGN}0.00 ± 0.00 octaves over 4\N{MULTIPLICATION SIGN} width"},
    ]
    assert len({json.dumps(panel["encoding"]["y"]["scale"]["domain"]) for panel in panels(picture)}) == 1
    spans = [layer["encoding"]["x"]["scale"]["domain"] for panel in panels(picture) for layer in panel["layer"]]
    assert {round(high / low, 3) for low, high in spans} == {round(2**7.8, 3)}
    assert all(
        {row["recipe"] for row in panel["data"]["values"]} == {panel["title"]["text"]} for panel in panels(picture)
    )
    assert "Point at a point" not in json.dumps(picture)


def test_crosses_of_several_widths_do_not_hide_each_other(tmp_path, drawn):
    (panel,) = panels(drawn(made.sweep(tmp_path / "run", recipes=("level",))))
    crosses = [row for row in panel["data"]["values"] if row["kind"] == "diverged"]
    assert len({row["loss"] for row in crosses}) == len({row["width"] for row in crosses}) == 3


def test_a_training_run_has_a_panel_for_each_role_that_spans_two_octaves(tmp_path, drawn):
    picture = drawn(made.training(tmp_path / "run", layers=4))
    assert [panel["title"]["text"] for panel in panels(picture)] == [
        "every linear layer (4)",
        "every embedding layer (1)",
    ]
    domain = panels(picture)[1]["layer"][0]["encoding"]["y"]["scale"]["domain"]
    assert domain[0] < 1.4 < 2.0 < domain[1]
    assert domain[1] / domain[0] >= 4


def test_a_norm_of_0_or_none_is_not_drawn_and_its_alarm_stands_at_the_end_of_the_band(tmp_path):
    directory = made.training(tmp_path / "run")
    lines = [json.loads(line) for line in (directory / "norms.jsonl").read_text().splitlines()]
    lines[0]["norms"]["blocks.0.weight"] = [0.0, 0.0]
    lines[-1]["norms"]["table.weight"] = [None, None]
    made.lines(directory / "norms.jsonl", lines)
    (norms,) = (chart for chart in page(directory).charts if chart.title == "Norms")
    assert norms.choices[0].domains["y"][0] > 0.5
    text = json.dumps(norms.spec)
    assert "datum.norm > 0 ? datum.norm : null" in text
    assert "datum.norm > 0 ? datum.norm : datum.band" in text
    assert draw(directory).exists()


def test_a_comparison_has_the_target_and_a_band_over_seeds(tmp_path, drawn):
    (panel,) = panels(drawn(made.comparison(tmp_path / "run")))
    area, rule = panel["layer"][:2]
    assert (area["mark"]["type"], area["encoding"]["y2"]["field"]) == ("area", "high")
    assert rule["encoding"]["y"] == {"datum": 2.5}
    legend = panel["layer"][-1]["encoding"]["shape"]["legend"]["labelExpr"]
    assert "adamw, lr 0.0625: baseline" in legend
    assert "steady, lr 0.0625: 2.300" in legend


def test_layers_outside_the_band_are_named_with_their_slope(tmp_path):
    (sizes,) = (chart for chart in page(made.check(tmp_path / "run")).charts if chart.title == "Sizes against width")
    assert set(sizes.columns["name"]) == {None, "up +1.00"}
