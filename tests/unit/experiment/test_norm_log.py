"""The content of a run's norms.jsonl, and that measuring changes no training state."""

import json
from contextlib import ExitStack
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from combinations import combinations
from surefoot import recipes, stabilise
from surefoot.experiment.data.corpus import Corpus
from surefoot.experiment.files import read_lines
from surefoot.experiment.reports import train as report
from surefoot.experiment.reports.report import draw
from surefoot.experiment.training import norm_log
from surefoot.experiment.training.checkpoint import Checkpoints
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.loop import train
from surefoot.experiment.training.methods import METHODS
from surefoot.experiment.training.norm_alarm import Alarms
from surefoot.experiment.training.norm_log import LAYERS, NORMS, NormLog, Norms
from surefoot.experiment.training.run import Run
from surefoot.geometry import Frobenius
from surefoot.plan import Plan

UNITS = {"steady", "beyond_mup", "moga_column", "muon", "hyperball", "frobenius_sphere", "lion", "adamw", "mup_adamw"}
"""Methods whose norms of weights and of steps differ in kind."""
TINY = TrainConfig(width=16, depth=1, steps=12, batch_size=4, context=16, lr=2.0**-5)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    text = np.frombuffer(b"the quick brown fox jumps over the lazy dog, " * 200, dtype=np.uint8)
    return Corpus(text[:8000], text[8000:], "fox", "fox")


def logged(config, corpus, folder, limit=10.0, **options):
    """Train with the log of norms; the result, the lines and the warnings."""
    folder.mkdir(exist_ok=True)
    warned = []

    def warn(step, alarm):
        warned.append((step, alarm.layer))

    with ExitStack() as opened:
        log = cache(lambda run: opened.enter_context(NormLog(run, folder, limit, warn)))
        result = train(config, corpus, observe=lambda run: log(run).write(), **options)
    return result, read_lines(folder / NORMS), warned


def truth(run):
    """Each parameter's natural norm, exactly."""
    norms = {}
    for name, placement in Plan.of(run.model).placements.items():
        blocks = placement.role.view.split(run.model.get_parameter(name).detach().double())
        norms[name] = max(float(placement.role.weight_geometry.norm(w).max()) for w in blocks)
    return norms


@combinations(lambda method: method in UNITS, method=[*METHODS])
def test_norms_are_natural_whatever_the_method(corpus, method):
    run = Run(TINY.replace(method=method), corpus)
    measured = Norms(run, 10.0)
    for _ in range(4):
        run.advance()
    rows = measured.measure()
    for name, norm in truth(run).items():
        row = rows[name]
        assert 0.95 * norm <= row["forward_lower"] <= norm * (1 + 1e-5) <= row["forward_upper"] * (1 + 1e-4), name
    assert measured.bounds_updates == (method not in ("adamw", "mup_adamw"))


@pytest.mark.parametrize(
    ("method", "bound"), [("beyond_mup", "post_clip:2"), ("steady", None), ("muon", None), ("adamw", None)]
)
def test_measuring_changes_no_loss(corpus, tmp_path, method, bound):
    config, plain, records = TINY.replace(method=method, stabiliser=bound), [], []
    first = train(config, corpus, on_step=plain.append, log_every=1)
    second, lines, _ = logged(config, corpus, tmp_path, on_step=records.append, log_every=1)
    assert [record["loss"] for record in plain] == [record["loss"] for record in records]
    assert replace(first, seconds=0) == replace(second, seconds=0)
    assert [line["step"] for line in lines] == list(range(13))


def test_a_line(corpus, tmp_path):
    config = TINY.replace(method="beyond_mup", stabiliser="post_clip:2")
    _, lines, _ = logged(config, corpus, tmp_path, log_every=5)
    layers = json.loads((tmp_path / LAYERS).read_text())
    assert [line["step"] for line in lines] == [0, 5, 10, 12]
    assert lines[0]["norms"]["blocks.0.mlp.up.weight"][0] == pytest.approx(1, rel=0.3)
    del lines[0]
    assert lines[0].keys() == {"step", "lr", "norms", "dependency", "loss_bounds", "moved", "updates"}
    assert lines[0]["lr"] == TINY.lr * TINY.factor(5)
    assert set(lines[0]["norms"]) == set(lines[0]["updates"]) == set(lines[0]["moved"]) == set(layers)
    assert all(0 < moved <= 1.01 * TINY.lr * 16 for moved in lines[0]["moved"].values())
    assert lines[0]["updates"]["blocks.0.mlp.up.weight"] == pytest.approx(lines[0]["lr"], rel=2e-3)
    assert list(lines[0]["loss_bounds"]) == ["head.weight"]
    behind, norm = lines[0]["loss_bounds"]["head.weight"], lines[0]["norms"]["head.weight"]
    assert behind["dependency_upper"] == pytest.approx(4 * norm[1], rel=1e-5)
    assert list(lines[0]["dependency"]) == ["embedding.weight"]
    assert layers["head.weight"] == {
        "role": "head",
        "unit": pytest.approx(np.log(256)),
        "bound": pytest.approx(2 * np.log(256)),
        "limit": pytest.approx(2.02 * np.log(256)),
    }


def test_what_does_not_apply_is_left_out(corpus, tmp_path):
    _, lines, _ = logged(TINY.replace(method="adamw"), corpus, tmp_path / "adamw")
    assert "updates" not in lines[0]
    assert lines[0]["loss_bounds"]["head.weight"].keys() == {"forward_lower", "forward_upper", "dependency_upper"}
    _, lines, _ = logged(TINY.replace(method="lion"), corpus, tmp_path / "lion")
    assert lines[0]["updates"]["blocks.0.mlp_norm.weight"] > 0
    assert lines[0]["updates"]["embedding.weight"] > 0  # signs under the table's norm
    layers = json.loads((tmp_path / "lion" / LAYERS).read_text())
    for name, unit in (("head", np.log(256)), ("embedding", 1.0)):
        factor = max(1.0, recipes.steady().role(name).lr_scale((1, 256, 16)))
        assert layers[f"{name}.weight"]["limit"] == pytest.approx(10 * factor * unit)


@pytest.mark.parametrize(
    ("method", "lr"),
    [
        ("beyond_mup", 1e9),
        ("adamw", 1e30),
        pytest.param("beyond_mup", 1e30, marks=pytest.mark.slow),
        pytest.param("adamw", 1e9, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_blows_up_alarms_and_is_drawn(corpus, tmp_path, method, lr):
    config = TINY.replace(method=method, lr=lr, steps=40)
    result, lines, warned = logged(config, corpus, tmp_path, log_every=100)
    assert result.diverged
    assert lines[-1]["step"] == result.steps
    assert {layer for _, layer in warned} == set(lines[0]["norms"])
    assert [alarm["layer"] for line in lines for alarm in line.get("alarms", [])] == [layer for _, layer in warned]
    summary = report.summarise(tmp_path)
    assert sum(kind["alarms"] for kind in summary["kinds"]) == len(warned)
    assert "limit" in report.statement(summary)
    (tmp_path / "config.json").write_text(json.dumps({"model": "gpt", "width": 16, "steps": 40}))
    assert draw(tmp_path).read_bytes().startswith(b"\x89PNG")


def test_a_bound_that_is_left_at_once_alarms(corpus, tmp_path):
    config = TINY.replace(lr=1e30, steps=40, stabiliser="streaming_post_clip:2")
    result, _, warned = logged(config, corpus, tmp_path)
    assert result.diverged
    assert (10, "blocks.0.mlp.up.weight") in warned


def test_an_ordinary_run_does_not_alarm(corpus, tmp_path):
    _, lines, warned = logged(TINY.replace(lr=2.0**-4, steps=100), corpus, tmp_path, log_every=5)
    assert warned == []
    assert not any("alarms" in line for line in lines)


def test_alarms_are_judged_in_the_sum_of_learning_rates(corpus, tmp_path, monkeypatch):
    times = []

    class Spy(Alarms):
        def __init__(self, layers, end):
            super().__init__(layers, end)
            times.append(end)

        def update(self, time, norms):
            times.append(time)
            return super().update(time, norms)

    monkeypatch.setattr(norm_log, "Alarms", Spy)
    logged(TINY, corpus, tmp_path, log_every=6)
    rates = [TINY.factor(step) for step in range(12)]
    assert times == pytest.approx([sum(rates), 0.0, sum(rates[:6]), sum(rates)])


class Stop(Exception):
    pass


def test_a_resumed_run_repeats_neither_lines_nor_alarms(corpus, tmp_path):
    config = TINY.replace(method="beyond_mup", lr=0.5, data_order="random")
    whole = logged(config, corpus, tmp_path / "whole", 3.0, log_every=1)

    def stop(record):
        if record["step"] == 11:
            raise Stop

    part = Checkpoints(tmp_path / "checkpoints", every=8)
    with pytest.raises(Stop):
        logged(config, corpus, tmp_path / "part", 3.0, log_every=1, on_step=stop, checkpoints=part)
    assert len(read_lines(tmp_path / "part" / NORMS)) == 11
    _, lines, warned = logged(config, corpus, tmp_path / "part", 3.0, log_every=1, checkpoints=part)
    assert [line["step"] for line in lines] == list(range(13))
    assert warned == [warning for warning in whole[2] if warning[0] > 8]
    placements = Plan.of(Run(config, corpus).model).placements
    spectral = {name for name, placement in placements.items() if placement.role.weight_geometry.costly}
    for ours, theirs in zip(lines, whole[1], strict=True):  # the vectors of the estimates start anew
        assert ours.get("moved") == theirs.get("moved")
        assert list(ours["norms"]) == list(theirs["norms"])
        for name, pair in ours["norms"].items():
            assert pair == (
                pytest.approx(theirs["norms"][name], rel=0.02) if name in spectral else theirs["norms"][name]
            )
        assert [a["layer"] for a in ours.get("alarms", [])] == [a["layer"] for a in theirs.get("alarms", [])]
    assert whole[2][0][0] <= 8  # else nothing could have been repeated


def test_a_summary_in_the_unit_of_each_role(corpus, tmp_path):
    _, lines, _ = logged(TINY.replace(stabiliser="post_clip:2"), corpus, tmp_path, log_every=4)
    kinds = {kind["role"]: kind for kind in report.summarise(tmp_path)["kinds"]}
    head = [line["norms"]["head.weight"][0] / np.log(256) for line in lines]
    assert (kinds["head"]["start"], kinds["head"]["last"]) == pytest.approx((head[0], head[-1]))
    assert kinds["head"]["bound"] == pytest.approx(2)
    assert kinds["head"]["largest"] <= 2 * (1 + 1e-3)
    assert kinds["linear"]["layers"] == 6


@pytest.mark.parametrize(
    ("scheme", "bound"),
    [
        (stabilise.Free(), np.inf),
        (stabilise.WeightDecay(0.25), 4.0),
        (stabilise.PreDecay(0.25), 4.0),
        (stabilise.StreamingPreDecay(0.25), 4.0),
        (stabilise.PostClip(3.0), 3.0),
        (stabilise.StreamingPostClip(3.0), 3.0),
        (stabilise.Rescale(3.0), 3.0),
        (stabilise.Normalise(3.0), 3.0),
        (stabilise.Normalise(), np.inf),
        (stabilise.Normalise(3.0, Frobenius()), np.inf),
        (stabilise.SpectralSphere(3.0), 3.0),
        (stabilise.Stiefel(3.0), 3.0),
        (stabilise.RowSphere(3.0), np.inf),
        (stabilise.Hyperball(), np.inf),
    ],
    ids=repr,
)
def test_the_bound_of_a_stabiliser(scheme, bound):
    assert scheme.bound == bound
    assert scheme.scaled(2.0, (1, 4, 4)).bound == 2 * bound


def test_no_norms_no_report(tmp_path):
    with pytest.raises(ValueError, match="has no norms yet"):
        report.summarise(tmp_path)
