"""Where the plan puts each layer of torch, and what it refuses by name."""

import pytest
import torch
from plan_helpers import Bare, roles
from torch import nn

import surefoot as sf
from surefoot import Plan, recipes


@pytest.mark.parametrize(
    "layer",
    [nn.LayerNorm(8), nn.RMSNorm(8), nn.GroupNorm(2, 8), nn.BatchNorm1d(8), nn.BatchNorm2d(8), nn.BatchNorm3d(8)],
    ids=lambda layer: type(layer).__name__,
)
def test_norm_layers(layer):
    plan = Plan.of(layer)
    assert plan["weight"].role.name == "gain"
    assert isinstance(plan["weight"].role.geometry, sf.MaxNorm)
    assert [plan[n].role.name for n in plan if n != "weight"] == ["bias"] * (sum(1 for _ in layer.parameters()) - 1)
    assert type(layer).__name__ in plan["weight"].why


@pytest.mark.parametrize(
    ("layer", "block"),
    [
        (nn.Conv1d(6, 8, 3), (1, 8, 18)),
        (nn.Conv2d(6, 8, (3, 5)), (1, 8, 90)),
        (nn.Conv2d(6, 8, 3, groups=2), (2, 4, 27)),
        (nn.Conv2d(6, 12, 3, groups=6), (6, 2, 9)),
        (nn.Conv1d(6, 6, 4, groups=6), (6, 1, 4)),
        (nn.Conv3d(4, 8, 2, groups=4), (4, 2, 8)),
    ],
    ids=str,
)
def test_convolutions_by_group_on_the_unfolded_patch(layer, block):
    plan = Plan.of(layer)
    assert plan["weight"].blocks[0] == block
    assert plan["weight"].role.name == "conv"
    assert plan["bias"].role.name == "bias"
    assert isinstance(plan["weight"].role.geometry, sf.Spectral)


def test_a_convolution_equals_the_linear_layer_of_its_unfolded_patch():
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, 3, groups=2, bias=False)
    plan = Plan.of(conv)
    plan.initialise_(conv, seed=1)
    x = torch.randn(1, 4, 3, 3)
    (blocks,) = plan["weight"].role.view.split(conv.weight.detach())
    patches = x.reshape(2, 18)
    expected = torch.cat([block @ patch for block, patch in zip(blocks, patches, strict=True)])
    assert torch.allclose(conv(x).flatten(), expected, atol=1e-6)


def test_depthwise_convolution_has_the_head_rule():
    g = torch.randn(6, 1, 4, generator=torch.Generator().manual_seed(0))
    ours = sf.Spectral("svd").direction(g)
    assert torch.allclose(ours, sf.HeadRMS().direction(g.reshape(6, 4)).reshape(6, 1, 4), atol=1e-6)


def test_multihead_attention_fused():
    plan = Plan.of(nn.MultiheadAttention(8, 2, add_bias_kv=True), recipes.beyond_mup())
    assert {name: (plan[name].role.name, plan[name].blocks[0]) for name in plan} == {
        "in_proj_weight": ("linear", (3, 8, 8)),
        "in_proj_bias": ("bias", (3, 8)),
        "bias_k": ("bias", (1, 8)),
        "bias_v": ("bias", (1, 8)),
        "out_proj.weight": ("linear", (1, 8, 8)),
        "out_proj.bias": ("bias", (1, 8)),
    }


def test_multihead_attention_with_separate_projections():
    plan = Plan.of(nn.MultiheadAttention(8, 2, kdim=3, vdim=5, bias=False), recipes.beyond_mup())
    assert {name: plan[name].blocks[0] for name in plan} == {
        "q_proj_weight": (1, 8, 8),
        "k_proj_weight": (1, 8, 3),
        "v_proj_weight": (1, 8, 5),
        "out_proj.weight": (1, 8, 8),
    }
    assert {plan[name].role.name for name in plan} == {"linear"}


@pytest.mark.parametrize(
    ("layer", "blocks"),
    [
        (nn.LSTM(3, 5, proj_size=2), {"ih": (4, 5, 3), "hh": (4, 5, 2), "hr": (1, 2, 5), "bias": (4, 5)}),
        (nn.LSTMCell(3, 5), {"ih": (4, 5, 3), "hh": (4, 5, 5), "bias": (4, 5)}),
        (nn.GRU(3, 5, 2, bidirectional=True), {"ih": (3, 5, 3), "hh": (3, 5, 5), "bias": (3, 5)}),
        (nn.GRUCell(3, 5), {"ih": (3, 5, 3), "hh": (3, 5, 5), "bias": (3, 5)}),
        (nn.RNN(3, 5), {"ih": (1, 5, 3), "hh": (1, 5, 5), "bias": (1, 5)}),
    ],
    ids=lambda x: type(x).__name__,
)
def test_recurrent_layers_have_a_norm_per_gate(layer, blocks):
    plan = Plan.of(layer)
    assert set(plan) == {name for name, _ in layer.named_parameters()}
    for name in plan:
        part = "bias" if name.startswith("bias") else name[7:9]
        expected = blocks[part]
        if part == "ih" and "_l1" in name:
            expected = (*expected[:2], 10)  # both directions of the layer below
        assert plan[name].blocks[0] == expected, name
        assert plan[name].role.name == ("bias" if part == "bias" else "linear")


def test_a_bag_of_embeddings_is_an_embedding():
    assert roles(nn.EmbeddingBag(20, 8)) == {"weight": "embedding"}


@pytest.mark.parametrize("shape", [(), (5,)], ids=str)
def test_bare_vectors_and_scalars(shape):
    model = Bare(*shape)
    plan = Plan.of(model)
    assert plan["layer_scale"].role.name == "scalar"
    assert plan.rows()[0]["shape"] == ("5" if shape else "scalar")
    plan.initialise_(model)
    assert bool((model.layer_scale == 0.5).all())  # as the model has it


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Bare(4, 5), ["layer_scale (4, 5)"]),
        (Bare(1, 5), ["layer_scale (1, 5)"]),
        (Bare(2, 4, 5), ["layer_scale (2, 4, 5)"]),
        (nn.Sequential(nn.Linear(3, 3), nn.Bilinear(3, 4, 5)), ["1.weight"]),
        (nn.Bilinear(3, 4, 5), ["weight (5, 3, 4)"]),
        (nn.Bilinear(3, 4, 1), ["weight (1, 3, 4)"]),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_parameter_without_a_rule_is_refused_by_name_with_the_remedy(model, names):
    with pytest.raises(ValueError, match="cannot place") as error:
        Plan.of(model)
    assert all(name in str(error.value) for name in names)
    assert f"overrides=[('{names[0].split()[0]}'" in str(error.value)
    assert "requires_grad_(False)" in str(error.value)


def test_the_remedies_of_an_unplaceable_matrix_work():
    model = Bare(4, 5)
    assert roles(model, overrides=[("layer_scale", "linear")]) == {"layer_scale": "linear"}
    model.layer_scale.requires_grad_(False)
    assert roles(model) == {}
