"""Everything in `surefoot.contrib`: it trains, goes on from a checkpoint, is the value it was, and has its old name."""

import copy
import importlib
from dataclasses import replace

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot import contrib
from surefoot.identity import digest

RECIPES = ("frobenius_sphere", "muon_squared", "shampoo_muon", "sign_natural", "signum")
VALUES = {  # a field of a role, what is put there, and its digest in checkpoints since version 0.2
    "CautiousDecay": ("stabiliser", contrib.CautiousDecay(0.5), "76cbe26266fb0929"),
    "IndependentDecay": ("stabiliser", contrib.IndependentDecay(0.5), "5411a2202da584a3"),
    "DualScaled": ("geometry", contrib.DualScaled(sf.RowRMS()), "48eb92be7e17d92f"),
    "RadialBrake": ("geometry", contrib.RadialBrake(sf.RowRMS()), "0ea2aa81d844bf98"),
    "UpdateFloor": ("geometry", contrib.UpdateFloor(sf.RowRMS()), "826b7fb267cf0df8"),
    "MeanLookahead": ("geometry", contrib.MeanLookahead(sf.RowRMS()), "46fd80889cec4d4d"),
    "ScheduledMomentum": (
        "momentum",
        contrib.ScheduledMomentum(((0, sf.Momentum(0.5)), (20, sf.Momentum(0.9, 0.7)))),
        "6829830ad62cf3a8",
    ),
    "Whitened": ("momentum", contrib.Whitened(0.9, 0.8), "4cfcd60933bab5f5"),
}
each = pytest.mark.parametrize("name", contrib.__all__)
WIDTH = 12


def recipe_of(name):
    """The recipe, or the default one whose hidden matrices have the value."""
    if name in RECIPES:
        return getattr(contrib, name)()
    base, (field, value, _) = sf.recipes.beyond_mup(), VALUES[name]
    value = replace(value, norm_of=sf.Spectral()) if field == "geometry" else value
    return replace(base, table={**base.table, "linear": replace(base.role("linear"), **{field: value})})


def begun(name):
    model = nn.Sequential(nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, 16))
    plan = sf.Plan.of(model, recipe_of(name), head="3")
    plan.initialise_(model, seed=0)
    return model, sf.SteepestDescent(model, plan, lr=2.0**-5)


def train(model, optimizer, steps):
    tokens, losses = torch.arange(16), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(5))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_each_name_is_tested():
    assert {*contrib.__all__} == {*RECIPES, *VALUES}


@each
def test_it_trains_and_goes_on_from_a_checkpoint_bit_for_bit(name):
    model, optimizer = begun(name)
    losses = train(model, optimizer, 10)
    assert losses[-1] < losses[0]
    other, resumed = begun(name)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 5)
    train(other, resumed, 5)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", VALUES)
def test_a_checkpoint_of_before_is_of_the_same_role(name):
    assert digest(VALUES[name][1]) == VALUES[name][2]


@each
def test_the_former_name_is_found_with_a_warning_and_not_listed(name):
    former = importlib.import_module("surefoot.recipes" if name in RECIPES else "surefoot")
    with pytest.warns(DeprecationWarning, match=rf"{former.__name__}\.{name} moved: surefoot\.contrib\.{name}"):
        assert getattr(former, name) is getattr(contrib, name)
    assert name not in dir(former)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'; it has"):
        _ = former.no_such_name


@pytest.mark.parametrize(
    "geometry", [sf.RMSScaled(sf.RMS()), contrib.DualScaled(sf.RMS()), contrib.MeanLookahead(sf.MaxNorm())], ids=repr
)
def test_vectors_have_adaptive_directions_too(geometry):
    assert sf.check(geometry)["shapes"] == 0
    layer = nn.Linear(3, 4)
    change = ("bias", lambda role: replace(role, geometry=geometry))
    optimizer = sf.SteepestDescent(layer, sf.Plan.of(layer, overrides=[change]), lr=0.1)
    layer.bias.grad = torch.tensor([1.0, -2.0, 0.5, 3.0])
    before = layer.bias.detach().clone()
    optimizer.step()
    assert (layer.bias != before).all()
