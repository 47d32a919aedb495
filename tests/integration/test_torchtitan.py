"""Our container of optimizers with torchtitan's own models, schedules and checkpoints; its page's code."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed.checkpoint as dcp
from titan_helpers import (
    WQKV,
    ConfigManager,
    LRSchedulersContainer,
    ParamGroupConfig,
    SteepestDescentContainer,
    assert_equal,
    build,
    container,
    plan_of,
    train,
    weights,
)

import surefoot as sf

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


def test_it_takes_the_steps_of_the_optimizer_inside():
    ours, theirs = build(), build()
    losses = train(ours, container(ours, seed=3))
    plan = sf.Plan.of(theirs)
    plan.initialise_(theirs, seed=3)
    assert losses == train(theirs, sf.SteepestDescent(theirs, plan, lr=2**-4))
    assert losses[-1] < losses[0] - 0.5
    assert_equal(weights(ours), weights(theirs))


def test_a_recipe_by_its_name_is_the_plan_that_has_it():
    ours, theirs = container(build(), recipe="muon"), container(build(), **MUON)
    assert digests(ours) == digests(theirs) != digests(container(build()))
    run = sf.Run(4000, 64)
    bounded = container(build(), recipe="steady_bounded", run=run)
    assert digests(bounded) == digests(
        container(build(), plan=lambda part: plan_of(part, sf.recipes.steady_bounded(), run=run))
    )
    with pytest.raises(ValueError, match="unknown recipe 'adamw'; choose one of "):
        container(build(), recipe="adamw")


def digests(optimizers):
    return [digest for group in optimizers.optimizers[0].param_groups for digest in group["plan"]]


def test_torchtitans_schedule_acts_on_it():
    model = build()
    optimizers = container(model)
    schedule = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=4)
    rates = []
    for _ in range(4):
        rates.append({group["lr"] for group in optimizers.optimizers[0].param_groups})
        train(model, optimizers, [schedule], steps=1)
    assert rates == [{2**-5}, {2**-4}, {2**-4}, {2**-5}]


def test_a_hook_before_the_step_runs_once():
    """torchtitan balances experts there."""
    model, calls = build(), []
    optimizers = container(model)
    optimizers.register_step_pre_hook(lambda *_: calls.append(1))
    train(model, optimizers, steps=2)
    assert calls == [1, 1]


BOUNDED = {"plan": lambda part: plan_of(part, stabiliser=sf.PostClip(1.0, period=1))}
STREAMING = {"plan": lambda part: plan_of(part, stabiliser=sf.StreamingPostClip(1.0))}
MUON = {"plan": lambda part: plan_of(part, sf.recipes.muon())}


@pytest.mark.parametrize("options", [{}, BOUNDED, STREAMING, MUON], ids=["free", "bounded", "streaming", "muon"])
def test_asking_for_the_state_before_the_first_step_changes_no_weight(options):
    """torchtitan would make the state by a step of rate 0 with zero gradients, if it were not there."""
    model = build()
    optimizers, before = container(model, **options), weights(model)
    assert f"state.{WQKV}.momentum" in optimizers.state_dict()
    assert_equal(before, weights(model))


@pytest.mark.parametrize("options", [{}, BOUNDED, STREAMING, MUON], ids=["free", "bounded", "streaming", "muon"])
def test_nor_does_it_change_the_steps_to_come(options):
    asked, plain = build(), build()
    optimizers = container(asked, **options)
    optimizers.state_dict()
    assert train(asked, optimizers) == train(plain, container(plain, **options))
    assert_equal(weights(asked), weights(plain))


@pytest.mark.parametrize("options", [{}, BOUNDED, STREAMING, MUON], ids=["free", "bounded", "streaming", "muon"])
def test_a_checkpoint_on_disk_goes_on_bit_for_bit(tmp_path, options):
    """As the trainer saves and loads it: by parameter name, through torch's distributed checkpoints."""
    model = build()
    optimizers = container(model, **options)
    train(model, optimizers)
    dcp.save({"model": model.state_dict(), "optimizer": optimizers.state_dict()}, checkpoint_id=tmp_path)
    train(model, optimizers)
    again = build()
    resumed = container(again, lr=0.9, seed=7, **options)
    loaded = {"model": again.state_dict(), "optimizer": resumed.state_dict()}
    dcp.load(loaded, checkpoint_id=tmp_path)
    again.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["optimizer"])
    train(again, resumed)
    assert_equal(weights(model), weights(again))


def test_a_checkpoint_of_another_plan_is_refused():
    model = build()
    saved = container(model).state_dict()
    other = container(model, plan=lambda part: plan_of(part, stabiliser=sf.PostClip(2.0)))
    with pytest.raises(ValueError, match="another plan"):
        other.load_state_dict({**other.state_dict(), **saved})


def in_the_trainer(**options):
    """A container and its schedule, as the trainer makes them."""
    optimizers = SteepestDescentContainer.Config(**options).build(model_parts=[model := build()])
    schedule = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=20)
    return model, optimizers, schedule


def test_rate_and_schedule_are_those_of_the_run():
    run = sf.Run(20, 64)
    model, optimizers, schedule = in_the_trainer(run=run)
    (group, *_), rates = optimizers.optimizers[0].param_groups, []
    for _ in range(run.steps):
        rates.append(group["lr"])
        train(model, optimizers, [schedule], steps=1)
    peak = sf.recipes.steady().rate(run)
    assert rates == pytest.approx([peak * run.factor(step) for step in range(run.steps)])
    assert group["run"] == str(run)
    with pytest.raises(ValueError, match="learning rate is missing and no run is known"):
        in_the_trainer()


def test_another_run_is_refused_and_another_rate_of_the_law():
    model, optimizers, schedule = in_the_trainer(run=sf.Run(20, 64))
    train(model, optimizers, [schedule])
    saved = optimizers.state_dict()
    with pytest.raises(ValueError, match=r"has Run\(.*=64\), the optimizer Run\(steps=20, tokens=128\)"):
        in_the_trainer(run=sf.Run(20, 128))[1].load_state_dict(saved)
    begun = {key: 0.125 if key.endswith("initial_lr") else value for key, value in saved.items()}
    with pytest.raises(ValueError, match=r"began at lr=0.125, but the law now gives 0\.\d+: give lr=0.125"):
        in_the_trainer(run=sf.Run(20, 64))[1].load_state_dict(begun)
    in_the_trainer(run=sf.Run(20, 64))[1].load_state_dict(saved)
    in_the_trainer(run=sf.Run(20, 64), lr=0.125)[1].load_state_dict(begun)


def test_options_of_torchtitans_own_optimizers_are_refused():
    groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW")]
    with pytest.raises(ValueError, match="param_groups, implementation: for torchtitan's own"):
        container(build(), param_groups=groups, implementation="foreach")


@pytest.fixture
def page(monkeypatch):
    """The section's code as a module that `--module` finds."""
    section = PAGE.read_text(encoding="utf-8").split("\n## torchtitan\n")[1].split("\n## ")[0]
    module = ModuleType("surefoot_page")
    module.sf = sf
    for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        exec(code, vars(module))
    monkeypatch.setitem(sys.modules, "surefoot_page", module)
    return section


@pytest.mark.parametrize(("config", "recipe"), [("llama3_surefoot", "steady"), ("llama3_bounded", "moga_row")])
def test_the_pages_configurations_are_torchtitans(page, config, recipe):
    flags = re.search(r"`torchtitan\.train (--module) your\.module (--config) \w+`", page).groups()
    (own,) = re.findall(r"`(--optimizer\.lr) 0\.03`", page)
    words = [word for pair in zip(flags, ("surefoot_page", config), strict=True) for word in pair]
    choice = re.search(r"`(--optimizer\.recipe) (muon)`", page).groups()
    plain, parsed, other = (ConfigManager().parse_args([*words, *more]) for more in ((), (own, "0.03"), choice))
    assert (plain.optimizer.recipe, other.optimizer.recipe) == (None, "muon")
    json.dumps(parsed.optimizer.to_dict())  # torchtitan logs it
    model = build()
    optimizers = parsed.optimizer.build(model_parts=[model])
    assert {group["lr"] for group in optimizers.optimizers[0].param_groups} == {0.03}
    assert parsed.optimizer.plan(model).recipe.startswith(recipe)
    losses = train(model, optimizers)
    assert losses[-1] < losses[0]
    length = sf.Run(1000, 64 * plain.training.seq_len)
    rate = {"llama3_surefoot": sf.recipes.steady().rate(length), "llama3_bounded": 2**-5}[config]
    assert {group["lr"] for group in plain.optimizer.build(model_parts=[model]).optimizers[0].param_groups} == {rate}
    assert parsed.optimizer.plan(model, run=length).run == length
