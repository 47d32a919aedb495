"""Weight norm `g v / |v|`: v has the kind of the weight, g is a gain whose unit is the length that v starts with."""

import pytest
import torch
from torch import nn

from surefoot import Plan, SteepestDescent
from surefoot.views import Matrix, PerHead

PART, HOOK = nn.utils.parametrizations.weight_norm, nn.utils.weight_norm
NAMES = {PART: ("parametrizations.{}.original0", "parametrizations.{}.original1"), HOOK: ("{}_g", "{}_v")}
by_either = pytest.mark.parametrize("make", NAMES, ids=["part", "hook"])
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")

LAYERS = {
    "linear": (lambda: nn.Linear(12, 48), "weight", 0),
    "one length": (lambda: nn.Linear(12, 48), "weight", None),
    "kernel": (lambda: nn.Conv1d(16, 32, 5), "weight", 0),
    "taps": (lambda: nn.Conv1d(64, 64, 32, groups=4), "weight", 2),  # as HuBERT's positions
    "as tokens": (lambda: nn.Conv1d(32, 1, 3), "weight", 0),
    "transposed kernel": (lambda: nn.ConvTranspose1d(64, 32, 8, stride=4), "weight", 0),
    "gates": (lambda: nn.LSTM(16, 16), "weight_hh_l0", 0),
    "table": (lambda: nn.Embedding(10, 32), "weight", 0),
}


def names_of(make, weight="weight"):
    return [name.format(weight) for name in NAMES[make]]


@by_either
@pytest.mark.parametrize(("layer", "weight", "dim"), LAYERS.values(), ids=LAYERS)
def test_a_normalised_weight_has_the_weights_kind_and_size(make, layer, weight, dim):
    usual = Plan.of(layer())[weight]
    model = make(layer(), weight, dim=dim)
    length, direction = names_of(make, weight)
    plan = Plan.of(model)
    assert plan[direction].digest == usual.digest
    assert plan[length].role.name == "gain"
    assert plan[length].why.startswith(f"lengths in {plan[direction].why}: a gain on parts")
    plan.initialise_(model, seed=0)
    for hook in model._forward_pre_hooks.values():
        hook(model, None)
    made, drawn = getattr(model, weight).detach(), model.get_parameter(direction).detach()
    geometry, view = usual.role.weight_geometry, usual.role.view
    for block, other in zip(view.split(made), view.split(drawn), strict=True):
        torch.testing.assert_close(geometry.norm(block), geometry.norm(other), rtol=0.4, atol=0)
    assert float(made.norm()) == pytest.approx(float(drawn.norm()), rel=0.15)


@pytest.mark.parametrize("dim", [0, 2])
def test_a_step_of_the_lengths_moves_outputs_as_much_at_every_width(dim):
    moved = []
    for width in (16, 256):
        layer = PART(nn.Conv1d(width, width, 8, bias=False), dim=dim)
        plan = Plan.of(layer)
        plan.initialise_(layer, seed=0)
        x = torch.randn(64, width, 8, generator=torch.Generator().manual_seed(0))
        before, length = layer(x), layer.get_parameter(names_of(PART)[0])
        length.grad = torch.ones_like(length)
        SteepestDescent(layer, plan, lr=0.1).step()
        moved.append(float((layer(x) - before).detach().square().mean().sqrt()))
    assert 0.8 < moved[0] / moved[1] < 1.25


@by_either
def test_what_a_normalised_matrix_adds_to_a_stream_falls_with_its_branches(make):
    def block():
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), make(nn.Linear(32, 16)))

    plan = Plan.of(nn.ModuleList([block() for _ in range(16)]))
    length, direction = (f"3.2.{name}" for name in names_of(make))
    alone = Plan.of(make(nn.Linear(32, 16)))[names_of(make)[0]]
    assert plan[length].lr_scales[0] == pytest.approx(alone.lr_scales[0] / 4)
    assert plan[direction].why.endswith("one of 16 branches")
    start, usual = (placement.role.initial for placement in (plan[length], alone))
    values = torch.empty(2, 1, 16)
    for initial, block in zip((start, usual), values, strict=True):
        initial.fill_(block, torch.Generator())
    torch.testing.assert_close(values[0], values[1] / 2)


@by_either
def test_normalised_queries_have_heads(make):
    layer = nn.ModuleDict({"q_proj": make(nn.Linear(8, 8)), "k_proj": nn.Linear(8, 8), "v_proj": nn.Linear(8, 8)})
    layer.head_dim = 4
    assert Plan.of(layer)[f"q_proj.{names_of(make)[1]}"].role.view == PerHead(4, Matrix(), values=False)


@by_either
def test_of_a_weight_that_no_rule_knows_the_lengths_are_refused_too(make):
    with pytest.raises(ValueError, match="cannot place") as error:
        Plan.of(make(nn.Bilinear(3, 4, 5)))
    assert all(name in str(error.value) for name in names_of(make))
    assert "no rule knows the module" in str(error.value)
