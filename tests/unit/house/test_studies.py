"""The pages that the studies write agree with the committed results, and every script of the studies starts."""

import importlib
import math

import numpy as np
import pytest
from scripts import ROOT, importable, run, run_in_shell

from inline_executor import Inline
from surefoot.experiment.sweep.config import TrialResult
from surefoot.experiment.sweep.fit import Optimum
from surefoot.momentum import Momentum

STUDIES = (
    "beyond",
    "confirm",
    "coordinates",
    "defaults",
    "finetuning",
    "paired",
    "scaling",
    "search",
    "sizes",
    "stability",
    "streaming",
    "takeover",
    "transfer",
    "wiring",
)
SCRIPTS = ["report.py", "moga.py", "search/rounding.py", *(f"{name}/run.py" for name in STUDIES)]


def test_the_pages_are_what_the_results_say():
    done = run("studies/report.py", "--check")
    assert done.code == 0, done.out + done.err


def test_a_page_that_was_edited_by_hand_is_noticed(tmp_path):
    text = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    edited = tmp_path / "stability.md"
    edited.write_text(text.replace("| weight decay |", "| weight decay! |"), encoding="utf-8")
    assert edited.read_text(encoding="utf-8") != text
    done = run("studies/report.py", "--check", "--page", str(edited))
    assert done.code == 1
    assert "run studies/report.py" in done.out


def test_the_search_for_the_defaults_prints_its_tables():
    done = run("studies/defaults/run.py", "--table", "beyond_mup_2")
    assert done.code == 0
    assert "| base | " in done.out


def test_a_variant_of_momentum_overrides_a_method_that_exists():
    with importable(ROOT / "studies" / "defaults"):
        restless = importlib.import_module("variants").Restless
    names = [name for name in vars(restless) if not name.startswith("_")]
    assert names
    assert all(hasattr(Momentum, name) for name in names)


def test_the_interval_of_a_drift_covers_it_nineteen_times_in_twenty():
    """Optima that fall by a twelfth of an octave a doubling; each width has its own number of seeds and noise."""
    random, covered, trials = np.random.default_rng(0), 0, 1000
    noise = {32: (8, 0.1), 64: (8, 0.2), 128: (5, 0.1), 256: (3, 0.05)}
    with importable(ROOT / "studies"):
        slope = importlib.import_module("confirm.tables").slope
        for _ in range(trials):
            optima = {}
            for width, (seeds, deviation) in noise.items():
                own = -3 - math.log2(width / 32) / 12 + deviation * random.standard_normal(seeds)
                by_seed = dict(enumerate(own.tolist()))
                optima[width] = Optimum("interior", float(own.mean()), None, by_seed, None, None)
            low, high = slope(optima).interval
            covered += low <= -0.25 <= high
    assert 0.93 <= covered / trials <= 0.97


def bent(trial):
    """A parabola whose vertex falls as steps to the power -1/4, and from 400 steps on as steps to the power -3/4."""
    doublings = math.log2(trial.steps / 100)
    best = -3.3 - 0.25 * doublings - 0.5 * max(0.0, doublings - 2) + 0.01 * (trial.seed % 100)
    loss = 2 + 0.1 * (trial.log2_lr - best) ** 2
    return TrialResult(loss, loss, 0.1)


def test_the_sizes_study_puts_the_law_to_the_test(tmp_path, monkeypatch):
    with importable(ROOT / "studies"):
        sizes = importlib.import_module("sizes.run")
        monkeypatch.setattr(sizes, "run_trial", bent)
        monkeypatch.setitem(sizes.TRUTHS, sizes.TRUTH, bent)
        tables = importlib.import_module("sizes.tables")
        part, executor = sizes.PARTS["horizon"][0], Inline()
        assert (tables.table(tmp_path), part.finished("steady", tmp_path)) == ("", False)
        part.measure("steady", dict(sizes.SETTINGS), tmp_path, executor)
        assert part.finished("steady", tmp_path)
        (*_, row) = tables.table(tmp_path).splitlines()
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[:2] == ["steady", "64"]
    assert [cell.split(" ")[0] for cell in cells[5:7]] == ["-0.25", "0.00"]
    prediction, truth = (float(cell.split(" ")[0].removeprefix("2^")) for cell in cells[7:9])
    assert prediction - truth == pytest.approx(1.0, abs=0.011)  # the law bends: an octave by four times the steps
    assert cells[9] == "+1.00 ± 0.00"
    assert float(cells[10].split(" ")[0]) == pytest.approx(0.1, abs=0.005)


@pytest.mark.slow
def test_the_table_of_moga_is_what_its_script_prints():
    done = run("studies/moga.py")
    assert done.code == 0
    assert done.out.strip() in (ROOT / "docs" / "moga.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("script", [*SCRIPTS, "transfer/gpu.py"])
def test_a_script_starts_from_a_shell(script):
    done = run_in_shell(f"studies/{script}", "--help")
    assert done.code == 0, done.err
    assert "usage" in done.out
