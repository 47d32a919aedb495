"""Attention logits are measured while a model trains, and heads above the threshold are rescaled."""

import math
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from attention_helpers import TOKENS, Eager, gpt, llama, measured, random, train
from torch import nn

import surefoot as sf
from surefoot.attention.qk_clip import LogitControl
from surefoot.attention.qk_pairs import Projection, QueryKey
from surefoot.views import Fused


@pytest.mark.parametrize("build", [lambda: llama(kv_heads=2), gpt], ids=["grouped, rotated", "biases"])
def test_no_logit_of_a_batch_is_above_the_bound(build):
    model = build()
    control = LogitControl(model)
    inputs = {}
    for name in control.pairs:
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, x, name=name: inputs.update({name: x[0].detach()})
        )
    largest = measured(model, control)
    assert largest.keys() == control.pairs.keys()
    for name, logits in largest.items():
        r = float(inputs[name].square().mean(-1).amax().sqrt())
        bound = control.pairs[name].bound(r)
        assert (logits <= bound).all()
        assert (logits > 0.02 * bound).all(), "a bound so loose is of another thing"


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("build", [llama, None], ids=["llama", "gpt with biases"])
def test_logits_of_the_same_batch_come_back_to_the_threshold(build, kv_heads):
    model = build(kv_heads=kv_heads) if build else gpt()
    first = "blocks.0.attention"  # what it reads does not depend on any W_q
    before = measured(model, LogitControl(model))[first]
    threshold = float(before.median())
    control = LogitControl(model, threshold)
    optimizer = sf.SteepestDescent(model, lr=0.0)
    optimizer.scale_(control.factors({first: before}))
    torch.testing.assert_close(measured(model, control)[first], before.clamp(max=threshold), rtol=1e-5, atol=0)
    assert before.max() > 1.1 * threshold


def test_layers_that_share_their_weights_get_what_the_larger_logits_need():
    layer = nn.Linear(6, 8, bias=False)
    pair = QueryKey(Projection(layer, Fused(2), 0), Projection(layer, Fused(2), 1), head_dim=4, scale=1.0)
    control = LogitControl(nn.ModuleDict({"a": nn.Identity(), "b": nn.Identity()}), 1.0, {"a": pair, "b": pair})
    for order in (("a", "b"), ("b", "a")):
        largest = dict(zip(order, (torch.tensor([16.0]), torch.tensor([4.0])), strict=True))
        assert control.factors(largest)[layer.weight].unique().tolist() == [0.25]


def test_bounds_taken_for_measurements_make_a_guarantee():
    model = gpt()
    control = LogitControl(model, threshold=0.5)
    assert all((bound > 0.5).any() for bound in control.bounds().values())
    sf.SteepestDescent(model, lr=0.0).scale_(control.factors(control.bounds()))
    assert all((bound <= 0.5 * (1 + 1e-5)).all() for bound in control.bounds().values())


def test_training_far_too_fast_keeps_its_logits_near_the_threshold():
    controlled, free = llama(), llama()
    control = LogitControl(controlled, threshold=4.0)
    train(controlled, control, steps=30, lr=0.25, plan=sf.Plan.of(controlled, sf.recipes.beyond_mup()))
    assert control.largest == {}, "old maxima would hold heads back for ever"
    unheld = LogitControl(free, threshold=1e9)
    train(free, unheld, steps=30, lr=0.25, plan=sf.Plan.of(free, sf.recipes.beyond_mup()))
    grown = max(float(x.max()) for x in measured(free, LogitControl(free)).values())
    limited = max(float(x.max()) for x in measured(controlled, control).values())
    assert grown > 40
    assert limited < 16  # the threshold, and what one step of this size may add


def test_a_layer_that_is_frozen_meanwhile_stays_as_it_is_and_the_others_are_held():
    model = llama()
    control = LogitControl(model, threshold=1e-3)
    frozen, other = (block.attention.query.weight for block in model.blocks[:2])
    optimizer = sf.SteepestDescent(model, lr=1e-6)
    control.hold(optimizer)
    before = [p.detach().clone() for p in (frozen, other)]
    model.blocks[0].requires_grad_(False)
    model(torch.arange(8)[None]).square().mean().backward()
    optimizer.step()
    assert torch.equal(frozen, before[0])
    assert other.norm() < 0.9 * before[1].norm()


def test_a_head_below_the_threshold_is_left_bit_for_bit():
    one, other = llama(), llama()
    train(one, LogitControl(one, threshold=1e6), steps=3, lr=0.05)
    plain = sf.SteepestDescent(other, lr=0.05)
    for _ in range(3):
        plain.zero_grad()
        F.cross_entropy(other(TOKENS)[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
        plain.step()
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_scaling_changes_the_parameter_and_no_state():
    model = llama()
    optimizer = train(model, LogitControl(model), lr=0.05)
    before = {p: {name: x.clone() for name, x in state.items()} for p, state in optimizer.state.items()}
    weight = model.blocks[0].attention.query.weight
    halved = weight.detach() / 2
    optimizer.scale_({weight: torch.full_like(weight, 0.5)})
    assert torch.equal(weight, halved)
    for p, state in optimizer.state.items():
        assert all(torch.equal(before[p][name], x) for name, x in state.items())
    assert before.keys() == optimizer.state.keys() != set()


def test_norm_bounds_stay_true_beside_qk_clip():
    model = llama()
    plan = sf.Plan.of(model, stabiliser=sf.PostClip(1.0))
    plan.initialise_(model)
    optimizer = train(model, LogitControl(model, threshold=0.5), steps=25, plan=plan, lr=0.2)
    norms = [
        float(plan[name].role.weight_geometry.norm(block).max()) / plan[name].stabilisers[0].bound
        for name, p in model.named_parameters()
        for block in plan[name].role.view.split(p.detach())
    ]
    assert max(norms) <= 1 + 1e-3
    assert optimizer.skipped() == {}


def test_batches_since_the_last_step_count_and_evaluation_does_not():
    model = llama()
    control = LogitControl(model)
    handles = control.hold(sf.SteepestDescent(model, lr=0.0))
    single = []
    for tokens in (TOKENS, TOKENS.flip(0) * 3 % 16):
        control.largest = {}
        model(tokens)
        single.append(control.largest)
    control.largest = {}
    model(TOKENS)
    model(TOKENS.flip(0) * 3 % 16)
    for name, both in control.largest.items():
        assert torch.equal(both, torch.maximum(single[0][name], single[1][name]))
        assert not torch.equal(single[0][name], single[1][name])
    control.largest = {}
    with torch.no_grad():
        model(TOKENS)
    assert control.largest == {}
    for handle in handles:
        handle.remove()
    model(TOKENS)
    assert control.largest == {}


def test_the_code_of_the_page():
    page = (Path(__file__).parents[3] / "docs" / "stability.md").read_text(encoding="utf-8")
    section = page.split("\n## Attention logits\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    model = llama()
    names = {"sf": sf, "model": model, "optimizer": sf.SteepestDescent(model, lr=0.1)}
    exec(code, names)
    model(TOKENS)
    assert names["control"].largest.keys() == names["control"].bounds().keys() != set()


def test_what_cannot_be_controlled_is_refused():
    with pytest.raises(ValueError, match="norm's gain bounds their logits"):
        LogitControl(llama(qk_norm=True))
    for threshold in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="must be positive and finite"):
            LogitControl(llama(), threshold)
    with pytest.raises(ValueError, match="this optimizer does not train"):
        sf.SteepestDescent(llama(), lr=0.1).scale_({nn.Parameter(torch.ones(2)): torch.ones(2)})


def test_a_batch_that_is_not_finite_leaves_the_others_measured():
    model = llama()
    control = LogitControl(model)
    control.hold(sf.SteepestDescent(model, lr=0.0))
    model(TOKENS)
    before = {name: x.clone() for name, x in control.largest.items()}
    weight = model.embedding.weight.data.clone()
    model.embedding.weight.data.fill_(math.nan)
    model(TOKENS)
    model.embedding.weight.data.copy_(weight)
    assert all(torch.equal(before[name], x) for name, x in control.largest.items())


def test_evaluation_with_gradients_does_not_count_as_training():
    model = llama()
    control = LogitControl(model)
    control.hold(sf.SteepestDescent(model, lr=0.0))
    model.eval()(TOKENS)
    assert control.largest == {}


def test_parameters_that_the_optimizer_lacks_are_refused_before_anything_is_written():
    model = llama()
    frozen = model.blocks[1].attention.key.weight.requires_grad_(False)
    optimizer = sf.SteepestDescent(model, lr=0.1)
    with pytest.raises(ValueError, match=r"lacks W_q or W_k of blocks\.1\.attention"):
        LogitControl(model).hold(optimizer)
    query = model.blocks[1].attention.query.weight
    before = query.detach().clone()
    with pytest.raises(ValueError, match="this optimizer does not train"):
        optimizer.scale_({query: torch.full_like(query, 0.5), frozen: torch.full_like(frozen, 0.5)})
    assert torch.equal(query, before)
    with pytest.raises(ValueError, match="pairs is empty"):
        LogitControl(model, pairs={})


def test_attention_that_cannot_be_measured_raises():
    model = nn.Sequential(Eager())
    control = LogitControl(model)
    assert list(control.pairs) == ["0"]
    control.hold(sf.SteepestDescent(model, sf.Plan.of(model), lr=0.1))
    with pytest.raises(RuntimeError, match="logits of 0 cannot be measured"):
        model(random(1, 3, 4))
    model.eval()(random(1, 3, 4))


def test_queries_that_start_at_zero_are_measured():
    model = llama()
    for name, p in model.named_parameters():
        if name.endswith("query.weight"):
            p.detach().zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, LogitControl(model), 2, lr=0.1)


def test_a_hook_that_fails_before_is_the_users_error():
    def fail(*_):
        raise ValueError("the user's")

    model = gpt()
    control = LogitControl(model)
    control.hold(sf.SteepestDescent(model, lr=0.1))
    next(iter(control._layers.values())).register_forward_pre_hook(fail, prepend=True)
    with pytest.raises(ValueError, match="the user's"), torch.device("cpu"):
        model(TOKENS)


def test_a_forward_that_fails_changes_nothing():
    model = llama()
    control = LogitControl(model)
    control.hold(sf.SteepestDescent(model, lr=0.1))
    with pytest.raises((RuntimeError, AttributeError, TypeError)):
        model.blocks[0].attention(None, None)
    control.largest = {}
    F.scaled_dot_product_attention(*(random(1, 1, 2, 4) for _ in range(3)))
    assert control.largest == {}
