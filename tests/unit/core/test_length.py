"""A run's length gives its rate, its decay and its schedule: the same by every door, carried by checkpoints."""

import json
import math
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot import recipes
from surefoot.cli import main
from surefoot.experiment.configs import read
from surefoot.experiment.files import read_lines
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.names import LOG2_LR
from surefoot.scaling import LAWS, RateLaw

pytestmark = pytest.mark.usefixtures("undrawn")
RUN = sf.Run(steps=1000, tokens=4096)


def model():
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16, bias=False))


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "10", None, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["steps", "tokens"])
def test_a_run_is_two_positive_whole_numbers(wrong, name):
    with pytest.raises(ValueError, match=f"{name} of a run must be a positive integer, not"):
        sf.Run(**{"steps": 5, "tokens": 5, name: wrong})
    run = sf.Run(**{"steps": 5, "tokens": 5, name: np.int64(9)})
    assert run == sf.Run(**{"steps": 5, "tokens": 5, name: 9.0})  # as num_train_epochs times steps is
    assert type(getattr(run, name)) is int


@pytest.mark.parametrize(("factor", "said"), [(1 / 150, True), (1 / 15, False), (1, False), (15, False), (17, True)])
def test_a_rate_far_from_that_of_a_known_run_is_said_in_one_line(factor, said, caplog):
    plan = sf.Plan.of(model(), run=RUN)
    optimizer = sf.SteepestDescent(model(), plan, lr=factor * plan.rate)
    assert optimizer.param_groups[0]["lr"] == factor * plan.rate
    assert [record.levelname for record in caplog.records] == ["WARNING"] * said
    assert ("is it another optimizer's?" in caplog.text) == said
    caplog.clear()
    sf.SteepestDescent(model(), lr=1e-6)  # no run is known
    assert not caplog.records


def test_a_law_is_a_power_of_both():
    law = RateLaw(-3.0, -0.25, 0.5)
    assert law(sf.Run(150, 1024)) == 0.125
    assert law(sf.Run(150 * 16, 1024)) == pytest.approx(0.0625)
    assert law(sf.Run(150, 4096)) == pytest.approx(0.25)


def test_the_optimizer_takes_rate_and_decay_of_the_run():
    ours = sf.SteepestDescent(net := model(), run=RUN)
    recipe = recipes.steady().over(RUN)
    by_hand = sf.SteepestDescent(net, sf.Plan.of(net, recipe), lr=recipes.steady().rate(RUN))
    assert [g["plan"] for g in ours.param_groups] == [g["plan"] for g in by_hand.param_groups]
    assert {g["lr"] for g in ours.param_groups} == {LAWS["steady"](RUN)} == {g["lr"] for g in by_hand.param_groups}
    plan = sf.Plan.of(net, run=RUN)
    assert plan == sf.Plan.of(net, recipe)
    assert sf.SteepestDescent(net, plan).param_groups[0]["lr"] == plan.rate
    assert sf.SteepestDescent(net, plan, lr=0.5).param_groups[0]["lr"] == 0.5, "an explicit rate wins"
    assert sf.SteepestDescent(net, run=RUN, lr=0.5).param_groups[0]["lr"] == 0.5


def test_print_says_where_the_rate_comes_from():
    plan = sf.Plan.of(model(), run=RUN)
    assert f"lr {plan.rate:.4g}, 2^{math.log2(plan.rate):.2f}, by the law of steady, for 1,000 steps" in str(plan)
    shown = repr(optimizer := sf.SteepestDescent(model(), plan))
    assert "run: Run(steps=1000, tokens=4096)" in shown
    assert shown.endswith(f"\n{plan.lr_reason}\n)")
    assert repr(pickle.loads(pickle.dumps(optimizer))) == shown
    given = sf.SteepestDescent(model(), plan, lr=0.5)
    assert repr(given).endswith("\nlr as given\n)")
    optimizer.load_state_dict(given.state_dict())
    assert repr(optimizer).endswith("\nlr as loaded\n)")
    assert "law" not in str(sf.Plan.of(model()))
    assert "no law, for 1,000 steps" in str(sf.Plan.of(model(), recipes.muon(), run=RUN))


@pytest.mark.parametrize(
    ("steps", "tied", "lr", "said"),
    [(99, True, None, 1), (100, True, None, 0), (99, False, None, 0), (99, True, 0.1, 0)],
)
def test_a_short_run_of_gpt_2s_wiring_is_told_to_take_half(steps, tied, lr, said, caplog):
    net = nn.ModuleDict({"rows": nn.Embedding(64, 16), "positions": nn.Embedding(8, 16), "up": nn.Linear(16, 16)})
    net["head"] = nn.Linear(16, 64, bias=False)
    if tied:
        net["head"].weight = net["rows"].weight
    optimizer = sf.SteepestDescent(net, run=sf.Run(steps, 1024), lr=lr)
    half = f"lr={optimizer.defaults['lr'] / 2:.3g} is better"
    assert len([record for record in caplog.records if half in record.message]) == said


def test_without_a_rate_or_a_law_the_error_says_both_ways():
    both = r"give lr=\.\.\., or SteepestDescent\(model, run=Run\(steps, tokens\)\)"
    with pytest.raises(ValueError, match=rf"learning rate is missing and no run is known: {both}"):
        sf.SteepestDescent(model())
    with pytest.raises(ValueError, match=r"missing and recipe .* has no law: give lr=\.\.\.; .* one of steady, "):
        sf.SteepestDescent(net := model(), sf.Plan.of(net, recipes.muon(), run=RUN))
    with pytest.raises(ValueError, match=r"recipe .* has no law for its learning rate: give lr=\.\.\.; a sweep"):
        recipes.muon().rate(RUN)
    with pytest.raises(ValueError, match=r"give it to the plan, Plan.of\(model, recipe, run=run\)"):
        sf.SteepestDescent(net, sf.Plan.of(net), run=RUN)
    with pytest.raises(ValueError, match="needs a model without a plan"):
        sf.SteepestDescent([{"params": [net[1].weight], "role": "linear"}], run=RUN)


def test_a_step_after_the_end_of_the_schedule_is_said():
    run = sf.Run(7, 3)
    assert run.factor(7) == 0
    with pytest.warns(UserWarning, match="the run of 7 steps is over: its rate is 0"):
        assert run.factor(8) == 0


def test_the_schedule_rises_over_a_tenth_and_falls_to_zero():
    optimizer = sf.SteepestDescent(net := model(), run=(run := sf.Run(20, 64)))
    scheduler, rates = run.schedule(optimizer), []
    for _ in range(run.steps):
        rates.append(optimizer.param_groups[0]["lr"])
        net(torch.arange(4)).sum().backward()
        optimizer.step()
        scheduler.step()
    peak = LAWS["steady"](run)
    assert rates[:3] == pytest.approx([peak / 2, peak, peak])
    assert rates[2:] == pytest.approx([peak * (18 - i) / 18 for i in range(18)])
    assert optimizer.param_groups[0]["lr"] == 0
    config = TrainConfig(steps=20)
    assert [config.factor(s) for s in range(21)] == pytest.approx([run.factor(s) for s in range(21)])


def test_a_checkpoint_carries_the_run(tmp_path):
    first = sf.SteepestDescent(model(), run=RUN)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = sf.SteepestDescent(model(), run=RUN)
    second.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert {group["run"] for group in second.param_groups} == {"Run(steps=1000, tokens=4096)"}
    assert {group["lr"] for group in second.param_groups} == {LAWS["steady"](RUN)}


@pytest.mark.parametrize("now", [replace(RUN, tokens=64), replace(RUN, steps=20), None])
@pytest.mark.parametrize("then", [RUN, None])
def test_a_checkpoint_of_another_run_is_refused(then, now):
    saved, ours = (sf.SteepestDescent(model(), run=run, lr=None if run else 0.5) for run in (then, now))
    if then is now is None:
        ours.load_state_dict(saved.state_dict())
        return
    before = [group["lr"] for group in ours.param_groups]
    words = f"checkpoint has {then or 'no run'}, the optimizer {now or 'no run'}: make the optimizer with "
    words += f"run={then}, or load" if then else "lr=... alone, or load"
    with pytest.raises(ValueError, match=re.escape(words)):
        ours.load_state_dict(saved.state_dict())
    assert [group["lr"] for group in ours.param_groups] == before


def test_a_resumed_run_keeps_the_rate_that_it_began_with(tmp_path, monkeypatch, capsys):
    command = ["train", "--width", "16", "--depth", "1", "--batch-size", "2", "--context", "8", "--data", "markov:64"]
    command += ["--steps", "4", "--checkpoint-every", "2", "--json", "--out", str(tmp_path / "run")]
    assert main(command) == 0
    log = (tmp_path / "run" / "log.jsonl").read_text()
    rate = read(tmp_path / "run" / "config.json")["lr"]
    (tmp_path / "run" / "checkpoints" / "step-00000004.pt").unlink()
    monkeypatch.setattr("surefoot.experiment.training.names.LAWS", {"steady": RateLaw(-9.0, 0.0, 0.0)})
    assert TrainConfig(steps=4).lr == 2**-9, "another version's law"
    capsys.readouterr()
    assert main(command) == 0
    assert f"learning rate {rate:.4g}, which the run began with" in capsys.readouterr().err
    assert [row["lr"] for row in read_lines(tmp_path / "run" / "log.jsonl")] == [
        row["lr"] for row in map(json.loads, log.splitlines())
    ]
    assert main([*command, "--steps", "8"]) == 2
    assert "differs in steps: there 4, now 8: choose" in capsys.readouterr().err


def test_the_command_line_takes_the_same_rate_and_says_so(tmp_path, capsys):
    size = ["--width", "16", "--depth", "1", "--steps", "3", "--batch-size", "2", "--context", "8"]
    data = ["--data", "markov:64", "--json"]
    assert main(["train", *size, *data, "--out", str(tmp_path / "auto")]) == 0
    rate = recipes.steady().rate(sf.Run(3, 16))
    assert read(tmp_path / "auto" / "config.json")["lr"] == rate
    assert f"learning rate {rate:.4g}, the law of steady, for 3 steps of 16 tokens" in capsys.readouterr().err
    assert main(["train", *size, *data, "--lr", "auto", "--recipe", "muon", "--out", str(tmp_path / "muon")]) == 0
    assert read(tmp_path / "muon" / "config.json")["lr"] == 2.0 ** LOG2_LR["muon"]
    assert "the usual one of muon" in capsys.readouterr().err
    assert main(["train", *size, *data, "--lr", "0.25", "--out", str(tmp_path / "own")]) == 0
    assert read(tmp_path / "own" / "config.json")["lr"] == 0.25
    assert "learning rate" not in capsys.readouterr().err


def test_a_resolved_rate_stays_when_other_settings_change():
    config = TrainConfig(steps=400)
    assert config.lr == LAWS["steady"](sf.Run(400, 1024))
    assert config.replace(steps=800).lr == config.lr
    assert replace(config, seed=3).lr == config.lr
