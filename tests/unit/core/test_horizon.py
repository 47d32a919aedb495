"""Decay by the length of a run: what `Recipe.over` changes, what it leaves, and who calls it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot import recipes
from surefoot.experiment.data.sources import load
from surefoot.experiment.training.config import TrainConfig
from surefoot.experiment.training.methods import method
from surefoot.experiment.training.run import Run

DECAYS = [sf.WeightDecay(0.5), sf.DecoupledWeightDecay(0.5, sf.Constant(2.0)), sf.contrib.CautiousDecay(0.5),
          sf.contrib.IndependentDecay(0.5), sf.PreDecay(0.5), sf.StreamingPreDecay(0.5, 2),
          sf.DecayedPostClip(0.5, sf.Constant(2.0), 1.0)]  # fmt: skip


def rates(recipe):
    return {kind: role.stabiliser.rate for kind, role in recipe.table.items() if hasattr(role.stabiliser, "rate")}


@pytest.mark.parametrize("steps", [1, 400, 401, 1600, 10**6])
def test_decay_falls_with_the_steps_beyond_the_base_and_nothing_else_changes(steps):
    before, after = recipes.steady(), recipes.steady().over(steps)
    assert rates(after) == pytest.approx({kind: rate * min(1, 400 / steps) for kind, rate in rates(before).items()})
    assert set(rates(before)) >= {"linear", "heads", "embedding", "head", "conv"}
    for kind, role in before.table.items():
        assert replace(after.table[kind], stabiliser=role.stabiliser) == role
    assert (after.name, after.depth) == (before.name, before.depth)


def test_it_is_applied_once():
    once = recipes.steady().over(1600)
    assert once.over(10**6) == once


@pytest.mark.parametrize("decay", DECAYS, ids=str)
def test_every_decay_follows(decay):
    role = replace(recipes.steady().role("linear"), stabiliser=decay)
    assert recipes.HorizonRule(100).of(role, 200).stabiliser == replace(decay, rate=0.25)


@pytest.mark.parametrize("kept", [sf.Free(), sf.PostClip(2.0), sf.Hyperball(), sf.SpectralSphere(1.0)], ids=str)
def test_what_is_no_decay_stays(kept):
    role = replace(recipes.steady().role("linear"), stabiliser=kept)
    assert recipes.HorizonRule().of(role, 10**6) == role


def test_recipes_without_a_rule_stay():
    assert all(recipe.over(10**6) is recipe for recipe in (recipes.muon(), recipes.beyond_mup(), recipes.moonlight()))


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "400"])
def test_other_steps_are_refused(steps):
    with pytest.raises(ValueError, match="steps of a run must be a positive integer"):
        recipes.steady().over(steps)


def test_steps_are_counted_by_any_kind_of_whole_number():
    over = [recipes.steady().over(steps) for steps in (4000, 4000.0, np.int64(4000), torch.tensor(4000))]
    assert over == over[:1] * 4


def test_a_base_below_one_is_refused():
    with pytest.raises(ValueError, match="base of at least 1, not 0"):
        recipes.HorizonRule(0)


@pytest.mark.parametrize(("steps", "factor"), [(400, 1.0), (1600, 0.25)])
def test_a_run_gives_its_length(tmp_path, steps, factor):
    (tmp_path / "a.txt").write_text("some text\n" * 500)
    run = Run(TrainConfig(width=16, depth=1, steps=steps, lr=0.1), load(f"{tmp_path}"))
    assert run.method.recipe.role("linear").stabiliser.rate == pytest.approx(0.08 * factor)


def test_a_stabiliser_that_was_asked_for_is_the_one_that_is_used():
    model = nn.Linear(4, 4)
    plan = method("steady", "weight_decay:0.5").over(10**6).plan(model)
    assert plan.placements["weight"].role.stabiliser == sf.WeightDecay(0.5)


def test_torch_s_own_optimizers_have_no_rule():
    adamw = method("adamw")
    assert adamw.over(10**6) is adamw
