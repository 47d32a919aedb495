"""Parameters placed by the exact class name of their owner: `Conv1D`, fused projections, centred norms, torchtitan."""

import pytest
import torch
from discovery_helpers import kinds, of_class
from torch import nn

from surefoot import Plan, recipes
from surefoot.views import AlternatingStack, Fused, FusedStack, Stack, Transposed


def test_a_gain_centred_on_zero_starts_at_zero_wherever_it_was_built():
    norm = of_class("transformers.models.gemma2.modeling_gemma2.Gemma2RMSNorm", weight=torch.ones(8), eps=1e-6)
    plan = Plan.of(norm)
    plan.initialise_(norm)
    assert plan["weight"].role.name == "gain"
    assert not norm.weight.any()
    assert "centred on 0" in plan["weight"].why


def test_a_layer_norm_centred_on_zero_keeps_its_bias_a_bias():
    class_name = "transformers.models.nemotron.modeling_nemotron.NemotronLayerNorm1P"
    module, _, name = class_name.rpartition(".")
    norm = type(name, (nn.LayerNorm,), {"__module__": module, "__qualname__": name})(8)
    plan = Plan.of(norm)
    plan.initialise_(norm)
    assert kinds(norm) == {"weight": "gain", "bias": "bias"}
    assert not norm.weight.any()


def conv1d(d_in, d_out, name="transformers.pytorch_utils.Conv1D"):
    return of_class(name, weight=torch.randn(d_in, d_out), bias=torch.zeros(d_out))


def test_conv1d_is_stored_transposed():
    layer = conv1d(100, 900)
    plan = Plan.of(layer)
    assert plan["weight"].role.view == Transposed()
    assert (plan["weight"].blocks, plan["bias"].blocks) == (((1, 900, 100),), ((1, 900),))
    plan.initialise_(layer)
    assert layer.weight.std().item() == pytest.approx(3 / (10 + 30), rel=0.01)


@pytest.mark.parametrize("name", ["mine.Conv1D", "transformers.pytorch_utils.Conv1Dx", "transformers.Conv1D"])
def test_a_class_of_another_name_is_not_taken_for_it(name):
    with pytest.raises(ValueError, match="cannot place weight"):
        Plan.of(conv1d(4, 8, name))


@pytest.mark.parametrize(("crossed", "parts"), [(False, 3), (True, 2)])
def test_fused_projections_of_a_known_owner(crossed, parts):
    name = "transformers.models.gpt2.modeling_gpt2.GPT2Attention"
    attention = of_class(name, c_attn=conv1d(4, 4 * parts), c_proj=conv1d(4, 4), is_cross_attention=crossed)
    plan = Plan.of(attention)
    assert plan["c_attn.weight"].role.view == Transposed(Fused(parts))
    assert plan["c_attn.bias"].role.view == Fused(parts)
    assert plan["c_proj.weight"].role.view == Transposed()


def test_a_subclass_of_a_known_owner_is_known_and_a_namesake_is_not():
    known = type(of_class("transformers.models.phi3.modeling_phi3.Phi3MLP"))
    child = type("Mine", (known,), {})(gate_up_proj=nn.Linear(4, 12, bias=False))
    namesake = of_class("mine.Phi3MLP", gate_up_proj=nn.Linear(4, 12, bias=False))
    assert Plan.of(child)["gate_up_proj.weight"].blocks == ((2, 6, 4),)
    assert Plan.of(namesake)["gate_up_proj.weight"].blocks == ((1, 12, 4),)


def test_a_known_owner_of_another_version_is_refused_and_resolved_by_an_override():
    name = "transformers.models.gpt2.modeling_gpt2.GPT2Attention"
    attention = of_class(name, c_attn=conv1d(4, 12))  # without is_cross_attention
    with pytest.raises(ValueError, match=r"cannot place c_attn\.weight"):
        Plan.of(attention)
    assert kinds(attention, overrides=[("c_attn.weight", "linear"), ("c_attn.bias", "bias")])


def test_torchtitans_grouped_queries_are_cut_key_by_key():
    """Two keys of head size 4, three queries each: a key's queries, the key, the value."""
    name = "torchtitan.models.common.attention.FusedQKVLinear"
    owner = of_class(name, wqkv=nn.Linear(6, 40), head_dim=4, heads_per_kv=3, r_dim=5)
    plan = Plan.of(owner, recipes.beyond_mup())
    assert plan["wqkv.weight"].blocks == ((1, 24, 6), (1, 8, 6), (1, 8, 6))
    assert plan["wqkv.bias"].blocks == ((1, 24), (1, 8), (1, 8))
    rows = torch.arange(40.0)[:, None].expand(40, 6)
    queries, keys, values = plan["wqkv.weight"].role.view.split(rows)
    assert [int(x) for x in queries[0, :, 0]] == [*range(12), *range(20, 32)]
    assert [int(x) for x in keys[0, :, 0]] == [*range(12, 16), *range(32, 36)]
    assert [int(x) for x in values[0, :, 0]] == [*range(16, 20), *range(36, 40)]


def test_torchtitans_latent_attention():
    sizes = {"kv_lora_rank": 5, "qk_rope_head_dim": 2, "n_heads": 3, "qk_nope_head_dim": 4, "v_head_dim": 6}
    latents = {"wkv_a": nn.Linear(8, 7, bias=False), "wkv_b": nn.Linear(5, 30, bias=False)}
    plan = Plan.of(of_class("torchtitan.models.deepseek_v3.model.Attention", **latents, **sizes))
    assert plan["wkv_a.weight"].blocks == ((1, 5, 8), (1, 2, 8))
    assert plan["wkv_b.weight"].blocks == ((1, 12, 5), (1, 18, 5))


def test_torchtitans_experts_and_routers():
    grouped = {"w1_EFD": torch.randn(4, 6, 5), "w2_EDF": torch.randn(4, 5, 6), "w3_EFD": torch.randn(4, 6, 5)}
    experts = of_class("torchtitan.models.common.moe.GroupedExperts", **grouped)
    router = of_class("torchtitan.models.common.moe.TokenChoiceTopKRouter", gate=nn.Linear(5, 4))
    assert {**kinds(experts), **kinds(router)} == {
        "w1_EFD": "experts",
        "w2_EDF": "experts",
        "w3_EFD": "experts",
        "gate.weight": "router",
        "gate.bias": "bias",
    }
    paired = {"mlp1_weight_EGD": torch.randn(4, 12, 5), "mlp1_bias_EG": torch.zeros(4, 12)}
    single = {"mlp2_weight_EDF": torch.randn(4, 5, 6), "mlp2_bias_ED": torch.zeros(4, 5)}
    plan = Plan.of(of_class("torchtitan.models.gpt_oss.moe.GptOssGroupedExperts", type(experts), **paired, **single))
    assert {name: (plan[name].role.name, plan[name].role.view) for name in plan} == {
        "mlp1_weight_EGD": ("experts", AlternatingStack(2)),
        "mlp1_bias_EG": ("bias", AlternatingStack(2)),
        "mlp2_weight_EDF": ("experts", Stack()),
        "mlp2_bias_ED": ("bias", FusedStack(1)),
    }
